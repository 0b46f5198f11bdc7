"""The kernels behind `triton.py`.

A *pair* is one token with one of its chosen experts; pair `token * k + j` is the j-th in ascending
order of their ids. Few pairs run as products of a matrix with a vector, each reading its expert's
matrices. Many are sorted by expert, so that a tile of them shares a read; then a token's results
are summed. Either way a token adds its experts in order, in float32, and rounds once.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs

NO_EXPERT = tl.constexpr(2**31 - 1)


@triton.jit
def _route_kernel(
    logits,
    bias,
    weights,
    experts,
    stride_token,
    scale,
    sum_eps,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    OPEN_GROUPS: tl.constexpr,  # that experts may be chosen from
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_BIASED_SIGMOID: tl.constexpr,  # else a softmax
    HAS_RENORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Choose a token's experts, and store them in ascending order."""
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_g = tl.arange(0, BLOCK_G)
    o_i = tl.arange(0, BLOCK_E)[None, :]
    m_e = (o_g < GROUPS)[:, None] & (o_i < GROUP_SIZE)
    o_e = tl.where(m_e, o_g[:, None] * GROUP_SIZE + o_i, NO_EXPERT)
    p_logit = logits + i_token * stride_token + o_e
    b_logit = tl.load(p_logit, mask=m_e, other=float("-inf")).to(tl.float32)
    if IS_BIASED_SIGMOID:
        b_score = 1.0 / (1.0 + tl.exp(-b_logit))
        b_left = b_score + tl.load(bias + o_e, mask=m_e, other=0.0)
    else:
        b_score = tl.exp(b_logit - tl.max(b_logit))
        b_score /= tl.sum(b_score)
        b_left = b_score
    # what is NaN comes after all scores, then closed groups, then what is chosen or no expert
    b_left = tl.where(b_left > -1e36, b_left, -1e37)
    b_left = tl.where(m_e, b_left, float("-inf"))
    if OPEN_GROUPS < GROUPS:
        b_worth = tl.max(b_left, axis=1)
        if IS_BIASED_SIGMOID:
            is_best = b_left == b_worth[:, None]
            best = tl.min(tl.where(is_best, o_e, NO_EXPERT), axis=1)[:, None]
            b_worth += tl.max(tl.where(o_e == best, float("-inf"), b_left), axis=1)
        b_is_open = o_g < 0
        for _ in range(OPEN_GROUPS):
            most = tl.max(b_worth)
            group = tl.min(tl.where(b_worth == most, o_g, GROUPS))
            b_is_open |= o_g == group
            b_worth = tl.where(o_g == group, float("-inf"), b_worth)
        b_left = tl.where(m_e & (b_is_open == 0)[:, None], -1e38, b_left)
    for _ in range(K):
        most = tl.max(b_left)
        expert = tl.min(tl.where(b_left == most, o_e, NO_EXPERT))
        b_left = tl.where(o_e == expert, float("-inf"), b_left)
    m_chosen = m_e & (b_left == float("-inf"))
    b_count = m_chosen.to(tl.int32)
    b_place = tl.cumsum(b_count, axis=1) - 1
    if GROUPS > 1:
        is_before = o_g[None, :] < o_g[:, None]
        b_before = tl.where(is_before, tl.sum(b_count, axis=1)[None, :], 0)
        b_place += tl.sum(b_before, axis=1)[:, None]
    b_weight = tl.where(m_chosen, b_score, 0.0)
    if HAS_RENORM:
        b_weight /= tl.sum(b_weight) + sum_eps
    tl.store(weights + i_token * K + b_place, b_weight * scale, mask=m_chosen)
    tl.store(experts + i_token * K + b_place, o_e.to(tl.int64), mask=m_chosen)


@triton.jit
def _activated(b_first, b_up, NUM_PARTS: tl.constexpr):
    """Gate by SiLU, or square what is positive of the only part."""
    if NUM_PARTS == 2:
        b_hidden = b_first / (1.0 + tl.exp(-b_first)) * b_up
    else:
        b_first = tl.maximum(b_first, 0.0)
        b_hidden = b_first * b_first
    return b_hidden


@triton.jit
def _gate_weight(gate, i_token, stride_gate, HAS_GATE: tl.constexpr):
    """Return how much of a shared expert a token has: the sigmoid of its gate, or all."""
    weight = 1.0
    if HAS_GATE:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate + i_token * stride_gate).to(tl.float32)))
    return weight


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


