"""Rotary tables whose frequencies are stretched beyond the trained context.

Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", section 3.2,
in the form that transformers computes. With f_i = theta^(-2i / dim):

    turn(n) = dim ln(original / (2 pi n)) / (2 ln theta)     the channel pair that turns n times
    r_i = clamp((i - turn(beta_fast)) / (turn(beta_slow) - turn(beta_fast)), 0, 1)
    frequency_i = (1 - r_i) f_i + r_i f_i / factor
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.attention import RotarySpec, YarnSpec


def yarn_table(
    num_positions: int, rotary: RotarySpec, yarn: YarnSpec, dtype: torch.dtype, device: torch.device
) -> Tensor:  # [num_positions, dim] in dtype promoted to at least float32
    """Return cosines (first half) and sines (second half), both times the attention factor.

    Frequencies and angles are float32, as transformers computes them, or float64 for float64.
    """
    acc = torch.promote_types(dtype, torch.float32)
    dim = rotary.dim
    plain = 1.0 / rotary.theta ** (torch.arange(0, dim, 2, dtype=acc, device=device) / dim)
    low, high = _ramp(rotary, yarn)
    pair = torch.arange(dim // 2, dtype=acc, device=device)
    stretched = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    frequency = plain / yarn.factor * stretched + plain * (1.0 - stretched)
    angle = torch.arange(num_positions, dtype=acc, device=device)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1) * yarn.attention_factor


def _ramp(rotary: RotarySpec, yarn: YarnSpec) -> tuple[float, float]:
    """Channel pairs up to which frequencies are kept, and from which they are fully divided."""
    low, high = (
        rotary.dim
        * math.log(yarn.original_max_position / (turns * 2 * math.pi))
        / (2 * math.log(rotary.theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    # a ramp of no width is a step
    return low, high if high != low else high + 0.001
