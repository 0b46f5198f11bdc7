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
def _advance(
    b_state,
    p_k,
    p_w,
    p_u,
    p_g,
    num_tokens,
    o_k,
    o_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_ROW: tl.constexpr,
    BT: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_DECAYED: tl.constexpr,
):
    # through the first tokens of a chunk, whose pointers are at its first; decayed keys are those
    # that the chunk's end sees, and the others are decayed here, up to the last of the tokens
    o_t = tl.arange(0, BT)
    m_t = o_t < num_tokens
    m_k = o_k < K
    m_kt = m_k[:, None] & m_t[None, :]
    b_w = tl.load(
        p_w + o_t[:, None] * (HV * K) + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0
    )
    b_u = tl.load(
        p_u + o_t[:, None] * (HV * V) + o_v[None, :],
        mask=m_t[:, None] & (o_v < V)[None, :],
        other=0.0,
    )
    b_d = b_u.to(tl.float32) - tl.dot(b_w, b_state.to(b_w.dtype), input_precision="ieee")
    b_k = tl.load(p_k + o_t[None, :] * KEY_ROW + o_k[:, None], mask=m_kt, other=0.0)
    b_added = b_d
    if IS_PER_CHANNEL:
        b_end = tl.load(p_g + (num_tokens - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
        if not IS_DECAYED:
            b_g = tl.load(p_g + o_t[None, :] * (HV * K) + o_k[:, None], mask=m_kt, other=0.0)
            b_decay = tl.exp2(tl.where(m_kt, b_end[:, None] - b_g, 0.0))
            b_k = (b_k.to(tl.float32) * b_decay).to(b_k.dtype)
        b_state *= tl.exp2(b_end)[:, None]
    else:
        b_end = tl.load(p_g + (num_tokens - 1) * HV)
        b_g = tl.load(p_g + o_t * HV, mask=m_t, other=0.0)
        b_added = b_d * tl.where(m_t, tl.exp2(b_end - b_g), 0.0)[:, None]
        b_state *= tl.exp2(b_end)
    return tl.dot(b_k, b_added.to(b_k.dtype), b_state, input_precision="ieee"), b_d


@triton.jit
def _scan_kernel(
    k,
    decayed_k,
    w,
    u,
    g,
    checkpoint,
    h,
    d,
    bounds,
    firsts,
    init_rows,
    first_stops,
    stop_tokens,
    stop_rows,
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
    first_stop = tl.load(first_stops + i_segment)
    end_stop = tl.load(first_stops + i_segment + 1)
    if first_stop == end_stop:
        return
    start = tl.load(bounds + i_segment)
    size = tl.load(bounds + i_segment + 1) - start
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    m_state = (o_k < K)[:, None] & (o_v < V)[None, :]
    o_state = i_head * (V * K) + o_k[:, None] + o_v[None, :] * K
    i_key = i_head // (HV // H)
    G_ROW: tl.constexpr = HV * K if IS_PER_CHANNEL else HV
    DECAYED_ROW: tl.constexpr = HV * K if IS_PER_CHANNEL else H * K

    p_h = h + tl.load(firsts + i_segment) * (HV * V * K) + o_state
    p_k = k + start * (H * K) + i_key * K
    p_w = w + (start * HV + i_head) * K
    p_u = u + (start * HV + i_head) * V
    p_d = d + (start * HV + i_head) * V
    if IS_PER_CHANNEL:
        p_g = g + (start * HV + i_head) * K
        p_decayed = decayed_k + (start * HV + i_head) * K
    else:
        p_g = g + start * HV + i_head
        p_decayed = p_k

    init_row = tl.load(init_rows + i_segment)
    b_state = tl.load(checkpoint + init_row * (HV * V * K) + o_state, mask=m_state, other=0.0)
    b_state = b_state.to(tl.float32)
    i_chunk = size * 0
    for i_stop in range(first_stop, end_stop):
        stop = tl.load(stop_tokens + i_stop)
        # chunks that end at the stop or before it; the segment's end ends one
        end_chunk = tl.where(stop == size, tl.cdiv(stop, BT), stop // BT)
        for i in range(i_chunk, end_chunk):
            token = i * BT
            tl.store(p_h + i * (HV * V * K), b_state.to(h.dtype.element_ty), mask=m_state)
            b_state, b_d = _advance(
                b_state,
                p_decayed + token * DECAYED_ROW,
                p_w + token * (HV * K),
                p_u + token * (HV * V),
                p_g + token * G_ROW,
                tl.minimum(size - token, BT),
                o_k,
                o_v,
                HV=HV,
                K=K,
                V=V,
                KEY_ROW=DECAYED_ROW,
                BT=BT,
                IS_PER_CHANNEL=IS_PER_CHANNEL,
                IS_DECAYED=True,
            )
            tl.store(
                p_d + (token + o_t)[:, None] * (HV * V) + o_v[None, :],
                b_d.to(d.dtype.element_ty),
                mask=(token + o_t < size)[:, None] & (o_v < V)[None, :],
            )
        i_chunk = end_chunk
        b_stored = b_state
        token = end_chunk * BT
        if token < stop:
            # within a chunk, which goes on from where it began
            b_stored, _ = _advance(
                b_state,
                p_k + token * (H * K),
                p_w + token * (HV * K),
                p_u + token * (HV * V),
                p_g + token * G_ROW,
                stop - token,
                o_k,
                o_v,
                HV=HV,
                K=K,
                V=V,
                KEY_ROW=H * K,
                BT=BT,
                IS_PER_CHANNEL=IS_PER_CHANNEL,
                IS_DECAYED=False,
            )
        p_row = checkpoint + tl.load(stop_rows + i_stop) * (HV * V * K) + o_state
        tl.store(p_row, b_stored.to(checkpoint.dtype.element_ty), mask=m_state)
