"""Weighted sum of chosen experts without gates.

There is no kernel: CUDA tensors run on the torch definition too, which is logged once.
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
        _log_slow_path()
    return reference.mix_experts(x, weights, experts, up, down, live=live)


@cache
def _log_slow_path() -> None:
    _logger.info("experts without gates run on torch operations: there is no kernel for them")
