"""The kernels behind `triton.py`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _weights(weight, i_first, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return a vector of BLOCK_C channels' weights for each tap, oldest first.

    A channel's weights lie together: four of them are read as such and taken apart in registers.
    """
    if WIDTH == 4:
        o_w = i_first * WIDTH + tl.arange(0, BLOCK_C * WIDTH)
        b_w = tl.load(weight + o_w, mask=o_w < C * WIDTH, other=0.0).to(tl.float32)
        b_even, b_odd = tl.split(tl.reshape(b_w, [BLOCK_C, 2, 2]))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        taps = (b_0, b_1, b_2, b_3)
    else:
        o_c = i_first + tl.arange(0, BLOCK_C)
        taps = ()
        for i_tap in tl.static_range(WIDTH):
            b_tap = tl.load(weight + o_c * WIDTH + i_tap, mask=o_c < C, other=0.0)
            taps = taps + (b_tap.to(tl.float32),)  # noqa: RUF005
    return taps


@triton.jit
def _rows(inputs, past, b_row, num_tokens, stride_input, C: tl.constexpr):
    """Return pointers to rows of the inputs, or of the past that follows them."""
    b_past = past + (b_row - num_tokens) * C
    return tl.where(b_row < num_tokens, inputs + b_row * stride_input, b_past)


@triton.jit
def _tap_sums(
    inputs,
    past,
    taps,
    weight,
    num_tokens,
    stride_input,
    o_t,
    i_first,
    m_c,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Return sums over the taps of some tokens, of BLOCK_C channels from a first one on."""
    m_t = o_t < num_tokens
    o_c = i_first + tl.arange(0, BLOCK_C)
    b_weights = _weights(weight, i_first, C, WIDTH, BLOCK_C)
    b_sum = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for i_tap in tl.static_range(WIDTH):
        b_tap = tl.load(taps + i_tap * num_tokens + o_t, mask=m_t, other=0)
        p_row = _rows(inputs, past, b_tap, num_tokens, stride_input, C)
        p_x = p_row[:, None] + o_c[None, :]
        b_x = tl.load(p_x, mask=m_t[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        b_sum += b_x * b_weights[i_tap][None, :]
    return b_sum


# any number of tokens is served by one compiled kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _convolve_segments_kernel(
    inputs,
    past,
    taps,
    weight,
    bias,
    out,
    num_tokens,
    stride_input,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program owns some channels of some tokens; neighbours find each other's rows in cache."""
    await_inputs(CHAINED)
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    i_first = tl.program_id(0) * BLOCK_C
    o_c = i_first + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_sum = _tap_sums(
        inputs, past, taps, weight, num_tokens, stride_input, o_t, i_first, m_c,
        C, WIDTH, BLOCK_T, BLOCK_C,
    )  # fmt: skip
    if HAS_BIAS:
        b_sum += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if IS_SILU:
        b_sum = b_sum / (1.0 + tl.exp(-b_sum))
    p_out = out + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    mask = (o_t < num_tokens)[:, None] & m_c[None, :]
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve_segments_qkv_kernel(
    inputs,
    past,
    taps,
    weight,
    q,
    k,
    v,
    eps,
    num_tokens,
    stride_input,
    H: tl.constexpr,
    K: tl.constexpr,
    V_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program owns a head of q or of k, or as many channels of v, of some tokens."""
    await_inputs(CHAINED)
    i_part = tl.program_id(0)
    is_key = i_part < 2 * H
    i_value = (i_part - 2 * H) * BLOCK_C
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < tl.where(is_key, K, V_SIZE - i_value)
    b_sum = _tap_sums(
        inputs, past, taps, weight, num_tokens, stride_input, o_t,
        tl.where(is_key, i_part * K, 2 * H * K + i_value), m_c,
        2 * H * K + V_SIZE, WIDTH, BLOCK_T, BLOCK_C,
    )  # fmt: skip
    b_out = (b_sum / (1.0 + tl.exp(-b_sum))).to(v.dtype.element_ty)
    o_row = o_t.to(tl.int64)[:, None]
    mask = (o_t < num_tokens)[:, None] & m_c[None, :]
    if is_key:
        b_x = b_out.to(tl.float32)
        b_x *= (1.0 / tl.sqrt(tl.sum(b_x * b_x, 1) + eps))[:, None]
        p_out = (q if i_part < H else k) + o_row * (H * K) + i_part % H * K + o_c[None, :]
        tl.store(p_out, b_x.to(v.dtype.element_ty), mask=mask)
    else:
        tl.store(v + o_row * V_SIZE + i_value + o_c[None, :], b_out, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _keep_rows_kernel(
    inputs,
    past,
    keep,
    ring,
    write,
    num_tokens,
    stride_input,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program owns some channels of one row. What it reads is no entry of the ring."""
    await_inputs(CHAINED)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    i_row = tl.program_id(1)
    p_row = _rows(inputs, past, tl.load(keep + i_row), num_tokens, stride_input, C)
    b_x = tl.load(p_row + o_c, mask=o_c < C)
    tl.store(ring + tl.load(write + i_row) * C + o_c, b_x, mask=o_c < C)


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve_window_kernel(
    inputs,
    ring,
    write,
    taps,
    weight,
    bias,
    out,
    stride_input,
    num_tokens,
    C: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program owns some channels of one row's window: it reads what only itself writes."""
    await_inputs(CHAINED)
    i_first = tl.program_id(1) * W
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_weights = _weights(weight, tl.program_id(0) * BLOCK_C, C, WIDTH, BLOCK_C)
    for i_w in range(W):
        i_token = (i_first + i_w).to(tl.int64)
        b_x = tl.load(inputs + i_token * stride_input + o_c, mask=m_c)
        tl.store(ring + tl.load(write + i_token) * C + o_c, b_x, mask=m_c)
    if W > 1:
        # other threads may read what this one has stored
        tl.debug_barrier()
    for i_w in range(W):
        i_token = (i_first + i_w).to(tl.int64)
        b_sum = tl.zeros([BLOCK_C], tl.float32)
        for i_tap in tl.static_range(WIDTH):
            if i_tap == WIDTH - 1:
                # the token itself: the ring has it by now, but not sooner than here
                b_x = tl.load(inputs + i_token * stride_input + o_c, mask=m_c, other=0.0)
            else:
                i_entry = tl.load(taps + i_tap * num_tokens + i_token)
                b_x = tl.load(ring + i_entry * C + o_c, mask=m_c, other=0.0)
            b_sum += b_x.to(tl.float32) * b_weights[i_tap]
        if HAS_BIAS:
            b_sum += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)
        if IS_SILU:
            b_sum = b_sum / (1.0 + tl.exp(-b_sum))
        tl.store(out + i_token * C + o_c, b_sum.to(out.dtype.element_ty), mask=m_c)
