"""Weighted sum of chosen experts without gates.

CUDA tensors go to the kernels of gated experts, which leave out the gate, where those serve them,
and to the torch definition otherwise, which is logged once per reason.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from gapless.ops.squared_relu_moe import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mix_experts"]

_logger = logging.getLogger(__name__)


def mix_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] acc dtype
    experts: Tensor,  # [T, k] int64, distinct in each row
    up: Tensor,  # [E, I, D]
    down: Tensor,  # [E, D, I]
    *,
    live: Tensor | None = None,  # [T] bool: tokens that are routed at all; None is all of them
) -> Tensor:  # [T, D] in x's dtype
    """Return the weighted sum of every token's experts. Contract: `reference.mix_experts`."""
    if x.is_cuda:
        from gapless.ops.moe import triton

        reason = triton.unsupported_mix(x, weights)
        if reason is None:
            # ids of a sort are views of wider rows
            weights, experts = weights.contiguous(), experts.contiguous()
            return triton.mix_experts(x, weights, experts, up, down, live=live)
        _log_fallback(reason)
    return reference.mix_experts(x, weights, experts, up, down, live=live)


@cache
def _log_fallback(reason: str) -> None:
    _logger.info("experts without gates run on torch operations: no kernel for %s", reason)
