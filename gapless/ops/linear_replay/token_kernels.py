"""Windows of one token in two launches; formulas in `reference.py`, launches in `triton.py`.

All that a window makes of its state is linear in it. A head has a *column* for each of its results:
d of the token, but for Mamba-2, and its output. Each is

    y = S_0 x + sum_ring r_j d_j + u v

The *weights* x [K], r [N] and u depend on keys, decays and beta alone. So a step is two launches.
A weights kernel works them out and leaves them in a buffer, one *record* per row and value head.
The stream kernel, many small programs, reads the state. It has all of its reads in flight before
it needs a weight: it is launched as a programmatic dependent of the weights kernel, and first waits
for that one when its own loads are under way. A row that folds does so there, too.

A record is x [columns, K], r [columns, NP], u [columns], then the fold's weights, of
`fold_kernels.py`.

Decays are sums of log decays over what lies between, built up from the newest on, so nothing is
subtracted and no exponent is above zero: each ring entry meets the decay of its newer neighbour,
and the oldest one's own is left for the state. The weights kernel with a decay per channel is in
`channel_weights_kernels.py`.
"""

# ruff: noqa: PLR0912, RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs, await_inputs_only, let_next_start
from gapless.ops.linear_replay.arithmetic import _decay, _sums
from gapless.ops.linear_replay.fold_kernels import (
    _few_keys,
    _fold_weights,
    _store_few,
    _store_fold,
)