@triton.jit
def _experts_of(experts, live, o_p, num_pairs, K: tl.constexpr, HAS_LIVE: tl.constexpr):
    b_expert = tl.load(experts + o_p, mask=o_p < num_pairs, other=NO_EXPERT)
    if HAS_LIVE:
        b_live = tl.load(live + o_p // K, mask=o_p < num_pairs, other=0)
        b_expert = tl.where(b_live != 0, b_expert, NO_EXPERT)
    return b_expert


# any number of pairs is served by one compiled kernel
@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts,
    live,
    starts,
    order,
    num_pairs,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Place one expert's pairs behind those of lower experts, in ascending order."""
    await_inputs(CHAINED)
    i_expert = tl.program_id(0)
    b_lower = tl.zeros([BLOCK], tl.int32)
    b_own = tl.zeros([BLOCK], tl.int32)
    for i_first in range(0, num_pairs, BLOCK):
        o_p = i_first + tl.arange(0, BLOCK)
        b_expert = _experts_of(experts, live, o_p, num_pairs, K, HAS_LIVE)
        b_lower += (b_expert < i_expert).to(tl.int32)
        b_own += (b_expert == i_expert).to(tl.int32)
    place = tl.sum(b_lower)
    # the next expert stores the same number; only the last one has no next
    tl.store(starts + i_expert, place)
    tl.store(starts + i_expert + 1, place + tl.sum(b_own))
    for i_first in range(0, num_pairs, BLOCK):
        o_p = i_first + tl.arange(0, BLOCK)
        b_expert = _experts_of(experts, live, o_p, num_pairs, K, HAS_LIVE)
        b_is_own = (b_expert == i_expert).to(tl.int32)
        own = tl.sum(b_is_own)
        if own > 0:
            tl.store(order + place + tl.cumsum(b_is_own) - 1, o_p, mask=b_is_own > 0)
        place += own


@triton.jit
def _tile_of(starts, i_tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's expert, and its first and end place among the sorted pairs; end 0: none."""
    o_e = tl.arange(0, BLOCK_E)
    b_start = tl.load(starts + o_e, mask=o_e < E, other=0)
    b_end = tl.load(starts + o_e + 1, mask=o_e < E, other=0)
    b_tiles = (b_end - b_start + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(b_tiles) <= i_tile).to(tl.int32))
    before = tl.sum(tl.where(o_e < expert, b_tiles, 0))
    start = tl.sum(tl.where(o_e == expert, b_start, 0))
    end = tl.sum(tl.where(o_e == expert, b_end, 0))
    return expert, start + (i_tile - before) * BLOCK_M, end


@triton.jit
def _grouped_up_kernel(
    x,
    starts,
    order,
    gate_up,
    hidden,
    stride_x,
    D: tl.constexpr,
    INNER: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some hidden features of a tile of pairs, stored in the sorted order."""
    await_inputs(CHAINED)
    expert, first, end = _tile_of(starts, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if end == 0:
        return
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    b_token = tl.load(order + o_m, mask=m_m, other=0) // K
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_x = x + b_token.to(tl.int64)[:, None] * stride_x
    p_gate = gate_up + expert.to(tl.int64) * (NUM_PARTS * INNER * D) + o_n[None, :] * D
    b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_d in range(0, D, BLOCK_K):
        o_d = i_d + tl.arange(0, BLOCK_K)
        b_x = tl.load(p_x + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
        mask = (o_d < D)[:, None] & (o_n < INNER)[None, :]
        b_w = tl.load(p_gate + o_d[:, None], mask=mask, other=0.0)
        b_gate = tl.dot(b_x, b_w, b_gate, input_precision=PRECISION)
        if NUM_PARTS == 2:
            b_v = tl.load(p_gate + INNER * D + o_d[:, None], mask=mask, other=0.0)
            b_up = tl.dot(b_x, b_v, b_up, input_precision=PRECISION)
    b_hidden = _activated(b_gate, b_up, NUM_PARTS).to(hidden.dtype.element_ty)
    p_hidden = hidden + o_m.to(tl.int64)[:, None] * INNER + o_n[None, :]
    tl.store(p_hidden, b_hidden, mask=m_m[:, None] & (o_n < INNER)[None, :])


@triton.jit
def _grouped_down_kernel(
    hidden,
    starts,
    order,
    down,
    terms,
    D: tl.constexpr,
    INNER: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some output features of a tile of pairs, stored by pair."""
    await_inputs(CHAINED)
    expert, first, end = _tile_of(starts, tl.program_id(1), E, BLOCK_E, BLOCK_M)
    if end == 0:
        return
    o_m = first + tl.arange(0, BLOCK_M)
    m_m = o_m < end
    b_pair = tl.load(order + o_m, mask=m_m, other=0).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_x = hidden + o_m.to(tl.int64)[:, None] * INNER
    p_w = down + expert.to(tl.int64) * (D * INNER) + o_n[None, :] * INNER
    b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_i in range(0, INNER, BLOCK_K):
        o_i = i_i + tl.arange(0, BLOCK_K)
        m_i = o_i < INNER
        b_x = tl.load(p_x + o_i[None, :], mask=m_m[:, None] & m_i[None, :], other=0.0)
        b_w = tl.load(p_w + o_i[:, None], mask=m_i[:, None] & (o_n < D)[None, :], other=0.0)
        b_out = tl.dot(b_x, b_w, b_out, input_precision=PRECISION)
    p_out = terms + b_pair[:, None] * D + o_n[None, :]
    b_out = b_out.to(terms.dtype.element_ty)
    tl.store(p_out, b_out, mask=m_m[:, None] & (o_n < D)[None, :])


@triton.jit
def _combine_kernel(
    terms,
    weights,
    live,
    extra,
    extra_gate,
    out,
    stride_extra,
    stride_gate,
    D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    HAS_GATE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Some output features of one token from those of its pairs."""
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    p_out = out + i_token * D + o_d
    # one is known when compiling, the other is not
    if HAS_LIVE:  # noqa: SIM102
        if tl.load(live + i_token) == 0:
            tl.store(p_out, tl.zeros([BLOCK_D], out.dtype.element_ty), mask=o_d < D)
            return
    b_sum = tl.zeros([BLOCK_D], tl.float32)
    for i_k in tl.static_range(K):
        i_pair = i_token * K + i_k
        b_term = tl.load(terms + i_pair * D + o_d, mask=o_d < D, other=0.0)
        b_sum += b_term.to(tl.float32) * tl.load(weights + i_pair)
    if HAS_EXTRA:
        b_term = tl.load(extra + i_token * stride_extra + o_d, mask=o_d < D, other=0.0)
        weight = _gate_weight(extra_gate, i_token, stride_gate, HAS_GATE)
        b_sum += b_term.to(tl.float32) * weight
    tl.store(p_out, b_sum.to(out.dtype.element_ty), mask=o_d < D)
