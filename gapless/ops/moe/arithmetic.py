"""What the kernels of experts compute alike."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

# comes after all experts
NO_EXPERT = tl.constexpr(2**31 - 1)


@triton.jit
def _activated(b_first, b_up, NUM_PARTS: tl.constexpr):
    """Gate by SiLU, or square what is positive of the only part."""
    if NUM_PARTS == 2:
        b_hidden = b_first / (1.0 + tl.exp(-b_first)) * b_up
    else:
        b_first = tl.maximum(b_first, 0.0)
        b_hidden = b_first * b_first
    return b_hidden


@triton.jit
def _gate_weight(gate, i_token, stride_gate, HAS_GATE: tl.constexpr):
    """Return how much of a shared expert a token has: the sigmoid of its gate, or all."""
    weight = 1.0
    if HAS_GATE:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate + i_token * stride_gate).to(tl.float32)))
    return weight
