"""The activation of a gated feed-forward block; the definition, and the CPU path.

silu(x) = x / (1 + exp(-x)); the gated form is Shazeer 2020, "GLU Variants Improve Transformer",
equation 6 (SwiGLU, with silu for Swish_1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


def silu_mul(
    gate_up: Tensor,  # [T, 2 I], gate first
) -> Tensor:  # [T, I] in gate_up's dtype
    """Return silu(gate) * up. A kernel may round once where this rounds twice."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
