"""What keys, decays and beta say of an item, by a part of a resident program.

Formulas are those of `token_weights_kernel.py`; `kernel.py` has the whole.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from gapless.ops.linear_replay.arithmetic import _decay, _exact_decay
from gapless.ops.linear_replay.resident.items import (
    FOLD_DECAY,
    FOLD_ROW,
    GROUP,
    NUM_FOLDED,
    OF_KEY,
    OF_VALUE,
    OUT_OF_KEY,
    OUT_OF_QUERY,
    OUT_OF_VALUE,
    ROW,
    WRITTEN,
    _add,
    _bits,
    _items,
    _newest_first,
    _pairs,
    _unpacked,
)


@gluon.jit
def _sums(g, LAYOUT: gl.constexpr):
    """Return for each of a group's entries [GROUP, NP] the sum over it and all later ones."""
    # an item's entries in one warp, along its threads
    SCAN: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    sums = gl.associative_scan(gl.convert_layout(g, SCAN), 1, _add)
    return gl.convert_layout(sums, LAYOUT)


@gluon.jit
def _group(order, j0, first, step, count, HV: gl.constexpr, ITEM: gl.constexpr):
    """Return the rows and value heads of a group's visits, from j0 on."""
    item = _items(j0, first, step, count, GROUP, ITEM)
    return gl.load(order + item // HV).to(gl.int32), item % HV


@gluon.jit
def _load_entries(
    ring_read, fold_mask, row, zero_entry, N: gl.constexpr, NP: gl.constexpr, PAIRS: gl.constexpr
):
    """Load of a group's rows the ring entries [GROUP, NP], each one's newer neighbour, the oldest,
    and which are folded."""
    o_n = _newest_first(NP, gl.SliceLayout(0, PAIRS))
    start = row * N
    m_n = (o_n < N)[None, :] & (start >= 0)[:, None]
    m_newer = (o_n + 1 < N)[None, :] & (start >= 0)[:, None]
    # entries are below 2^31: the lower half of each
    p_entry = _pairs(ring_read) + 2 * start
    entry = gl.load(p_entry[:, None] + 2 * o_n[None, :], mask=m_n, other=zero_entry)
    newer = gl.load(p_entry[:, None] + 2 * o_n[None, :] + 2, mask=m_newer, other=zero_entry)
    folded = gl.load(fold_mask + start[:, None] + o_n[None, :], mask=m_n, other=0)
    return entry, newer, gl.load(p_entry), folded


@gluon.jit
def _load_ring(
    k_ring, g_ring, entries, head, zero_entry,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's keys [GROUP, NP, K / 2] and decays out of the rings; and count entries."""
    entry, newer, oldest, folded = entries
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    live = entry != zero_entry
    p_keys = (entry.to(gl.int64) * H + (head // (HV // H))[:, None]) * (K // 2)
    p_keys = (_pairs(k_ring) + p_keys)[:, :, None] + o_k[None, :][:, None, :]
    m_keys = live[:, :, None] & (o_k >= 0)[None, :][:, None, :]
    keys = gl.load(p_keys, mask=m_keys, other=0)
    p_newer = g_ring + newer.to(gl.int64) * HV + head[:, None]
    g_newer = gl.load(p_newer, mask=newer != zero_entry, other=0.0)
    g_oldest = gl.load(g_ring + oldest.to(gl.int64) * HV + head)
    return keys, g_newer, g_oldest, gl.sum(live.to(gl.int32), 1), gl.sum(folded.to(gl.int32), 1)


@gluon.jit
def _load_vectors(
    q, k, row, head, q_stride, k_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's keys and queries [GROUP, K / 2], in pairs."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    row = gl.convert_layout(row, gl.SliceLayout(1, VECTOR))
    key_head = gl.convert_layout(head, gl.SliceLayout(1, VECTOR)) // (HV // H)
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    key = gl.load(_pairs(k + row * k_stride + key_head * K)[:, None] + o_k[None, :])
    query = gl.load(_pairs(q + row * q_stride + key_head * K)[:, None] + o_k[None, :])
    return key, query


@gluon.jit
def _load_token(
    q, k, beta, log_decay, ring_write, fold_rows, row, head,
    q_stride, k_stride, beta_stride, g_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's tokens, and where they and their folds go."""
    key, query = _load_vectors(q, k, row, head, q_stride, k_stride, H, HV, K, LAYOUT)
    g = gl.load(log_decay + row * g_stride + head)
    b_beta = gl.load(beta + row * beta_stride + head)
    return key, query, g, b_beta, gl.load(ring_write + row), gl.load(fold_rows + row)


@gluon.jit
def _products(
    ring, token, scale, eps, NP: gl.constexpr, LAYOUT: gl.constexpr, HAS_NORM: gl.constexpr
):
    """Return what a group's keys are in sum: the factors that normalise the ring's, what key and
    query read of each [GROUP, NP], the token's factors and their product [GROUP]."""
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ITEM: gl.constexpr = gl.SliceLayout(1, PAIRS)
    keys, num_live = ring[0], ring[3]
    o_n = _newest_first(NP, gl.SliceLayout(0, PAIRS))
    k_0, k_1 = _unpacked(token[0])
    q_0, q_1 = _unpacked(token[1])
    r_0, r_1 = _unpacked(keys)
    live = o_n[None, :] < num_live[:, None]
    factor = gl.where(live, 1.0, 0.0)
    pair = gl.convert_layout(gl.sum(k_0 * q_0 + k_1 * q_1, 1), ITEM)
    key_scale = gl.full_like(pair, 1.0)
    query_scale = gl.full_like(pair, 1.0) * scale
    if HAS_NORM:
        factor *= gl.rsqrt(gl.where(live, gl.sum(r_0 * r_0 + r_1 * r_1, 2) + eps, 1.0))
        key_scale *= gl.rsqrt(gl.convert_layout(gl.sum(k_0 * k_0 + k_1 * k_1, 1), ITEM) + eps)
        query_scale *= gl.rsqrt(gl.convert_layout(gl.sum(q_0 * q_0 + q_1 * q_1, 1), ITEM) + eps)
    key_scores = gl.sum(r_0 * k_0[:, None, :] + r_1 * k_1[:, None, :], 2)
    query_scores = gl.sum(r_0 * q_0[:, None, :] + r_1 * q_1[:, None, :], 2)
    key_scores *= factor * key_scale[:, None]
    query_scores *= factor * query_scale[:, None]
    return factor, key_scores, query_scores, key_scale, query_scale, pair * key_scale * query_scale


@gluon.jit
def _store_numbers(weights, row, written, num_folded, fold_row, NP: gl.constexpr):
    """Store where a group's items read and write."""
    REST: gl.constexpr = 3 * NP
    weights.slice(REST + ROW, 1, dim=1).store(_bits(row)[:, None])
    weights.slice(REST + WRITTEN, 1, dim=1).store(_bits(written)[:, None])
    weights.slice(REST + NUM_FOLDED, 1, dim=1).store(_bits(num_folded)[:, None])
    weights.slice(REST + FOLD_ROW, 1, dim=1).store(_bits(fold_row)[:, None])


@gluon.jit
def _store_weights(
    k_ring, g_ring, ring, token, products, weights, row, head, m_item,
    NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a group's weights where they are read, and its keys and decays in the rings; the
    formulas are those of `token_weights_kernel.py`."""
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    V_ITEM: gl.constexpr = gl.SliceLayout(1, VECTOR)
    REST: gl.constexpr = 3 * NP
    _, g_newer, g_oldest, _, num_folded = ring
    key, _, g, b_beta, written, fold_row = token
    factor, key_scores, query_scores, key_scale, query_scale, pair = products
    b_beta = b_beta.to(gl.float32)
    o_n = _newest_first(NP, gl.SliceLayout(0, PAIRS))
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    v_head = gl.convert_layout(head, V_ITEM)
    p_written = (gl.convert_layout(written, V_ITEM) * H + v_head // (HV // H)) * K
    m_key = gl.convert_layout(m_item, V_ITEM) & (v_head % (HV // H) == 0)
    m_key = m_key[:, None] & (o_k >= 0)[None, :]
    gl.store(_pairs(k_ring + p_written)[:, None] + o_k[None, :], key, mask=m_key)
    gl.store(g_ring + written * HV + head, g, mask=m_item)

    ring_decay = _decay(_sums(g_newer, PAIRS) + g[:, None])
    decay = _decay(gl.sum(g_newer, 1) + g_oldest + g)
    of_key = pair * b_beta
    out_scores = query_scores - of_key[:, None] * key_scores
    weights.slice(0, NP, dim=1).store((-b_beta)[:, None] * key_scores * ring_decay)
    weights.slice(NP, NP, dim=1).store(out_scores * ring_decay)
    fold_g = gl.where(o_n[None, :] + 1 < num_folded[:, None], g_newer, 0.0)
    fold_factor = _decay(_sums(fold_g, PAIRS)) * factor
    fold_factor = gl.where(o_n[None, :] < num_folded[:, None], fold_factor, 0.0)
    fold_decay = _exact_decay(gl.sum(fold_g, 1) + g_oldest)
    weights.slice(2 * NP, NP, dim=1).store(fold_factor)
    weights.slice(REST + OF_VALUE, 1, dim=1).store(b_beta[:, None])
    weights.slice(REST + OUT_OF_VALUE, 1, dim=1).store(of_key[:, None])
    weights.slice(REST + OF_KEY, 1, dim=1).store((-b_beta * decay * key_scale)[:, None])
    weights.slice(REST + OUT_OF_KEY, 1, dim=1).store((-of_key * decay * key_scale)[:, None])
    weights.slice(REST + OUT_OF_QUERY, 1, dim=1).store((decay * query_scale)[:, None])
    weights.slice(REST + FOLD_DECAY, 1, dim=1).store(fold_decay[:, None])
    _store_numbers(weights, row, written, num_folded, fold_row, NP)


@gluon.jit
def _weigh(
    q, k, beta, log_decay, k_ring, g_ring, order, ring_read, ring_write, fold_mask, fold_rows,
    weighed, asked, visits,
    q_stride, k_stride, beta_stride, g_stride, zero_entry, scale, eps,
    N: gl.constexpr, NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    HAS_NORM: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Work out the weights of all of a program's items, a group at a time.

    What a group needs is asked for a group ahead, its indices two, and its rows three.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ITEM: gl.constexpr = gl.SliceLayout(1, PAIRS)
    weights, _, full, empty = weighed
    first, step, count = visits
    row, head = _group(order, 0, first, step, count, HV, ITEM)
    entries = _load_entries(ring_read, fold_mask, row, zero_entry, N, NP, PAIRS)
    ring = _load_ring(k_ring, g_ring, entries, head, zero_entry, H, HV, K, LAYOUT)
    mbarrier.arrive(asked, count=1)
    next_row, next_head = _group(order, GROUP, first, step, count, HV, ITEM)
    entries = _load_entries(ring_read, fold_mask, next_row, zero_entry, N, NP, PAIRS)
    later_row, later_head = _group(order, 2 * GROUP, first, step, count, HV, ITEM)
    if CHAINED:
        gdc_wait()
    token = _load_token(
        q, k, beta, log_decay, ring_write, fold_rows, row, head,
        q_stride, k_stride, beta_stride, g_stride, H, HV, K, LAYOUT,
    )  # fmt: skip
    i = 0
    phase = 1
    for j0 in range(0, count, GROUP):
        # once these are summed, the keys' registers are free for the next ones
        products = _products(ring, token, scale, eps, NP, LAYOUT, HAS_NORM)
        next_ring = _load_ring(k_ring, g_ring, entries, next_head, zero_entry, H, HV, K, LAYOUT)
        next_token = _load_token(
            q, k, beta, log_decay, ring_write, fold_rows, next_row, next_head,
            q_stride, k_stride, beta_stride, g_stride, H, HV, K, LAYOUT,
        )  # fmt: skip
        entries = _load_entries(ring_read, fold_mask, later_row, zero_entry, N, NP, PAIRS)
        last_row, last_head = _group(order, j0 + 3 * GROUP, first, step, count, HV, ITEM)
        mbarrier.wait(empty.index(i), phase)
        m_item = j0 + gl.arange(0, GROUP, ITEM) < count
        _store_weights(
            k_ring, g_ring, ring, token, products, weights.index(i), row, head, m_item,
            NP, H, HV, K, LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(full.index(i), count=1)
        ring, token = next_ring, next_token
        row, next_row, later_row = next_row, later_row, last_row
        head, next_head, later_head = next_head, later_head, last_head
        i ^= 1
        if i == 0:
            phase ^= 1
