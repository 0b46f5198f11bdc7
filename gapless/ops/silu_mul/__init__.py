"""The activation of a gated feed-forward block.

CUDA tensors go to the Triton kernel where it serves them, and to the torch definition otherwise,
which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.fallback import log_fallback
from gapless.ops.silu_mul import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["silu_mul"]


def silu_mul(
    gate_up: Tensor,  # [T, 2 I], gate first
) -> Tensor:  # [T, I]
    """Return silu(gate) * up. Contract: `reference.silu_mul`."""
    if gate_up.is_cuda:
        from gapless.ops.silu_mul import triton

        reason = triton.unsupported(gate_up)
        if reason is None:
            return triton.silu_mul(gate_up)
        log_fallback("the gated activation runs", reason)
    return reference.silu_mul(gate_up)
