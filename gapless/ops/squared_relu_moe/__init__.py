"""Weighted sum of chosen experts without gates.

CUDA tensors go to the kernels of gated experts, which leave out the gate, where those serve them,
and to the torch definition otherwise, which is logged once per reason.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from gapless.ops.moe import reference as moe_reference
from gapless.ops.squared_relu_moe import reference

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.moe import Shared

__all__ = ["mix_experts"]

_logger = logging.getLogger(__name__)


def mix_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] acc dtype
    experts: Tensor,  # [T, k] int64, ascending in each row
    up: Tensor,  # [E, I, D]
    down: Tensor,  # [E, D, I]
    *,
    live: Tensor | None = None,  # [T] bool: tokens that are routed at all; None is all of them
    extra: tuple[Tensor, Tensor | None] | None = None,  # term [T, D] and gate [T, 1]
    shared: Shared | None = None,  # where `ops.moe.takes_shared`
) -> Tensor:  # [T, D] in x's dtype
    """Return the weighted sum of every token's experts. Contract: `reference.mix_experts`.

    The options are those of `ops.moe.mix_experts`.
    """
    if x.is_cuda:
        from gapless.ops.moe import triton

        reason = triton.unsupported_mix(x, weights)
        if reason is None:
            return triton.mix_experts(
                x, weights, experts, up, down, live=live, extra=extra, shared=shared
            )
        _log_fallback(reason)
    assert shared is None, "a shared expert is run before"
    return moe_reference.finish(reference.mix_experts(x, weights, experts, up, down), live, extra)


@cache
def _log_fallback(reason: str) -> None:
    _logger.info("experts without gates run on torch operations: no kernel for %s", reason)
