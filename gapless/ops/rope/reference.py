"""Rotary position embedding from a table; the definition, and the CPU path.

Su et al. 2021, "RoFormer", equation 34, with the pairing of the two halves (i, i + rotary_dim/2)
that Hugging Face models use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rotary_table(
    num_positions: int, rotary_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> Tensor:  # [num_positions, rotary_dim] in dtype promoted to at least float32
    """Return cos (first half) and sin (second half) of position * theta^(-2i / rotary_dim).

    Frequencies and angles are float32, as transformers computes them, or float64 for float64.
    """
    acc = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, rotary_dim, 2, dtype=acc, device=device)
    inverse_frequency = 1.0 / theta ** (steps / rotary_dim)
    positions = torch.arange(num_positions, dtype=acc, device=device)
    angle = positions[:, None] * inverse_frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def apply_rotary(
    x: Tensor,  # [T, H, D]
    table_rows: Tensor,  # [T, rotary_dim], the tokens' rows of `rotary_table`
) -> Tensor:  # [T, H, D] in x's dtype
    """Rotate the first rotary_dim channels of every head; the others pass through."""
    num_tokens, num_heads, head_dim = x.shape
    rotary_dim = table_rows.shape[1]
    cos, sin = table_rows.view(num_tokens, 1, 2, -1).unbind(2)
    pair = x[..., :rotary_dim].to(table_rows.dtype).unflatten(2, (2, -1))
    first, second = pair.unbind(2)
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=2)
    rotated = rotated.view(num_tokens, num_heads, rotary_dim).to(x.dtype)
    if rotary_dim == head_dim:
        return rotated
    return torch.cat([rotated, x[..., rotary_dim:]], dim=-1)
