"""The kernels behind `triton.py`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.gates.kernels import _softplus

GATE_ALONE = tl.constexpr(0)
GATE_FIRST = tl.constexpr(1)


@triton.jit
def _discretise_kernel(
    x, dt, dt_bias, rate, values, decay, x_stride, dt_stride, low, high,
    HEADS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Some channels of one token; the first of each head stores its decay."""
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_c < HEADS * V
    head = o_c // V
    b_dt = tl.load(dt + i_token * dt_stride + head, mask, other=0.0).to(tl.float32)
    b_step = _softplus(b_dt + tl.load(dt_bias + head, mask, other=0.0))
    b_step = tl.minimum(tl.maximum(b_step, low), high)
    b_x = tl.load(x + i_token * x_stride + o_c, mask, other=0.0).to(tl.float32)
    tl.store(values + i_token * (HEADS * V) + o_c, b_x * b_step, mask)
    b_rate = tl.load(rate + head, mask, other=0.0)
    tl.store(decay + i_token * HEADS + head, b_step * b_rate, mask & (o_c % V == 0))


@triton.jit
def _skip_gate_norm_kernel(
    out, x, z, skip, weight, result, out_stride, x_stride, z_stride, eps,
    SIZE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, ORDER: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One group's channels of one token."""
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, BLOCK)
    mask = o_g < SIZE
    o_c = tl.program_id(1) * SIZE + o_g
    b_skip = tl.load(skip + o_c // V, mask, other=0.0)
    b_x = tl.load(x + i_token * x_stride + o_c, mask, other=0.0).to(tl.float32)
    b_y = tl.load(out + i_token * out_stride + o_c, mask, other=0.0).to(tl.float32) + b_x * b_skip
    b_z = tl.load(z + i_token * z_stride + o_c, mask, other=0.0).to(tl.float32)
    b_gate = b_z / (1.0 + tl.exp(-b_z))
    if ORDER == GATE_ALONE:
        b_y *= b_gate
    else:
        if ORDER == GATE_FIRST:
            b_y *= b_gate
        inverse = tl.rsqrt(tl.sum(b_y * b_y) * (1.0 / SIZE) + eps)
        b_y *= inverse * tl.load(weight + o_c, mask, other=0.0)
        if ORDER != GATE_FIRST:
            b_y *= b_gate
    p_result = result + i_token * (tl.num_programs(1) * SIZE) + o_c
    tl.store(p_result, b_y.to(result.dtype.element_ty), mask)