@triton.jit
def _ring(entries, zero_entry, N: tl.constexpr, NP: tl.constexpr):
    """Return a row's ring entries [NP] from the oldest on, each one's newer neighbour, and which
    of both there are."""
    o_n = tl.arange(0, NP)
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    newer = tl.load(entries + o_n + 1, mask=o_n + 1 < N, other=zero_entry)
    return entry, entry != zero_entry, newer, newer != zero_entry


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
    fold_mask,
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
    KB: tl.constexpr,
    HEADS: tl.constexpr,  # value heads of a program, of one key head
    SIZE: tl.constexpr,  # of a record
    HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weights of a row and of value heads: fp32 sums, keys in tiles of KB channels.

    KB is what 8 threads load: sums over K are taken within a thread, and at the end over 8 lanes.
    """
    await_inputs_only(CHAINED)
    first_head, i_row = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    i_key_head = first_head // (HV // H)
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    entries = ring_read + i_row * N
    COLUMNS: tl.constexpr = 2 if HAS_DELTA else 1
    if tl.program_id(2) == 1:
        # beside the others, which the stream kernel waits for as well
        if tl.load(fold_mask + i_row * N) != 0:
            for h in tl.static_range(HEADS):
                i_head = first_head + h
                _fold_weights(
                    records + (i_row * HV + i_head) * SIZE + COLUMNS * (K + NP + 1),
                    k_ring, g_ring, entries, fold_mask + i_row * N, i_head, i_key_head, eps,
                    N, NP, H, HV, K, KB, HAS_NORM,
                )  # fmt: skip
        return
    entry, m_live, newer, m_newer = _ring(entries, zero_entry, N, NP)
    written = tl.load(ring_write + i_row)
    oldest = tl.load(entries)
    p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
    ring_keys = ()
    keys = ()
    queries = ()
    decays = ()
    key_squares = o_k * 0.0
    query_squares = o_k * 0.0
    products = o_k * 0.0
    for c in tl.static_range(K // KB):
        key = tl.load(k + i_row * k_stride + i_key_head * K + c * KB + o_k)
        query = tl.load(q + i_row * q_stride + i_key_head * K + c * KB + o_k).to(tl.float32)
        ring_keys = ring_keys + (tl.load(p_keys + c * KB, mask=m_live[:, None], other=0),)
        keys = keys + (key.to(tl.float32),)
        queries = queries + (query,)
    betas = ()
    for h in tl.static_range(HEADS):
        i_head = first_head + h
        g = tl.load(log_decay + i_row * g_stride + i_head)
        g_newer = tl.load(g_ring + newer * HV + i_head, mask=m_newer, other=0)
        g_oldest = tl.load(g_ring + oldest * HV + i_head)
        decays = decays + ((g_newer, g_oldest, g),)
        if HAS_DELTA:
            betas = betas + (tl.load(beta + i_row * beta_stride + i_head).to(tl.float32),)
    # all is read before the first is needed; the next kernel's reads of the state would be in
    # the way, and wait for this one
    let_next_start(CHAINED)
    for c in tl.static_range(K // KB):
        if first_head % (HV // H) == 0:
            p_written = k_ring + (written * H + i_key_head) * K + c * KB + o_k
            tl.store(p_written, keys[c].to(k_ring.dtype.element_ty))
        key_squares += keys[c] * keys[c]
        query_squares += queries[c] * queries[c]
        products += keys[c] * queries[c]
    key_scale, query_scale = 1.0, scale
    if HAS_NORM:
        key_scale = tl.rsqrt(tl.sum(key_squares) + eps)
        query_scale *= tl.rsqrt(tl.sum(query_squares) + eps)
    pair = tl.sum(products) * (key_scale * query_scale)

    key_sum = tl.zeros([NP, KB], tl.float32)
    query_sum = tl.zeros([NP, KB], tl.float32)
    squares = tl.zeros([NP, KB], tl.float32)
    state_keys = ()
    state_queries = ()
    for c in tl.static_range(K // KB):
        ring_key = ring_keys[c].to(tl.float32)
        key, query = keys[c] * key_scale, queries[c] * query_scale
        squares += ring_key * ring_key
        key_sum += ring_key * key[None, :]
        query_sum += ring_key * query[None, :]
        state_keys = state_keys + (key,)
        state_queries = state_queries + (query,)
    factor = tl.where(m_live, 1.0, 0.0)
    if HAS_NORM:
        factor *= tl.rsqrt(tl.where(m_live, tl.sum(squares, 1) + eps, 1.0))
    key_score = tl.sum(key_sum, 1) * factor
    query_score = tl.sum(query_sum, 1) * factor

    for h in tl.static_range(HEADS):
        i_head = first_head + h
        record = records + (i_row * HV + i_head) * SIZE
        g_newer, g_oldest, g = decays[h]
        tl.store(g_ring + written * HV + i_head, g)
        ring_decay = _decay(_sums(g_newer) + g)
        decay = _decay(tl.sum(g_newer, 0) + g_oldest + g)
        b_beta = 0.0
        if HAS_DELTA:
            b_beta = betas[h]
        # d = beta (v - past(k)), o = past(q) + pair d
        p_ring = record + COLUMNS * K + o_n
        p_value = record + COLUMNS * (K + NP)
        of_key = pair * b_beta
        for c in tl.static_range(K // KB):
            state_query = state_queries[c] - of_key * state_keys[c]
            if HAS_DELTA:
                tl.store(record + c * KB + o_k, -b_beta * decay * state_keys[c])
            tl.store(record + (COLUMNS - 1) * K + c * KB + o_k, decay * state_query)
        if HAS_DELTA:
            tl.store(p_ring, -b_beta * key_score * ring_decay)
            tl.store(p_ring + NP, (query_score - of_key * key_score) * ring_decay)
            tl.store(p_value, b_beta)
            tl.store(p_value + 1, of_key)
        else:
            tl.store(p_ring, query_score * ring_decay)
            tl.store(p_value, pair)


@triton.jit
def _tiles(p_state, o_v, K: tl.constexpr, KB: tl.constexpr):
    """Load state channels `o_v` [BV] as tiles [BV, KB]."""
    tiles = ()
    for c in tl.static_range(K // KB):
        tile = tl.load(p_state + o_v[:, None] * K + (c * KB + tl.arange(0, KB))[None, :])
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _vector(p_x, K: tl.constexpr, KB: tl.constexpr):
    """Load a vector [K] in parts [KB]."""
    parts = ()
    for c in tl.static_range(K // KB):
        parts = parts + (tl.load(p_x + c * KB + tl.arange(0, KB)),)
    return parts


@triton.jit(do_not_specialize=["zero_entry"])
def _token_stream_kernel(
    records,
    v,
    out,
    checkpoint,
    d_ring,
    k_ring,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    v_stride,
    zero_entry,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,  # key channels of a tile, of 128 bytes
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Every column of BV value channels, out of one pass over their state; and the fold."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    o_n = tl.arange(0, NP)
    COLUMNS: tl.constexpr = 2 if HAS_DELTA else 1
    entries = ring_read + i_row * N
    row = tl.load(read_rows + i_row)
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    is_folding = tl.load(fold_mask + i_row * N) != 0
    p_state = checkpoint + (row * HV + i_head) * (V * K)
    tiles = _tiles(p_state, o_v, K, KB)
    p_d = d_ring + ((entry * HV + i_head) * V)[:, None] + o_v[None, :]
    ring_d = tl.load(p_d, mask=(entry != zero_entry)[:, None], other=0)
    value = tl.load(v + i_row * v_stride + i_head * V + o_v)
    fold_row = tl.load(fold_rows + i_row)
    IS_FEW: tl.constexpr = NP < 16
    few_keys = ()
    if IS_FEW and not IS_PER_CHANNEL:
        few_keys = _few_keys(k_ring, entries, i_head // (HV // H), N, H, K, KB)
    await_inputs(CHAINED)

    record = records + (i_row * HV + i_head) * SIZE
    p_ring, p_u = record + COLUMNS * K, record + COLUMNS * (K + NP)
    p_out = out + i_row * (HV * V) + i_head * V
    p_written = d_ring + i_head * V
    # the next column's weights are on their way while one is summed
    x = _vector(record, K, KB)
    ring = tl.load(p_ring + o_n)
    p_fold = checkpoint + (fold_row * HV + i_head) * (V * K)
    fold = record + COLUMNS * (K + NP + 1)
    # one is known when compiling, the other is not
    if IS_FEW:  # noqa: SIM102
        if is_folding:
            # half of what is moved: it should be under way while results are summed
            _store_few(
                tiles, few_keys, ring_d, p_fold, fold, fold_mask + i_row * N, o_v,
                N, NP, K, KB, IS_PER_CHANNEL,
            )  # fmt: skip
    for i in tl.static_range(COLUMNS):
        if i + 1 < COLUMNS:
            next_x = _vector(record + (i + 1) * K, K, KB)
            next_ring = tl.load(p_ring + (i + 1) * NP + o_n)
        y = tl.zeros([BV, KB], tl.float32)
        for c in tl.static_range(K // KB):
            y += tiles[c].to(tl.float32) * x[c][None, :]
        y = tl.sum(y, 1) + tl.sum(ring_d * ring[:, None], 0)
        y += value.to(tl.float32) * tl.load(p_u + i)
        if i + 1 < COLUMNS:
            tl.store(p_written + tl.load(ring_write + i_row) * (HV * V) + o_v, y)
            x, ring = next_x, next_ring
        else:
            tl.store(p_out + o_v, y.to(out.dtype.element_ty))
    if not HAS_DELTA:
        written = tl.load(ring_write + i_row)
        tl.store(p_written + written * (HV * V) + o_v, value.to(tl.float32))
    if not IS_FEW:  # noqa: SIM102
        if is_folding:
            _store_fold(
                p_state, p_fold, fold, d_ring, k_ring, entries, fold_mask + i_row * N,
                i_head, i_head // (HV // H), o_v, N, NP, H, HV, K, V, KB, IS_PER_CHANNEL,
            )  # fmt: skip
