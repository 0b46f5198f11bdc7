"""Windows of one token of many rows, the first of two launches, with one decay per head.

What a record holds, and what for: `token_stream_kernel.py`.
"""

# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs_only, let_next_start
from gapless.ops.linear_replay.arithmetic import _decay, _sums
from gapless.ops.linear_replay.token_kernel import _key_tiles, _ring, _scores, _vector


@triton.jit(do_not_specialize=["zero_entry"])
def _token_weights_kernel(
    q,
    k,
    beta,
    log_decay,
    records,
    k_ring,
    g_ring,
    ring_read,
    ring_write,
    q_stride,
    k_stride,
    beta_stride,
    g_stride,
    zero_entry,
    scale,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,  # power of two of at least N
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,  # key channels of a tile, which eight threads load
    HEADS: tl.constexpr,  # value heads of a program, of one key head
    SIZE: tl.constexpr,  # of a record
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weights of a row and of value heads, and the token's key and decays put into the rings."""
    first_head, i_row = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    i_key_head = first_head // (HV // H)
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    entries = ring_read + i_row * N
    entry, m_live, newer, m_newer = _ring(entries, zero_entry, N, NP)
    oldest, written = tl.load(entries), tl.load(ring_write + i_row)
    ring_keys = _key_tiles(k_ring + (entry * H + i_key_head) * K, m_live, K, KB)
    ring_g = ()
    for h in tl.static_range(HEADS):
        p_g = g_ring + first_head + h
        g_newer = tl.load(p_g + newer * HV, mask=m_newer, other=0)
        ring_g = ring_g + ((g_newer, tl.load(p_g + oldest * HV)),)
    # what came before may write what follows, but nothing that the ring holds
    await_inputs_only(CHAINED)
    key = _vector(k + i_row * k_stride + i_key_head * K, K, KB)
    query = _vector(q + i_row * q_stride + i_key_head * K, K, KB)
    gates = ()
    for h in tl.static_range(HEADS):
        g = tl.load(log_decay + i_row * g_stride + first_head + h)
        gates = gates + ((g, tl.load(beta + i_row * beta_stride + first_head + h)),)
    # all is read before the first is needed; the next kernel's reads of the state would be in
    # the way, and wait for this one
    let_next_start(CHAINED)
    if first_head % (HV // H) == 0:
        for c in tl.static_range(K // KB):
            p_written = k_ring + (written * H + i_key_head) * K + c * KB + o_k
            tl.store(p_written, key[c].to(k_ring.dtype.element_ty))
    key_scale, query_scale, pair, key_scores, query_scores = _scores(
        ring_keys, key, query, m_live, scale, eps, HAS_NORM
    )
    for h in tl.static_range(HEADS):
        i_head = first_head + h
        record = records + (i_row * HV + i_head) * SIZE
        g_newer, g_oldest = ring_g[h]
        g, b_beta = gates[h]
        tl.store(g_ring + written * HV + i_head, g)
        ring_decay = _decay(_sums(g_newer) + g)
        decay = _decay(tl.sum(g_newer, 0) + g_oldest + g)
        # d = beta (v - past(k)), o = past(q) + pair d
        b_beta = b_beta.to(tl.float32)
        of_key = pair * b_beta
        for c in tl.static_range(K // KB):
            state_key = key[c].to(tl.float32) * key_scale
            state_query = query[c].to(tl.float32) * query_scale
            tl.store(record + c * KB + o_k, -b_beta * decay * state_key)
            tl.store(record + K + c * KB + o_k, decay * (state_query - of_key * state_key))
        p_ring, p_value = record + 2 * K + o_n, record + 2 * (K + NP)
        tl.store(p_ring, -b_beta * key_scores * ring_decay)
        tl.store(p_ring + NP, (query_scores - of_key * key_scores) * ring_decay)
        tl.store(p_value, b_beta)
        tl.store(p_value + 1, of_key)
