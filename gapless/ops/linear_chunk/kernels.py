"""Triton kernel beside the chunk kernels: normalised queries and keys, laid out for them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def _normalize_kernel(
    q,
    k,
    q_out,
    k_out,
    gather,
    eps,
    num_tokens,
    q_stride,
    k_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    HAS_GATHER: tl.constexpr,
):
    # a program owns (token block, head); offsets of long prompts pass 2^31
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    channel = head * K + tl.arange(0, BK)
    m_token = token < num_tokens
    mask = m_token[:, None] & (tl.arange(0, BK) < K)[None, :]
    source = token
    if HAS_GATHER:
        source = tl.load(gather + token, mask=m_token, other=0)
    o_out = token[:, None] * (H * K) + channel[None, :]

    b_q = tl.load(q + source[:, None] * q_stride + channel[None, :], mask=mask, other=0.0)
    b_q = b_q.to(tl.float32)
    b_q *= (1.0 / tl.sqrt(tl.sum(b_q * b_q, 1) + eps))[:, None]
    tl.store(q_out + o_out, b_q.to(q_out.dtype.element_ty), mask=mask)

    b_k = tl.load(k + source[:, None] * k_stride + channel[None, :], mask=mask, other=0.0)
    b_k = b_k.to(tl.float32)
    b_k *= (1.0 / tl.sqrt(tl.sum(b_k * b_k, 1) + eps))[:, None]
    tl.store(k_out + o_out, b_k.to(k_out.dtype.element_ty), mask=mask)
