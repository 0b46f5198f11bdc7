"""The kernel behind `triton.py`: some heads of one token, all of a kind or not."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _qk_norm_rope_kernel(
    qkv,
    rotary,
    pool,
    kv_write,
    norm_weight,
    q_out,
    eps,
    stride_token,
    stride_rotary,
    stride_entry,
    stride_value,
    stride_kv_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    o_d = tl.arange(0, BLOCK_DIM)
    m_d = o_d < HEAD_DIM
    m_qk = o_h < HEADS + KV_HEADS
    m_in = (o_h < HEADS + 2 * KV_HEADS)[:, None] & m_d[None, :]
    o_in = o_h[:, None] * HEAD_DIM
    p_token = qkv + i_token * stride_token
    b_raw = tl.load(p_token + o_in + o_d[None, :], mask=m_in, other=0.0)

    # the other channel of each pair is read again, from the cache
    half: tl.constexpr = ROTARY_DIM // 2
    m_rotated = o_d < ROTARY_DIM
    o_pair = tl.where(m_rotated, tl.where(o_d < half, o_d + half, o_d - half), o_d)
    b_x = b_raw.to(tl.float32)
    b_pair = tl.load(p_token + o_in + o_pair[None, :], mask=m_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        b_inverse = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / HEAD_DIM + eps)
        m_weight = m_qk[:, None] & m_d[None, :]
        b_weight = tl.load(norm_weight + o_in + o_d[None, :], mask=m_weight, other=0.0)
        b_pair_weight = tl.load(norm_weight + o_in + o_pair[None, :], mask=m_weight, other=0.0)
        dtype = q_out.dtype.element_ty
        b_x = (b_x * b_inverse[:, None] * b_weight).to(dtype).to(tl.float32)
        b_pair = (b_pair * b_inverse[:, None] * b_pair_weight).to(dtype).to(tl.float32)
    o_angle = tl.where(o_d < half, o_d, o_d - half)
    p_angle = rotary + i_token * stride_rotary + o_angle
    b_cos = tl.load(p_angle, mask=m_rotated, other=1.0)
    b_sin = tl.load(p_angle + half, mask=m_rotated, other=0.0)
    b_sin = tl.where(o_d < half, -b_sin, b_sin)
    b_turned = b_x * b_cos[None, :] + b_pair * b_sin[None, :]
    b_turned = tl.where(m_rotated[None, :], b_turned, b_x).to(q_out.dtype.element_ty)

    p_q = q_out + i_token * (HEADS * HEAD_DIM) + o_in + o_d[None, :]
    tl.store(p_q, b_turned, mask=(o_h < HEADS)[:, None] & m_d[None, :])
    o_kv = o_h - HEADS
    is_value = o_kv >= KV_HEADS
    o_kv_head = tl.where(is_value, o_kv - KV_HEADS, o_kv)
    p_entry = pool + tl.load(kv_write + i_token).to(tl.int64) * stride_entry
    p_kv = p_entry + o_kv_head * stride_kv_head + tl.where(is_value, stride_value, 0)
    b_kv = tl.where(is_value[:, None], b_raw, b_turned)
    tl.store(p_kv[:, None] + o_d[None, :], b_kv, mask=(o_kv >= 0)[:, None] & m_in)
