"""Folds: what a row adds to its state, in a step or for a copy; formulas in `reference.py`.

What the state and the folded entries count for depends on keys and decays alone. With one decay per
head it is NP factors of the entries' keys and the state's factor; windows of several tokens find it
in their record, others work it out where the state is at hand. With one per channel it is the
state's factors [K] and the decayed keys [N, K], always of a record.
"""

# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.linear_replay.arithmetic import _decay, _dot, _exact_decay, _sums


@triton.jit
def _fold_factors(
    k_ring,
    g_ring,
    entries,
    mask,  # pointer to the row's mask, a prefix of its entries
    i_head,
    i_key_head,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Return what the masked entries [NP] and the state count for in the folded state, with one
    decay."""
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    m_n = tl.load(mask + o_n, mask=o_n < N, other=0) != 0
    m_newer = tl.load(mask + o_n + 1, mask=o_n + 1 < N, other=0) != 0
    entry = tl.load(entries + o_n, mask=m_n, other=0)
    newer = tl.load(entries + o_n + 1, mask=m_newer, other=0)
    is_any = tl.load(mask) != 0
    oldest = tl.load(entries, mask=is_any, other=0)
    g_newer = tl.load(g_ring + newer * HV + i_head, mask=m_newer, other=0)
    g_oldest = tl.load(g_ring + oldest * HV + i_head, mask=is_any, other=0)
    factor = tl.where(m_n, _decay(_sums(g_newer)), 0.0)
    if HAS_NORM:
        p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
        squares = tl.zeros([NP, KB], tl.float32)
        for c in tl.static_range(K // KB):
            keys = tl.load(p_keys + c * KB, mask=m_n[:, None], other=0).to(tl.float32)
            squares += keys * keys
        factor *= tl.rsqrt(tl.where(m_n, tl.sum(squares, 1) + eps, 1.0))
    return factor, _exact_decay(tl.sum(g_newer, 0) + g_oldest)


@triton.jit
def _group(
    p_keys,  # pointers to the head's channels [K] in the rings
    p_g,
    entries,
    first,
    count,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
):
    """Load the keys and decays of GROUP entries from the `first` on, the newest of `count` being 0;
    beyond the oldest they are zeros."""
    K: tl.constexpr = p_keys.shape[0]
    keys = ()
    g = ()
    for j in tl.static_range(GROUP):
        is_live = first + j < count
        entry = tl.load(entries + count - 1 - first - j, mask=is_live, other=0)
        m_live = is_live & (tl.arange(0, K) >= 0)
        keys = keys + (tl.load(p_keys + entry * (H * K), mask=m_live, other=0),)
        g = g + (tl.load(p_g + entry * (HV * K), mask=m_live, other=0),)
    return keys, g


@triton.jit
def _fold_channels(
    fold,  # pointer to the fold's part of a record
    p_keys,
    p_g,
    entries,
    mask,  # pointer to the row's mask, a prefix of its entries
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Store the same with a decay per channel, entry by entry; pointers are those of channels."""
    K: tl.constexpr = p_keys.shape[0]
    o_n, o_k = tl.arange(0, NP), tl.arange(0, K)
    count = tl.sum((tl.load(mask + o_n, mask=o_n < N, other=0) != 0).to(tl.int32))
    since = tl.zeros([K], tl.float32)
    keys, g = _group(p_keys, p_g, entries, 0, count, GROUP, H, HV)
    for first in tl.range(0, count, GROUP, num_stages=1):
        next_keys, next_g = _group(p_keys, p_g, entries, first + GROUP, count, GROUP, H, HV)
        for j in tl.static_range(GROUP):
            key = keys[j].to(tl.float32)
            factor = 1.0
            if HAS_NORM:
                factor = tl.rsqrt(tl.sum(key * key) + eps)
            n = count - 1 - first - j
            p_key = fold + (1 + n) * K + o_k
            tl.store(p_key, key * (_decay(since) * factor), mask=(n >= 0) & (o_k >= 0))
            since += g[j]
        keys, g = next_keys, next_g
    tl.store(fold + o_k, _exact_decay(since))


@triton.jit
def _fold_weights_kernel(
    records,
    k_ring,
    g_ring,
    ring_read,
    mask,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Records that hold a fold alone, with a decay per channel."""
    await_inputs(CHAINED)
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_k = tl.arange(0, K)
    _fold_channels(
        records + (i_row * HV + i_head) * SIZE,
        k_ring + i_head // (HV // H) * K + o_k, g_ring + i_head * K + o_k,
        ring_read + i_row * N, mask + i_row * N, eps, N, NP, H, HV, 4, HAS_NORM,
    )  # fmt: skip


# apart, so that what it needs takes no registers of programs that do not fold
@triton.jit(noinline=True)
def _store_fold(
    p_state,  # pointer to the head's state
    p_out,  # pointer to where it goes
    fold,  # pointer to the fold's part of a record, if there is one
    d_ring,
    k_ring,
    g_ring,
    entries,
    mask,
    i_head,
    i_part,  # which BV value channels
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,
    HAS_RECORD: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Store S exp(G) + sum d_j (k_j exp(G - G_j))^T.

    The state is read again, out of the L2 cache as a rule: kept for the few rows that fold, it
    would take the registers of all. Products are of 23 bits and summed apart from the state,
    which meets one fp32 factor and one fp32 sum per fold.
    """
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    o_v = i_part * BV + tl.arange(0, BV)
    m_n = tl.load(mask + o_n, mask=o_n < N, other=0) != 0
    entry = tl.load(entries + o_n, mask=m_n, other=0)
    p_d = d_ring + ((entry * HV + i_head) * V)[None, :] + o_v[:, None]
    d = tl.load(p_d, mask=m_n[None, :], other=0)
    i_key_head = i_head // (HV // H)
    if HAS_RECORD and not IS_PER_CHANNEL:
        factor, decay = tl.load(fold + o_n, mask=m_n, other=0), tl.load(fold + NP)
    elif not HAS_RECORD:
        factor, decay = _fold_factors(
            k_ring, g_ring, entries, mask, i_head, i_key_head, eps, N, NP, H, HV, K, KB, HAS_NORM
        )
    if not IS_PER_CHANNEL:
        # keys stay what they are, and where they have 16 bits they are their own heads
        d *= factor[None, :]
    SPLIT_KEYS: tl.constexpr = IS_PER_CHANNEL or k_ring.dtype.element_ty == tl.float32
    for c in tl.static_range(K // KB):
        o_c = c * KB + o_k
        if IS_PER_CHANNEL:
            decay = tl.load(fold + o_c)[None, :]
            p_keys = fold + K + (o_n * K)[:, None] + o_c[None, :]
        else:
            p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_c[None, :]
        keys = tl.load(p_keys, mask=m_n[:, None], other=0).to(tl.float32)
        o_state = o_v[:, None] * K + o_c[None, :]
        state = tl.load(p_state + o_state).to(tl.float32) * decay
        zeros = tl.zeros([BV, KB], tl.float32)
        state += _dot(d, keys, zeros, SPLIT_A=True, SPLIT_B=SPLIT_KEYS)
        tl.store(p_out + o_state, state.to(p_out.dtype.element_ty))


@triton.jit
def _few_keys(
    k_ring,
    entries,
    i_key_head,
    N: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
):
    """Load the keys of a row's few entries, as they are, in parts [KB]."""
    keys = ()
    for j in tl.static_range(N):
        p_key = k_ring + (tl.load(entries + j) * H + i_key_head) * K
        for c in tl.static_range(K // KB):
            keys = keys + (tl.load(p_key + c * KB + tl.arange(0, KB)),)
    return keys


@triton.jit
def _store_few(
    tiles,
    keys,  # `_few_keys`, not needed with a decay per channel
    ring_d,  # [NP, BV], 0 where there is no entry
    p_out,  # pointer to the head's state
    fold,  # pointer to the fold's part of a record, with a decay per channel
    factor,  # `_fold_factors`, with one decay
    decay,
    mask,
    o_v,
    N: tl.constexpr,
    NP: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """Store the same from what is at hand, for so few entries that they are added one by one.

    With few entries most steps fold: what that takes is asked for together with the state.
    """
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    if not IS_PER_CHANNEL:
        ring_d *= factor[:, None]
    d = ()
    for j in tl.static_range(N):
        m_j = (tl.load(mask + j) != 0) & (o_n == j)
        own = tl.sum(tl.where(m_j[:, None], ring_d, 0.0), 0)
        d = d + (own,)
    for c in tl.static_range(K // KB):
        if IS_PER_CHANNEL:
            decay = tl.load(fold + c * KB + o_k)[None, :]
        added = tl.zeros([o_v.shape[0], KB], tl.float32)
        for j in tl.static_range(N):
            if IS_PER_CHANNEL:
                m_j = (tl.load(mask + j) != 0) & (o_k >= 0)
                key = tl.load(fold + (1 + j) * K + c * KB + o_k, mask=m_j, other=0)
            else:
                key = keys[j * (K // KB) + c].to(tl.float32)
            added += d[j][:, None] * key[None, :]
        state = tiles[c].to(tl.float32) * decay + added
        o_state = o_v[:, None] * K + (c * KB + o_k)[None, :]
        tl.store(p_out + o_state, state.to(p_out.dtype.element_ty))


@triton.jit
def _fold_stream_kernel(
    records,
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    ring_read,
    mask,
    read_rows,
    out_rows,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,
    SIZE: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Fold the masked prefix of the ring into another row, or the same."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.program_id(1).to(tl.int64)
    read_row, out_row = tl.load(read_rows + i_row), tl.load(out_rows + i_row)
    await_inputs(CHAINED)
    p_state = checkpoint + (read_row * HV + i_head) * (V * K)
    p_out = checkpoint + (out_row * HV + i_head) * (V * K)
    _store_fold(
        p_state, p_out, records + (i_row * HV + i_head) * SIZE, d_ring, k_ring, g_ring,
        ring_read + i_row * N, mask + i_row * N, i_head, tl.program_id(0) % (V // BV), eps,
        N, NP, H, HV, K, V, BV, KB, IS_PER_CHANNEL, IS_PER_CHANNEL, HAS_NORM,
    )  # fmt: skip
