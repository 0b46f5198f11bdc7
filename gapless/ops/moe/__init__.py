"""Mixture of experts: routing, and the weighted sum of the chosen experts.

CUDA tensors go to the Triton kernels where those serve them, and to the torch definition
otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gapless.ops.fallback import log_fallback
from gapless.ops.moe import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Shared", "mix_experts", "route", "takes_shared"]


def route(
    logits: Tensor,  # [T, E]
    num_active: int,  # k
    *,
    renormalises: bool,
) -> tuple[Tensor, Tensor]:  # weights [T, k] acc dtype, experts [T, k] int64
    """Choose the k most probable experts of every token. Contract: `reference.route`."""
    if logits.is_cuda:
        from gapless.ops.moe import triton

        reason = triton.unsupported_logits(logits)
        if reason is None:
            return triton.route(logits, num_active, renormalises=renormalises)
        log_fallback("experts run", reason)
    return reference.route(logits, num_active, renormalises=renormalises)


class Shared(NamedTuple):
    """An expert that every token has, weighted by the sigmoid of its gate where there is one."""

    gate_up: Tensor  # [2 S, D], gate first; without gates [S, D]
    down: Tensor  # [D, S]
    gate: Tensor | None  # [T, 1]


def takes_shared(x: Tensor, weights: Tensor, experts: Tensor) -> bool:
    """Return whether `mix_experts` runs a shared expert beside these chosen ones."""
    if not x.is_cuda:
        return False
    from gapless.ops.moe import triton

    return triton.unsupported_mix(x, weights) is None and triton.gathers(experts)


def mix_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] acc dtype
    experts: Tensor,  # [T, k] int64, ascending in each row
    gate_up: Tensor,  # [E, 2 I, D], gate first, or without gates [E, I, D]
    down: Tensor,  # [E, D, I]
    *,
    live: Tensor | None = None,  # [T] bool: tokens that are routed at all; None is all of them
    shared: Shared | None = None,  # where `takes_shared`
    extra: tuple[Tensor, Tensor | None] | None = None,  # elsewhere: term [T, D] and gate [T, 1]
) -> Tensor:  # [T, D] in x's dtype
    """Return the weighted sum of every token's chosen experts. Contract: `reference.mix_experts`.

    `shared` adds an expert that every token has; `extra` is what one that was run before adds,
    term * sigmoid(gate), or the term where there is no gate. Rows that are not live are zeros, and
    no expert is read for them on a GPU.
    """
    if x.is_cuda:
        from gapless.ops.moe import triton

        reason = triton.unsupported_mix(x, weights)
        if reason is None:
            return triton.mix_experts(
                x, weights, experts, gate_up, down, live=live, extra=extra, shared=shared
            )
        log_fallback("experts run", reason)
    assert shared is None, "a shared expert is run before"
    out = reference.mix_experts(x, weights, experts, gate_up, down)
    return reference.finish(out, live, extra)
