"""The kernels behind `triton.py`: each program reads whole rows of the weight, once.

With few rows of x a product is as fast as its weight is read, so what counts is how many bytes are
in flight. The *vector* kernel keeps them in registers, one or more weight rows per warp. The
*matrix* kernel keeps them in shared memory, some iterations ahead, and feeds matrix units, whose
padding costs nothing here; its warps share out the columns of an iteration, so that few rows of
the weight make a program and no partial sum leaves it. The *wide* kernel does that without slices,
its warps share out the weight's rows. In these two a row of x adds up in the same order however
many others there are; in the vector kernel that may differ between numbers of rows.

The matrix and the wide kernel also take a weight in float8 with a scale per row. Its entries are
made x's type by way of float32: hardware turns pairs of them into float16, and straight from there
to bfloat16 it converts too few a cycle to keep up with memory.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit(do_not_specialize=["num_rows", "N"])
def _skinny_vector_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    stride_x,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)[None, None, :]
    m_n = (o_n < N)[None, :, None]
    m_m = (o_m < num_rows)[:, None, None]
    p_w = weight + o_n.to(tl.int64)[None, :, None] * K + o_k
    # as wide as the weight's block: every warp loads what it multiplies, none waits for another
    p_x = x + (o_m.to(tl.int64)[:, None, None] * stride_x + o_n[None, :, None] * 0 + o_k)
    b_sum = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K], tl.float32)
    for i_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        m_w = m_n
        m_x = m_m
        if HAS_TAIL:
            m_w = m_n & (i_k + o_k < K)
            m_x = m_m & (i_k + o_k < K)
        b_w = tl.load(p_w + i_k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)
        b_sum += b_w.to(tl.float32) * b_x.to(tl.float32)
    b_out = tl.sum(b_sum, axis=2)
    if HAS_BIAS:
        b_out += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    p_out = out + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
    mask = (o_m < num_rows)[:, None] & (o_n < N)[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _widened(b_w, dtype: tl.constexpr, IS_FLOAT8: tl.constexpr):
    """Return float8 entries in another type; others as they are."""
    if IS_FLOAT8:
        b_w = b_w.to(tl.float32).to(dtype)
    return b_w


@triton.jit(do_not_specialize=["num_rows", "N"])
def _skinny_matrix_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    num_rows,
    stride_x,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_k = tl.arange(0, BLOCK_K)
    o_s = tl.arange(0, SLICES)[:, None, None] * BLOCK_K
    o_w = o_s + o_k[None, None, :]
    o_x = o_s + o_k[None, :, None]
    m_n = (o_n < N)[None, :, None]
    m_m = (o_m < num_rows)[None, None, :]
    p_w = weight + o_n.to(tl.int64)[None, :, None] * K + o_w
    p_x = x + o_m.to(tl.int64)[None, None, :] * stride_x + o_x
    b_sum = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(0, K, SLICES * BLOCK_K):
        m_w = m_n
        m_x = m_m
        if HAS_TAIL:
            m_w = m_n & (i_k + o_w < K)
            m_x = m_m & (i_k + o_x < K)
        b_w = tl.load(p_w + i_k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)
        b_sum = tl.dot(_widened(b_w, b_x.dtype, HAS_SCALES), b_x, b_sum, input_precision=PRECISION)
    b_out = tl.sum(b_sum, axis=0)
    if HAS_SCALES:
        b_out *= tl.load(scales + o_n, mask=o_n < N, other=0.0)[:, None]
    if HAS_BIAS:
        b_out += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
    p_out = out + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    mask = (o_m < num_rows)[None, :] & (o_n < N)[:, None]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "N"])
def _skinny_wide_kernel(
    x,
    weight,
    scales,
    bias,
    out,
    num_rows,
    stride_x,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)
    o_w = tl.arange(0, BLOCK_K)[None, :]
    o_x = tl.arange(0, BLOCK_K)[:, None]
    m_n = (o_n < N)[:, None]
    m_m = (o_m < num_rows)[None, :]
    p_w = weight + o_n.to(tl.int64)[:, None] * K + o_w
    p_x = x + o_m.to(tl.int64)[None, :] * stride_x + o_x
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(0, K, BLOCK_K):
        m_w = m_n
        m_x = m_m
        if HAS_TAIL:
            m_w = m_n & (i_k + o_w < K)
            m_x = m_m & (i_k + o_x < K)
        b_w = tl.load(p_w + i_k, mask=m_w, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + i_k, mask=m_x, other=0.0)
        b_sum = tl.dot(_widened(b_w, b_x.dtype, HAS_SCALES), b_x, b_sum, input_precision=PRECISION)
    if HAS_SCALES:
        b_sum *= tl.load(scales + o_n, mask=o_n < N, other=0.0)[:, None]
    if HAS_BIAS:
        b_sum += tl.load(bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[:, None]
    p_out = out + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=m_m & m_n)
