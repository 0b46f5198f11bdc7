"""What keys, decays and beta say of an item with a decay per channel, by a part of a resident
program; `kernel.py` has the whole.

Formulas are those of `channel_weights_kernels.py`. A warp has an item, and a thread of it four
channels of all of the ring's entries: decays are summed within a thread, and scores over a warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from gapless.ops.linear_replay.arithmetic import _decay
from gapless.ops.linear_replay.resident.items import (
    GROUP,
    OF_VALUE,
    OUT_OF_VALUE,
    _add,
    _float_pairs,
    _newest_first,
    _pairs,
    _unpacked,
    _unpacked_floats,
)
from gapless.ops.linear_replay.resident.weigh import (
    _group,
    _load_entries,
    _load_vectors,
    _store_numbers,
)


@gluon.jit
def _load_ring(
    k_ring, g_ring, entries, head, zero_entry,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's keys and decays [GROUP, NP, K / 2] out of the rings; and count entries."""
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    entry, newer, oldest, folded = entries
    num_live = gl.sum((entry != zero_entry).to(gl.int32), 1)
    num_folded = gl.sum(folded.to(gl.int32), 1)
    entry, newer = gl.convert_layout(entry, PAIRS), gl.convert_layout(newer, PAIRS)
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    any_k = (o_k >= 0)[None, :][:, None, :]
    i_head = gl.convert_layout(head, gl.SliceLayout(1, PAIRS))[:, None]
    p_keys = _pairs(k_ring) + (entry.to(gl.int64) * H + i_head // (HV // H)) * (K // 2)
    m_keys = (entry != zero_entry)[:, :, None] & any_k
    keys = gl.load(p_keys[:, :, None] + o_k[None, :][:, None, :], mask=m_keys, other=0)
    p_newer = _float_pairs(g_ring) + (newer.to(gl.int64) * HV + i_head) * (K // 2)
    m_newer = (newer != zero_entry)[:, :, None] & any_k
    g_newer = gl.load(p_newer[:, :, None] + o_k[None, :][:, None, :], mask=m_newer, other=0)
    p_oldest = gl.convert_layout(oldest.to(gl.int64) * HV + head, gl.SliceLayout(1, VECTOR))
    g_oldest = gl.load((_float_pairs(g_ring) + p_oldest * (K // 2))[:, None] + o_k[None, :])
    return keys, g_newer, g_oldest, num_live, num_folded


@gluon.jit
def _load_token(
    q, k, beta, log_decay, ring_write, fold_rows, row, head,
    q_stride, k_stride, beta_stride, g_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's tokens, and where they and their folds go."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    key, query = _load_vectors(q, k, row, head, q_stride, k_stride, H, HV, K, LAYOUT)
    v_row = gl.convert_layout(row, gl.SliceLayout(1, VECTOR))
    v_head = gl.convert_layout(head, gl.SliceLayout(1, VECTOR))
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    p_g = _float_pairs(log_decay + v_row * g_stride + v_head * K)
    g = gl.load(p_g[:, None] + o_k[None, :])
    b_beta = gl.load(beta + row * beta_stride + head)
    return key, query, g, b_beta, gl.load(ring_write + row), gl.load(fold_rows + row)


@gluon.jit
def _weights(
    ring, token, scale, eps,
    NP: gl.constexpr, LAYOUT: gl.constexpr, ENTRIES: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Return a group's weights: the ring's for d and for the output, and the factors that normalise
    its keys [GROUP, NP]; what the state is read with for both, in pairs; and what the value is."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    ITEM: gl.constexpr = gl.SliceLayout(1, ENTRIES)
    keys, g_newer, g_oldest, num_live, _ = ring
    k_0, k_1 = _unpacked(token[0])
    q_0, q_1 = _unpacked(token[1])
    g_0, g_1 = _unpacked_floats(token[2])
    r_0, r_1 = _unpacked(keys)
    newer_0, newer_1 = _unpacked_floats(g_newer)
    oldest_0, oldest_1 = _unpacked_floats(g_oldest)
    o_n = _newest_first(NP, gl.SliceLayout(0, ENTRIES))
    live = o_n[None, :] < num_live[:, None]
    factor = gl.where(live, 1.0, 0.0)
    pair = gl.convert_layout(gl.sum(k_0 * q_0 + k_1 * q_1, 1), ITEM)
    key_scale = gl.full_like(pair, 1.0)
    query_scale = gl.full_like(pair, 1.0) * scale
    if HAS_NORM:
        squares = gl.convert_layout(gl.sum(r_0 * r_0 + r_1 * r_1, 2), ENTRIES)
        factor *= gl.rsqrt(gl.where(live, squares + eps, 1.0))
        key_scale *= gl.rsqrt(gl.convert_layout(gl.sum(k_0 * k_0 + k_1 * k_1, 1), ITEM) + eps)
        query_scale *= gl.rsqrt(gl.convert_layout(gl.sum(q_0 * q_0 + q_1 * q_1, 1), ITEM) + eps)
    decay_0 = _decay(gl.sum(newer_0, 1) + oldest_0 + g_0)
    decay_1 = _decay(gl.sum(newer_1, 1) + oldest_1 + g_1)
    r_0 *= _decay(gl.associative_scan(newer_0, 1, _add) + g_0[:, None, :])
    r_1 *= _decay(gl.associative_scan(newer_1, 1, _add) + g_1[:, None, :])
    key_scores = gl.sum(r_0 * k_0[:, None, :] + r_1 * k_1[:, None, :], 2)
    query_scores = gl.sum(r_0 * q_0[:, None, :] + r_1 * q_1[:, None, :], 2)
    b_beta = token[3].to(gl.float32)
    of_key = pair * key_scale * query_scale * b_beta
    d_scale, out_scale = -b_beta * key_scale, -of_key * key_scale
    key_scores = gl.convert_layout(key_scores, ENTRIES) * factor
    query_scores = gl.convert_layout(query_scores, ENTRIES) * factor
    out_weights = query_scores * query_scale[:, None] + key_scores * out_scale[:, None]
    v_out = gl.convert_layout(out_scale, gl.SliceLayout(1, VECTOR))[:, None]
    v_query = gl.convert_layout(query_scale, gl.SliceLayout(1, VECTOR))[:, None]
    v_d = gl.convert_layout(d_scale, gl.SliceLayout(1, VECTOR))[:, None]
    x_d = gl.join(k_0 * decay_0 * v_d, k_1 * decay_1 * v_d)
    x_out = gl.join(
        (q_0 * v_query + k_0 * v_out) * decay_0, (q_1 * v_query + k_1 * v_out) * decay_1
    )
    return (key_scores * d_scale[:, None], out_weights, factor), (x_d, x_out), (b_beta, of_key)


@gluon.jit
def _store_weights(
    k_ring, g_ring, token, num_folded, found, weights, smem_x, row, head, m_item,
    NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a group's weights where they are read, and its keys and decays in the rings."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    V_ITEM: gl.constexpr = gl.SliceLayout(1, VECTOR)
    key, _, g, _, written, fold_row = token
    of_ring, of_state, of_value = found
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    v_head, v_written = gl.convert_layout(head, V_ITEM), gl.convert_layout(written, V_ITEM)
    m_g = gl.convert_layout(m_item, V_ITEM)[:, None] & (o_k >= 0)[None, :]
    m_key = m_g & (v_head % (HV // H) == 0)[:, None]
    p_key = _pairs(k_ring) + (v_written * H + v_head // (HV // H)) * (K // 2)
    gl.store(p_key[:, None] + o_k[None, :], key, mask=m_key)
    p_g = _float_pairs(g_ring) + (v_written * HV + v_head) * (K // 2)
    gl.store(p_g[:, None] + o_k[None, :], g, mask=m_g)
    for i in gl.static_range(3):
        weights.slice(i * NP, NP, dim=1).store(of_ring[i])
    for i in gl.static_range(2):
        smem_x.slice(i * K, K, dim=1).store(gl.reshape(of_state[i], [GROUP, K]))
    weights.slice(3 * NP + OF_VALUE, 1, dim=1).store(of_value[0][:, None])
    weights.slice(3 * NP + OUT_OF_VALUE, 1, dim=1).store(of_value[1][:, None])
    _store_numbers(weights, row, written, num_folded, fold_row, NP)


@gluon.jit
def _weigh_channels(
    q, k, beta, log_decay, k_ring, g_ring, order, ring_read, ring_write, fold_mask, fold_rows,
    weighed, asked, visits,
    q_stride, k_stride, beta_stride, g_stride, zero_entry, scale, eps,
    N: gl.constexpr, NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    HAS_NORM: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Work out the weights of all of a program's items, a group at a time.

    What a group needs is asked for a group ahead, its indices two, and its rows three.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, NP, 2], [1, 1, 32], [GROUP, 1, 1], [2, 1, 0])
    # an entry's number takes a register of one thread until it is needed
    ENTRIES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    ITEM: gl.constexpr = gl.SliceLayout(1, ENTRIES)
    weights, smem_x, full, empty = weighed
    first, step, count = visits
    row, head = _group(order, 0, first, step, count, HV, ITEM)
    entries = _load_entries(ring_read, fold_mask, row, zero_entry, N, NP, ENTRIES)
    ring = _load_ring(k_ring, g_ring, entries, head, zero_entry, H, HV, K, LAYOUT)
    mbarrier.arrive(asked, count=1)
    next_row, next_head = _group(order, GROUP, first, step, count, HV, ITEM)
    entries = _load_entries(ring_read, fold_mask, next_row, zero_entry, N, NP, ENTRIES)
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
        num_folded = ring[4]
        found = _weights(ring, token, scale, eps, NP, LAYOUT, ENTRIES, HAS_NORM)
        mbarrier.wait(empty.index(i), phase)
        m_item = j0 + gl.arange(0, GROUP, ITEM) < count
        _store_weights(
            k_ring, g_ring, token, num_folded, found, weights.index(i), smem_x.index(i), row,
            head, m_item, NP, H, HV, K, LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(full.index(i), count=1)
        ring = _load_ring(k_ring, g_ring, entries, next_head, zero_entry, H, HV, K, LAYOUT)
        token = _load_token(
            q, k, beta, log_decay, ring_write, fold_rows, next_row, next_head,
            q_stride, k_stride, beta_stride, g_stride, H, HV, K, LAYOUT,
        )  # fmt: skip
        entries = _load_entries(ring_read, fold_mask, later_row, zero_entry, N, NP, ENTRIES)
        last_row, last_head = _group(order, j0 + 3 * GROUP, first, step, count, HV, ITEM)
        row, next_row, later_row = next_row, later_row, last_row
        head, next_head, later_head = next_head, later_head, last_head
        i ^= 1
        if i == 0:
            phase ^= 1
