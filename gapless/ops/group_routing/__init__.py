"""Choice of experts from the best groups of them.

CUDA tensors go to the router's kernel where it serves them, and to the torch definition otherwise,
which is logged once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.specs.feed_forward import Scoring
from gapless.ops.fallback import log_fallback
from gapless.ops.group_routing import reference

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.feed_forward import GroupedMoeSpec

__all__ = ["route_in_groups"]


def route_in_groups(
    logits: Tensor,  # [T, E]
    bias: Tensor | None,  # [E] acc dtype, with `Scoring.BIASED_SIGMOID`
    spec: GroupedMoeSpec,
) -> tuple[Tensor, Tensor]:  # weights [T, k] acc dtype, experts [T, k] int64
    """Choose the k best experts of every token. Contract: `reference.route_in_groups`."""
    if logits.is_cuda:
        from gapless.ops.moe import triton

        reason = triton.unsupported_logits(logits)
        if reason is None:
            assert (bias is None) == (spec.scoring is Scoring.SOFTMAX), (
                "a sigmoid router has a bias"
            )
            return triton.route(
                logits,
                spec.num_active,
                renormalises=spec.renormalises,
                bias=bias,
                groups=triton.Groups(spec.num_groups, spec.num_active_groups),
                scale=spec.scale,
                sum_eps=spec.sum_eps,
            )
        log_fallback("experts run", reason)
    return reference.route_in_groups(logits, bias, spec)
