"""Windows of one token with one decay per head, in one launch; formulas in `reference.py`.

A program reads some value channels of a head's state. What their sums are weighed with depends on
keys, decays and beta alone; every program of a head works it out for itself, since that is a small
part of what it reads, and is done while its state is on the way.

Decays are sums of log decays over what lies between, built up from the newest on, so nothing is
subtracted and no exponent is above zero: each ring entry meets the decay of its newer neighbour,
and the oldest one's own is left for the state.
"""

# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.linear_replay.arithmetic import _decay, _sums
from gapless.ops.linear_replay.fold_kernels import (
    _few_keys,
    _fold_factors,
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


@triton.jit
def _key_tiles(p_keys, m_live, K: tl.constexpr, KB: tl.constexpr):
    """Load the ring's keys as tiles [NP, KB]."""
    tiles = ()
    for c in tl.static_range(K // KB):
        o_k = (c * KB + tl.arange(0, KB))[None, :]
        tiles = tiles + (tl.load(p_keys[:, None] + o_k, mask=m_live[:, None], other=0),)
    return tiles


@triton.jit
def _against(tiles, vector):
    """Return tiles [rows, KB] of a matrix [rows, K] times a vector [K] in parts [KB]."""
    rows: tl.constexpr = tiles[0].shape[0]
    parts: tl.constexpr = tiles[0].shape[1] // 4
    # a thread has four channels in sequence: what it keeps meanwhile is their sum
    sums = tl.zeros([rows, parts], tl.float32)
    for c in tl.static_range(len(tiles)):
        products = tiles[c].to(tl.float32) * vector[c].to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(products, [rows, parts, 4]), 2)
    return tl.sum(sums, 1)


@triton.jit
def _product(a, b):
    """Return the scalar product of two vectors in parts."""
    products = a[0].to(tl.float32) * b[0].to(tl.float32)
    for c in tl.static_range(1, len(a)):
        products += a[c].to(tl.float32) * b[c].to(tl.float32)
    return tl.sum(products)


@triton.jit
def _scores(
    ring_keys,  # tiles [NP, KB]
    key,  # parts [KB]
    query,
    m_live,
    scale,
    eps,
    HAS_NORM: tl.constexpr,
):
    """Return the factors that normalise a token's key and query, their product, and what each
    reads of the ring's keys [NP], normalised too and not decayed."""
    key_scale, query_scale = 1.0, scale
    factor = tl.where(m_live, 1.0, 0.0)
    if HAS_NORM:
        key_scale = tl.rsqrt(_product(key, key) + eps)
        query_scale *= tl.rsqrt(_product(query, query) + eps)
        squares = ring_keys[0].to(tl.float32) * ring_keys[0].to(tl.float32)
        for c in tl.static_range(1, len(ring_keys)):
            squares += ring_keys[c].to(tl.float32) * ring_keys[c].to(tl.float32)
        factor *= tl.rsqrt(tl.where(m_live, tl.sum(squares, 1) + eps, 1.0))
    pair = _product(key, query) * (key_scale * query_scale)
    key_scores = _against(ring_keys, key) * (factor * key_scale)
    query_scores = _against(ring_keys, query) * (factor * query_scale)
    return key_scale, query_scale, pair, key_scores, query_scores


@triton.jit(do_not_specialize=["zero_entry"])
def _token_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    out,
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    order,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    q_stride,
    k_stride,
    v_stride,
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
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,  # key channels of a tile, of 128 bytes
    HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The output of BV value channels, their entry in the rings, and their fold."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.load(order + tl.program_id(1))
    i_part = tl.program_id(0) % (V // BV)
    i_key_head = i_head // (HV // H)
    o_v, o_k = i_part * BV + tl.arange(0, BV), tl.arange(0, KB)
    entries, p_mask = ring_read + i_row * N, fold_mask + i_row * N
    IS_FEW: tl.constexpr = NP < 16
    row = tl.load(read_rows + i_row)
    entry, m_live, newer, m_newer = _ring(entries, zero_entry, N, NP)
    oldest = tl.load(entries)
    is_folding = tl.load(p_mask) != 0
    fold_row = tl.load(fold_rows + i_row)
    written = tl.load(ring_write + i_row)
    p_state = checkpoint + (row * HV + i_head) * (V * K)
    tiles = _tiles(p_state, o_v, K, KB)
    ring_keys = _key_tiles(k_ring + (entry * H + i_key_head) * K, m_live, K, KB)
    p_d = d_ring + ((entry * HV + i_head) * V)[:, None] + o_v[None, :]
    ring_d = tl.load(p_d, mask=m_live[:, None], other=0)
    g_newer = tl.load(g_ring + newer * HV + i_head, mask=m_newer, other=0)
    g_oldest = tl.load(g_ring + oldest * HV + i_head)
    few_keys = ()
    if IS_FEW:
        few_keys = _few_keys(k_ring, entries, i_key_head, N, H, K, KB)
    # what came before may write what follows, but neither states nor what the ring holds
    await_inputs(CHAINED)

    key = _vector(k + i_row * k_stride + i_key_head * K, K, KB)
    query = _vector(q + i_row * q_stride + i_key_head * K, K, KB)
    value = tl.load(v + i_row * v_stride + i_head * V + o_v).to(tl.float32)
    g = tl.load(log_decay + i_row * g_stride + i_head)
    p_fold = checkpoint + (fold_row * HV + i_head) * (V * K)
    if IS_FEW:  # noqa: SIM102 - one is known when compiling, the other is not
        if is_folding:
            # half of what is moved: it should be under way while results are summed
            factor, decay = _fold_factors(
                k_ring, g_ring, entries, p_mask, i_head, i_key_head, eps,
                N, NP, H, HV, K, KB, HAS_NORM,
            )  # fmt: skip
            _store_few(
                tiles, few_keys, ring_d, p_fold, p_fold, factor, decay, p_mask, o_v,
                N, NP, K, KB, IS_PER_CHANNEL=False,
            )  # fmt: skip
    if i_part == 0:
        tl.store(g_ring + written * HV + i_head, g)
        if i_head % (HV // H) == 0:
            for c in tl.static_range(K // KB):
                p_key = k_ring + (written * H + i_key_head) * K + c * KB + o_k
                tl.store(p_key, key[c].to(k_ring.dtype.element_ty))

    key_scale, query_scale, pair, key_scores, query_scores = _scores(
        ring_keys, key, query, m_live, scale, eps, HAS_NORM
    )
    ring_decay = _decay(_sums(g_newer) + g)
    decay = _decay(tl.sum(g_newer, 0) + g_oldest + g)
    d = value
    if HAS_DELTA:
        past = _against(tiles, key) * (decay * key_scale)
        past += tl.sum(ring_d * (key_scores * ring_decay)[:, None], 0)
        d = tl.load(beta + i_row * beta_stride + i_head).to(tl.float32) * (value - past)
    y = _against(tiles, query) * (decay * query_scale)
    y += tl.sum(ring_d * (query_scores * ring_decay)[:, None], 0) + pair * d
    tl.store(d_ring + (written * HV + i_head) * V + o_v, d)
    tl.store(out + i_row * (HV * V) + i_head * V + o_v, y.to(out.dtype.element_ty))
    if not IS_FEW:  # noqa: SIM102
        if is_folding:
            _store_fold(
                p_state, p_fold, p_fold, d_ring, k_ring, g_ring, entries, p_mask,
                i_head, i_part, eps, N, NP, H, HV, K, V, BV, KB,
                HAS_RECORD=False, IS_PER_CHANNEL=False, HAS_NORM=HAS_NORM,
            )  # fmt: skip
