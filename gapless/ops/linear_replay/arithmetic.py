"""What the kernels compute with: decays, and products of fp32 on matrix units."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decay(x):
    """Return exp of x <= 0, to about 1e-7 of the result; below 1e-38 it is 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _exact_decay(x):
    """Return exp of x <= 0 to one rounding: the hardware's exp2 is exact at integers only.

    A checkpoint is multiplied by such a factor at every fold, so a biased one would add up.
    """
    x = tl.maximum(x, -87.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.428606765330187e-06
    p = 1.0 / 720 + r * (1.0 / 5040)
    p = 1.0 / 120 + r * p
    p = 1.0 / 24 + r * p
    p = 1.0 / 6 + r * p
    p = 0.5 + r * p
    p = 1.0 + r * p
    return (1.0 + r * p) * tl.exp2(n)


@triton.jit
def _head(x):
    """Return x rounded to the 11 bits that matrix units multiply (TF32)."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _cut(x):
    """Return x cut, not rounded, to 11 bits: the rest then has its sign, and 21 bits meet."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, acc, SPLIT_A: tl.constexpr, SPLIT_B: tl.constexpr):
    """Add a @ b; a split operand enters as head and rest, 23 bits in all.

    Values read as bf16 or fp16 are their own head, and need no split.
    """
    if SPLIT_A:
        a_head = _head(a)
        acc = tl.dot(a - a_head, b, acc=acc, input_precision="tf32")
        a = a_head
    if SPLIT_B:
        b_head = _head(b)
        acc = tl.dot(a, b - b_head, acc=acc, input_precision="tf32")
        b = b_head
    return tl.dot(a, b, acc=acc, input_precision="tf32")


@triton.jit
def _sums(g):
    """Return for each entry the sum of g [N] over it and all later ones."""
    return tl.cumsum(g, 0, reverse=True)
