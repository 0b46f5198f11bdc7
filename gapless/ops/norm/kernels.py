"""The kernels behind `triton.py`: a program owns some rows and holds each of them whole."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _offsets(o_row, INNER: tl.constexpr, stride_outer, stride_inner):
    """Return where rows start, `INNER` of them under each index of the outer axis."""
    outer = (o_row // INNER).to(tl.int64)
    return outer * stride_outer + (o_row % INNER) * stride_inner


@triton.jit
def _normed(b_x, weight, o_d, eps, D: tl.constexpr):
    b_inverse = tl.rsqrt(tl.sum(b_x * b_x, axis=1) * (1.0 / D) + eps)
    b_weight = tl.load(weight + o_d[None, :], mask=(o_d < D)[None, :], other=0.0)
    return b_x * b_inverse[:, None] * b_weight


# any number of rows is served by one compiled kernel
@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    term,
    weight,
    out,
    total,
    num_rows,
    eps,
    x_outer,
    x_inner,
    term_outer,
    term_inner,
    INNER: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_TERM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """With a term, normalise the rounded sum, and store that too."""
    await_inputs(CHAINED)
    o_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_row < num_rows)[:, None] & (o_d < D)[None, :]
    p_x = x + _offsets(o_row, INNER, x_outer, x_inner)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    o_out = o_row.to(tl.int64)[:, None] * D + o_d[None, :]
    if HAS_TERM:
        p_term = term + _offsets(o_row, INNER, term_outer, term_inner)[:, None] + o_d[None, :]
        b_total = b_x + tl.load(p_term, mask=mask, other=0.0).to(tl.float32)
        b_total = b_total.to(total.dtype.element_ty)
        tl.store(total + o_out, b_total, mask=mask)
        b_x = b_total.to(tl.float32)
    b_out = _normed(b_x, weight, o_d, eps, D)
    tl.store(out + o_out, b_out.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    num_rows,
    eps,
    x_outer,
    x_inner,
    gate_outer,
    gate_inner,
    INNER: tl.constexpr,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SILU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    o_row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_d = tl.arange(0, BLOCK_D)
    mask = (o_row < num_rows)[:, None] & (o_d < D)[None, :]
    p_x = x + _offsets(o_row, INNER, x_outer, x_inner)[:, None] + o_d[None, :]
    p_gate = gate + _offsets(o_row, INNER, gate_outer, gate_inner)[:, None] + o_d[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    b_act = 1.0 / (1.0 + tl.exp(-b_gate))
    if IS_SILU:
        b_act *= b_gate
    b_out = _normed(b_x, weight, o_d, eps, D) * b_act
    p_out = out + o_row.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask)
