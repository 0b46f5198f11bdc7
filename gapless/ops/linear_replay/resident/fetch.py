"""Reads that are under way before they are needed, by a part of a resident program: `kernel.py`."""

# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from gapless.ops.linear_replay.resident.items import _items, _newest_first, _pairs, barrier

# items whose places are looked up at once
CHUNK = gl.constexpr(8)


@gluon.jit
def _load_places(
    order, ring_read, read_rows, fold_mask, j0, first, step, count, zero_entry,
    N: gl.constexpr, NP: gl.constexpr, HV: gl.constexpr, IS_PER_CHANNEL: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """Load where the states and ring entries of CHUNK visits from j0 on are, and which fold; with a
    decay per channel also each entry's newer neighbour, the oldest in the last one's place."""
    ITEM: gl.constexpr = gl.SliceLayout(1, PLACES)
    item = _items(j0, first, step, count, CHUNK, ITEM)
    row = gl.load(order + item // HV).to(gl.int32)
    o_n = _newest_first(NP, gl.SliceLayout(0, PLACES))
    p_entry = _pairs(ring_read) + (row * N)[:, None] * 2
    m_n = (row >= 0)[:, None] & (o_n < N)[None, :]
    lists = (gl.load(p_entry + o_n[None, :] * 2, mask=m_n, other=zero_entry),)
    if IS_PER_CHANNEL:
        o_newer = (o_n + 1) % NP
        m_newer = (row >= 0)[:, None] & (o_newer < N)[None, :]
        newer = gl.load(p_entry + o_newer[None, :] * 2, mask=m_newer, other=zero_entry)
        lists = lists + (newer,)
    state_row = gl.load(read_rows + row).to(gl.int32)
    is_folding = gl.load(fold_mask + row * N).to(gl.int32)
    return (item % HV * 2 + is_folding, state_row, row), lists


@gluon.jit
def _store_places(found, places, j0):
    """Put words of CHUNK visits, and lists, where all threads find them; the chunk before stays."""
    words, lists = found
    CHUNK: gl.constexpr = places[0].shape[0] // 8
    i = j0 // CHUNK % 2
    chunks = places[0]._reinterpret(gl.int32, [8, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barrier()
    for n in gl.static_range(len(words)):
        chunks.index(2 * n + i).store(words[n])
    for n in gl.static_range(len(lists)):
        places[1 + n].index(i).store(lists[n])
    barrier()


@gluon.jit
def _place(places, j, n: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the n-th word of a visit, [1]."""
    CHUNK: gl.constexpr = places[0].shape[0] // 8
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = places[0]._reinterpret(gl.int32, [8 * CHUNK, 1], FLAT)
    return words.index(2 * n * CHUNK + j % (2 * CHUNK)).load(LAYOUT)


@gluon.jit
def _visit(places, j, LAYOUT: gl.constexpr):
    """Return the row of a visit, its state row, its value head, and whether it folds."""
    row = gl.sum(_place(places, j, 2, LAYOUT), 0).to(gl.int64)
    state_row = gl.sum(_place(places, j, 1, LAYOUT), 0)
    head = gl.sum(_place(places, j, 0, LAYOUT), 0)
    return row, state_row, head // 2, head % 2 != 0


@gluon.jit
def _list(lists, j, SIZE: gl.constexpr):
    """Return the list [SIZE] of a visit."""
    CHUNK: gl.constexpr = lists.shape[1]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return lists._reinterpret(gl.int32, [2 * CHUNK, SIZE], FLAT).index(j % (2 * CHUNK))


@gluon.jit
def _fetch_state(states, smem_states, full, i, first_channel):
    """Ask for an item's state."""
    mbarrier.expect(full.index(i), states.block_type.nbytes)
    tma.async_copy_global_to_shared(states, [first_channel, 0], full.index(i), smem_states.index(i))


@gluon.jit
def _fetch_ring(d_ring, smem_d, entry, zero_entry, head, HV: gl.constexpr, V: gl.constexpr):
    """Ask for what the ring holds of an item's d; entries that there are not become zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    entry = entry.load(gl.SliceLayout(1, COPY))
    o_v = gl.arange(0, V, gl.SliceLayout(0, COPY))
    m_live = (entry != zero_entry)[:, None] & (o_v >= 0)[None, :]
    p_entry = d_ring + (entry.to(gl.int64) * (HV * V) + head * V)[:, None] + o_v[None, :]
    async_copy.async_copy_global_to_shared(smem_d, p_entry, m_live)


@gluon.jit
def _fetch_token(
    q, k, v, smem_x, smem_v, full, row, head, stage, q_stride, k_stride, v_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Ask for an item's key and query, unless they reach readers with its weights, and its value:
    the last of what they wait for."""
    VECTOR: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    o_k, o_v = gl.arange(0, K, VECTOR), gl.arange(0, V, VECTOR)
    if not IS_PER_CHANNEL:
        x, channel = smem_x.index(stage), head // (HV // H) * K
        async_copy.async_copy_global_to_shared(x.slice(0, K), k + row * k_stride + channel + o_k)
        async_copy.async_copy_global_to_shared(x.slice(K, K), q + row * q_stride + channel + o_k)
    async_copy.async_copy_global_to_shared(smem_v.index(stage), v + row * v_stride + head * V + o_v)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _fetch_keys(
    k_ring, smem_keys, smem_entries, j, head,
    NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Ask for the keys of a visit's ring entries; those of the zero entry are zeros."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    entry = _list(smem_entries, j, NP).load(gl.SliceLayout(1, KEYS)).to(gl.int64)
    o_k = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    p_keys = k_ring + ((entry * H + head // (HV // H)) * K)[:, None] + o_k[None, :]
    async_copy.async_copy_global_to_shared(smem_keys, p_keys)


@gluon.jit
def _fetch_fold(
    k_ring, g_ring, folded, places, j, head,
    NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Ask for the keys of an item that folds, and if they are per channel for its decays."""
    smem_keys, smem_g, full, _ = folded
    _, smem_entries, smem_newer = places
    _fetch_keys(k_ring, smem_keys, smem_entries, j, head, NP, H, HV, K)
    if IS_PER_CHANNEL:
        DECAYS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
        entry = _list(smem_newer, j, NP).load(gl.SliceLayout(1, DECAYS)).to(gl.int64)
        o_k = gl.arange(0, K, gl.SliceLayout(0, DECAYS))
        p_g = g_ring + ((entry * HV + head) * K)[:, None] + o_k[None, :]
        async_copy.async_copy_global_to_shared(smem_g, p_g)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _fetch(
    q, k, v, states, d_ring, k_ring, g_ring, order, ring_read, read_rows, fold_mask,
    fetched, folded, places, asked, visits, q_stride, k_stride, v_stride, zero_entry,
    N: gl.constexpr, NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, IS_PER_CHANNEL: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """Keep STAGES items on their way."""
    PLACES: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    smem_states, smem_d, smem_x, smem_v, full, empty = fetched
    smem_entries = places[1]
    k_empty = folded[3]
    first, step, count = visits
    found = _load_places(
        order, ring_read, read_rows, fold_mask, 0, first, step, count, zero_entry,
        N, NP, HV, IS_PER_CHANNEL, PLACES,
    )  # fmt: skip
    _store_places(found, places, 0)
    for j in gl.static_range(STAGES):
        if j < count:
            if j == 1:
                # or what the first weights need would be the last to come
                mbarrier.wait(asked, 0)
            row, state_row, head, is_folding = _visit(places, j, LAYOUT)
            _fetch_state(states, smem_states, full, j, (state_row * HV + head) * V)
    for j in gl.static_range(STAGES):
        if j < count:
            row, state_row, head, is_folding = _visit(places, j, LAYOUT)
            entry = _list(smem_entries, j, NP)
            _fetch_ring(d_ring, smem_d.index(j), entry, zero_entry, head, HV, V)
    found = _load_places(
        order, ring_read, read_rows, fold_mask, CHUNK, first, step, count, zero_entry,
        N, NP, HV, IS_PER_CHANNEL, PLACES,
    )  # fmt: skip
    if CHAINED:
        gdc_wait()
    k_phase = 1
    for j in gl.static_range(STAGES):
        if j < count:
            row, state_row, head, is_folding = _visit(places, j, LAYOUT)
            if is_folding:
                mbarrier.wait(k_empty, k_phase)
                _fetch_fold(k_ring, g_ring, folded, places, j, head, NP, H, HV, K, IS_PER_CHANNEL)
                k_phase ^= 1
            _fetch_token(
                q, k, v, smem_x, smem_v, full, row, head, j, q_stride, k_stride, v_stride,
                H, HV, K, V, IS_PER_CHANNEL,
            )  # fmt: skip
    stage = 0
    phase = 0
    for j in range(STAGES, count):
        row, state_row, head, is_folding = _visit(places, j, LAYOUT)
        if is_folding:
            mbarrier.wait(k_empty, k_phase)
            _fetch_fold(k_ring, g_ring, folded, places, j, head, NP, H, HV, K, IS_PER_CHANNEL)
            k_phase ^= 1
        mbarrier.wait(empty.index(stage), phase)
        _fetch_state(states, smem_states, full, stage, (state_row * HV + head) * V)
        entry = _list(smem_entries, j, NP)
        _fetch_ring(d_ring, smem_d.index(stage), entry, zero_entry, head, HV, V)
        _fetch_token(
            q, k, v, smem_x, smem_v, full, row, head, stage, q_stride, k_stride, v_stride,
            H, HV, K, V, IS_PER_CHANNEL,
        )  # fmt: skip
        if (j + 1) % CHUNK == 0:
            _store_places(found, places, j + 1)
            found = _load_places(
                order, ring_read, read_rows, fold_mask, j + 1 + CHUNK, first, step, count,
                zero_entry, N, NP, HV, IS_PER_CHANNEL, PLACES,
            )  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
