"""Many pairs of a token and an expert: sorted by expert, so that a tile of them shares a read.

Pairs are those of `gathered_kernels.py`. Then a token's results are summed: its experts in order,
in float32, rounded once.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.moe.arithmetic import NO_EXPERT, _activated, _gate_weight


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
