"""Triton kernels beside the chunk kernels: normalised queries and keys, and the scan of states."""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit(do_not_specialize=["num_tokens"])
def _normalize_kernel(
    q,
    k,
    q_out,
    k_out,
    eps,
    num_tokens,
    q_stride,
    k_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    # a program owns (token block, head); offsets of long prompts pass 2^31
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    channel = head * K + tl.arange(0, BK)
    m_token = token < num_tokens
    mask = m_token[:, None] & (tl.arange(0, BK) < K)[None, :]
    o_out = token[:, None] * (H * K) + channel[None, :]

    b_q = tl.load(q + token[:, None] * q_stride + channel[None, :], mask=mask, other=0.0)
    b_q = b_q.to(tl.float32)
    b_q *= (1.0 / tl.sqrt(tl.sum(b_q * b_q, 1) + eps))[:, None]
    tl.store(q_out + o_out, b_q.to(q_out.dtype.element_ty), mask=mask)

    b_k = tl.load(k + token[:, None] * k_stride + channel[None, :], mask=mask, other=0.0)
    b_k = b_k.to(tl.float32)
    b_k *= (1.0 / tl.sqrt(tl.sum(b_k * b_k, 1) + eps))[:, None]
    tl.store(k_out + o_out, b_k.to(k_out.dtype.element_ty), mask=mask)


@triton.jit
def _scan_kernel(
    k,
    w,
    u,
    g,
    checkpoint,
    h,
    d,
    bounds,
    firsts,
    rows,
    segments,
    init_rows,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    # a program owns (block of value channels, segment and head); the state is kept as [K, V], so
    # that the product which adds to it does so in place
    i_segment = tl.program_id(1) // HV
    i_head = (tl.program_id(1) % HV).to(tl.int64)
    piece_start = tl.load(segments + i_segment)
    piece_end = tl.load(segments + i_segment + 1)
    if piece_start == piece_end:
        return
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    o_state = i_head * (V * K) + o_k[:, None] + o_v[None, :] * K
    # decay per channel comes with keys of value heads
    i_key = i_head if IS_PER_CHANNEL else i_head // (HV // H)
    KEY_ROW: tl.constexpr = (HV if IS_PER_CHANNEL else H) * K

    init_row = tl.load(init_rows + i_segment)
    b_state = tl.load(checkpoint + init_row * (HV * V * K) + o_state, mask=m_state, other=0.0)
    b_state = b_state.to(tl.float32)
    for i_piece in range(piece_start, piece_end):
        start = tl.load(bounds + i_piece)
        size = tl.load(bounds + i_piece + 1) - start
        first = tl.load(firsts + i_piece)
        p_h = h + first * (HV * V * K) + o_state
        p_w = w + (start * HV + i_head) * K + o_k[None, :]
        p_u = u + (start * HV + i_head) * V + o_v[None, :]
        p_d = d + (start * HV + i_head) * V + o_v[None, :]
        p_k = k + start * KEY_ROW + i_key * K + o_k[:, None]
        p_g = g + (start * HV + i_head) * (K if IS_PER_CHANNEL else 1)
        for i_chunk in range(0, tl.cdiv(size, BT)):
            token = i_chunk * BT + o_t
            m_t = token < size
            last = tl.minimum(i_chunk * BT + BT, size) - 1
            b_read = b_state.to(h.dtype.element_ty)
            tl.store(p_h + i_chunk * (HV * V * K), b_read, mask=m_state)
            m_tv = m_t[:, None] & m_v[None, :]
            b_w = tl.load(
                p_w + token[:, None] * (HV * K), mask=m_t[:, None] & m_k[None, :], other=0.0
            )
            b_d = tl.load(p_u + token[:, None] * (HV * V), mask=m_tv, other=0.0).to(tl.float32)
            b_d -= tl.dot(b_w, b_read, input_precision="ieee")
            tl.store(p_d + token[:, None] * (HV * V), b_d.to(d.dtype.element_ty), mask=m_tv)
            if IS_PER_CHANNEL:
                b_end = tl.load(p_g + last * (HV * K) + o_k, mask=m_k, other=0.0)
                b_state *= tl.exp2(b_end)[:, None]
            else:
                b_end = tl.load(p_g + last * HV)
                b_g = tl.load(p_g + token * HV, mask=m_t, other=0.0)
                b_d *= tl.where(m_t, tl.exp2(b_end - b_g), 0.0)[:, None]
                b_state *= tl.exp2(b_end)
            b_k = tl.load(
                p_k + token[None, :] * KEY_ROW, mask=m_k[:, None] & m_t[None, :], other=0.0
            )
            b_state = tl.dot(b_k, b_d.to(b_k.dtype), b_state, input_precision="ieee")
        row = tl.load(rows + i_piece)
        p_row = checkpoint + row * (HV * V * K) + o_state
        tl.store(p_row, b_state.to(checkpoint.dtype.element_ty), mask=m_state)
