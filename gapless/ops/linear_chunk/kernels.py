"""The Triton kernel beside the chunk kernels: the scan of states."""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _corrections(
    b_state,
    p_w,
    p_u,
    m_t,
    o_k,
    o_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
):
    # d of a chunk's tokens, whose pointers are at its first; each depends on none that comes later
    o_t = tl.arange(0, BT)
    b_w = tl.load(
        p_w + o_t[:, None] * (HV * K) + o_k[None, :],
        mask=m_t[:, None] & (o_k < K)[None, :],
        other=0.0,
    )
    b_u = tl.load(
        p_u + o_t[:, None] * (HV * V) + o_v[None, :],
        mask=m_t[:, None] & (o_v < V)[None, :],
        other=0.0,
    )
    return b_u.to(tl.float32) - tl.dot(b_w, b_state.to(b_w.dtype), input_precision="ieee")


@triton.jit
def _keys(p_k, m_t, o_k, K: tl.constexpr, KEY_ROW: tl.constexpr, BT: tl.constexpr):
    # [K, tokens], as the product with corrections wants them
    o_t = tl.arange(0, BT)
    mask = (o_k < K)[:, None] & m_t[None, :]
    return tl.load(p_k + o_t[None, :] * KEY_ROW + o_k[:, None], mask=mask, other=0.0)


@triton.jit
def _advanced(
    b_state,
    b_d,
    b_k,
    p_g,
    num_tokens,
    o_k,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    IS_DECAYED: tl.constexpr,
):
    # the state after the first tokens of a chunk; decayed keys are those that its end sees, and the
    # others are decayed here, up to the last of the tokens
    o_t = tl.arange(0, BT)
    m_t = o_t < num_tokens
    if IS_PER_CHANNEL:
        m_k = o_k < K
        b_end = tl.load(p_g + (num_tokens - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
        b_decay = tl.exp2(b_end)[:, None]
        b_added = b_d
        if not IS_DECAYED:
            m_kt = m_k[:, None] & m_t[None, :]
            b_g = tl.load(p_g + o_t[None, :] * (HV * K) + o_k[:, None], mask=m_kt, other=0.0)
            b_k = (b_k.to(tl.float32) * tl.exp2(tl.where(m_kt, b_end[:, None] - b_g, 0.0))).to(
                b_k.dtype
            )
            b_added = tl.where(m_t[:, None], b_d, 0.0)
    else:
        b_end = tl.load(p_g + (num_tokens - 1) * HV)
        b_g = tl.load(p_g + o_t * HV, mask=m_t, other=0.0)
        b_decay = tl.exp2(b_end)
        b_added = b_d * tl.where(m_t, tl.exp2(b_end - b_g), 0.0)[:, None]
    return tl.dot(b_k, b_added.to(b_k.dtype), b_state * b_decay, input_precision="ieee")


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
    m_v = o_v < V
    m_state = (o_k < K)[:, None] & m_v[None, :]
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
    i_stop = first_stop
    stop = tl.load(stop_tokens + i_stop)
    for i in range(0, tl.cdiv(size, BT)):
        token = i * BT
        m_t = token + o_t < size
        tl.store(p_h + i * (HV * V * K), b_state.to(h.dtype.element_ty), mask=m_state)
        b_d = _corrections(
            b_state,
            p_w + token * (HV * K),
            p_u + token * (HV * V),
            m_t,
            o_k,
            o_v,
            HV=HV,
            K=K,
            V=V,
            BT=BT,
        )
        tl.store(
            p_d + (token + o_t)[:, None] * (HV * V) + o_v[None, :],
            b_d.to(d.dtype.element_ty),
            mask=m_t[:, None] & m_v[None, :],
        )
        b_k = _keys(p_decayed + token * DECAYED_ROW, m_t, o_k, K=K, KEY_ROW=DECAYED_ROW, BT=BT)
        # states on the way cost one product each, as what corrects the tokens is there; only where
        # its own loop stands in a branch is the loop over chunks one whose loads come ahead
        if stop < tl.minimum(token + BT + 1, size):
            while stop < tl.minimum(token + BT + 1, size):
                # there is a next one: the last stop, the segment's end, is not on the way
                next_stop = tl.load(stop_tokens + i_stop + 1)
                p_row = checkpoint + tl.load(stop_rows + i_stop) * (HV * V * K)
                b_own = b_k
                if IS_PER_CHANNEL:
                    b_own = _keys(p_k + token * (H * K), m_t, o_k, K=K, KEY_ROW=H * K, BT=BT)
                b_stored = _advanced(
                    b_state,
                    b_d,
                    b_own,
                    p_g + token * G_ROW,
                    stop - token,
                    o_k,
                    HV=HV,
                    K=K,
                    BT=BT,
                    IS_PER_CHANNEL=IS_PER_CHANNEL,
                    IS_DECAYED=False,
                )
                tl.store(p_row + o_state, b_stored.to(checkpoint.dtype.element_ty), mask=m_state)
                i_stop += 1
                stop = next_stop
        b_state = _advanced(
            b_state,
            b_d,
            b_k,
            p_g + token * G_ROW,
            tl.minimum(size - token, BT),
            o_k,
            HV=HV,
            K=K,
            BT=BT,
            IS_PER_CHANNEL=IS_PER_CHANNEL,
            IS_DECAYED=True,
        )
    for i in range(i_stop, end_stop):
        p_row = checkpoint + tl.load(stop_rows + i) * (HV * V * K) + o_state
        tl.store(p_row, b_state.to(checkpoint.dtype.element_ty), mask=m_state)
