"""Kernel bodies of the elementwise gates."""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _softplus(x):
    """Return max(x, 0) + log1p(exp(-|x|)), the latter by Kahan's log(1 + y) y / ((1 + y) - 1)."""
    small = tl.exp(-tl.abs(x))
    above = 1.0 + small
    is_lost = above == 1.0
    rest = tl.where(is_lost, small, tl.log(above) * (small / tl.where(is_lost, 1.0, above - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def _delta_gates_kernel(
    b_ptr, a_ptr, dt_bias_ptr, rate_ptr, beta_ptr, decay_ptr,
    num_tokens, b_stride, a_stride, beta_scale,
    HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    await_inputs(CHAINED)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None]
    head = tl.arange(0, BLOCK_HEADS)[None, :]
    mask = (token < num_tokens) & (head < HEADS)
    b = tl.load(b_ptr + token * b_stride + head, mask, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + token * a_stride + head, mask, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias_ptr + head, head < HEADS, other=0.0)
    rate = tl.load(rate_ptr + head, head < HEADS, other=0.0)
    out = token * HEADS + head
    tl.store(beta_ptr + out, beta_scale / (1.0 + tl.exp(-b)), mask)
    tl.store(decay_ptr + out, _softplus(a + bias) * rate, mask)


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    size,
    x_stride,
    gate_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    x = tl.load(x_ptr + row * x_stride + column, mask, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask, other=0.0).to(tl.float32)
    factor = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype)
    tl.store(out_ptr + row * size + column, x * factor, mask)
