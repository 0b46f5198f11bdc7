"""Few pairs of a token and an expert: products of a matrix with a vector, each reading its own.

A *pair* is one token with one of its chosen experts; pair `token * k + j` is the j-th in ascending
order of their ids. A token adds its experts in order, in float32, and rounds once.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.moe.arithmetic import _activated, _gate_weight


@triton.jit
def _store_hidden(
    p_x,  # pointer to a token's features
    p_first,  # pointer to the rows of gates, or of ups alone
    p_up,  # pointer to the rows of ups
    p_hidden,
    o_i,
    size,  # number of those rows
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Store hidden features `o_i` of one expert and token."""
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_i = (o_i < size)[:, None]
    BLOCK_I: tl.constexpr = o_i.shape[0]
    o_w = o_i[:, None] * D + o_d
    p_x += o_d
    if STAGES == 1:
        # as wide as the matrices' block: every warp loads what it multiplies, none waits
        p_x += o_i[:, None] * 0
    b_first = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    b_up = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for i_d in tl.range(0, D, BLOCK_D, num_stages=STAGES):
        m_d = i_d + o_d < D
        mask = m_i & m_d
        b_w = tl.load(p_first + o_w + i_d, mask=mask, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_x + i_d, mask=m_d, other=0.0).to(tl.float32)
        if NUM_PARTS == 2:
            b_v = tl.load(p_up + o_w + i_d, mask=mask, other=0.0, eviction_policy="evict_first")
            b_up += b_v.to(tl.float32) * b_x
        b_first += b_w.to(tl.float32) * b_x
    b_hidden = _activated(tl.sum(b_first, axis=1), tl.sum(b_up, axis=1), NUM_PARTS)
    tl.store(p_hidden + o_i, b_hidden.to(p_hidden.dtype.element_ty), mask=o_i < size)


@triton.jit
def _gathered_up_kernel(
    x,
    experts,
    live,
    gate_up,
    shared_gate_up,
    hidden,  # a token's are K * INNER and then SHARED
    stride_x,
    D: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,  # hidden features of a shared expert, 0 for none
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some hidden features of one pair, or as many of the shared expert.

    Programs of the same features follow each other, so that pairs of one expert meet in the cache.
    """
    await_inputs(CHAINED)
    PARTS: tl.constexpr = K + (SHARED + INNER - 1) // INNER
    i_token, i_part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    # one is known when compiling, the other is not
    if HAS_LIVE:  # noqa: SIM102
        if tl.load(live + i_token) == 0:
            return
    o_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    p_x = x + i_token * stride_x
    p_hidden = hidden + i_token * (K * INNER + SHARED) + i_part * INNER
    if i_part < K:
        expert = tl.load(experts + i_token * K + i_part)
        p_first = gate_up + expert * (NUM_PARTS * INNER * D)
        _store_hidden(
            p_x, p_first, p_first + INNER * D, p_hidden, o_i, INNER, D, BLOCK_D, STAGES, NUM_PARTS
        )
    elif SHARED > 0:
        first = (i_part - K) * INNER
        p_first = shared_gate_up + first * D
        _store_hidden(
            p_x, p_first, p_first + SHARED * D, p_hidden, o_i, SHARED - first,
            D, BLOCK_D, STAGES, NUM_PARTS,
        )  # fmt: skip


@triton.jit
def _gathered_down_kernel(
    hidden,
    weights,
    experts,
    live,
    down,
    shared_down,
    shared_gate,
    out,
    stride_gate,
    D: tl.constexpr,
    INNER: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some output features of one token, all of its experts added up."""
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_k = tl.arange(0, BLOCK_K)[:, None, None]
    p_out = out + i_token * D + o_d
    # one is known when compiling, the other is not
    if HAS_LIVE:  # noqa: SIM102
        if tl.load(live + i_token) == 0:
            tl.store(p_out, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=o_d < D)
            return
    # all of them at once, so that their matrices are in flight together
    m_k = o_k < K
    b_expert = tl.load(experts + i_token * K + o_k, mask=m_k, other=0)
    b_weight = tl.load(weights + i_token * K + o_k, mask=m_k, other=0.0)
    o_i = tl.arange(0, BLOCK_I)[None, None, :]
    # hidden features as wide as the matrices' block: every warp loads what it multiplies
    o_h = o_i + o_d[None, :, None] * 0
    m_d = (o_d < D)[None, :, None]
    p_down = down + b_expert * (D * INNER) + o_d[None, :, None] * INNER + o_i
    p_token = hidden + i_token * (K * INNER + SHARED)
    b_shared = tl.zeros([BLOCK_D, BLOCK_S], tl.float32)
    if SHARED > 0:
        o_s = tl.arange(0, BLOCK_S)[None, :]
        o_y = o_s + o_d[:, None] * 0
        for i_s in tl.static_range(0, SHARED, BLOCK_S):
            p_w = shared_down + o_d[:, None] * SHARED + i_s + o_s
            m_s = i_s + o_s < SHARED
            b_v = tl.load(p_w, mask=m_s & (o_d < D)[:, None], other=0.0)
            b_y = tl.load(p_token + K * INNER + i_s + o_y, mask=m_s, other=0.0).to(tl.float32)
            b_shared += b_v.to(tl.float32) * b_y
    b_out = tl.zeros([BLOCK_K, BLOCK_D, BLOCK_I], tl.float32)
    for i_i in range(0, INNER, BLOCK_I):
        m_i = m_k & (i_i + o_i < INNER)
        b_w = tl.load(p_down + i_i, mask=m_i & m_d, other=0.0, eviction_policy="evict_first")
        b_x = tl.load(p_token + o_k * INNER + i_i + o_h, mask=m_i, other=0.0).to(tl.float32)
        b_out += b_w.to(tl.float32) * (b_x * b_weight)
    b_sum = tl.sum(tl.sum(b_out, axis=2), axis=0)
    if SHARED > 0:
        b_sum += tl.sum(b_shared, axis=1) * _gate_weight(
            shared_gate, i_token, stride_gate, HAS_GATE
        )
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=o_d < D)
