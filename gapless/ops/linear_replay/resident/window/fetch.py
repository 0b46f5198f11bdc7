"""Reads that are under way before they are needed, by a part of a program: `kernel.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from gapless.ops.linear_replay.resident.fetch import (
    _fetch_ring,
    _fetch_state,
    _list,
    _place,
    _store_places,
)
from gapless.ops.linear_replay.resident.items import _items, _pairs
from gapless.ops.linear_replay.resident.window.groups import (
    FOLDS,
    HEADS,
    SPAN,
    _fetch_group_channels,
    _fetch_group_ring,
    _fetch_group_tokens,
)

# items on their way
STAGES = gl.constexpr(2)


@gluon.jit
def _load_places(
    order, ring_read, ring_write, read_rows, fold_mask, fold_rows, j0, first, step, count,
    zero_entry,
    CHUNK: gl.constexpr, N: gl.constexpr, NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr,
    HV: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Load where CHUNK visits from j0 on read, write and fold: words 0, its head, how many entries
    it has and how many it folds; 1, the row of its state; 2, its row; 3, the row that it folds
    into; and lists of the entries that are read, the newest first, and written."""
    ITEM: gl.constexpr = gl.SliceLayout(1, PLACES)
    item = _items(j0, first, step, count, CHUNK, ITEM)
    row = gl.load(order + item // HV).to(gl.int32)
    o_n = 8 * NB - 1 - gl.arange(0, SPAN, gl.SliceLayout(0, PLACES))
    o_x = gl.arange(0, XP, gl.SliceLayout(0, PLACES))
    m_n = (row >= 0)[:, None] & ((o_n >= 0) & (o_n < N))[None, :]
    m_key = (row >= 0)[:, None] & (o_x < W)[None, :]
    # entries and rows are below 2^31: the lower half of each
    p_entry = _pairs(ring_read) + (row * N)[:, None] * 2 + o_n[None, :] * 2
    entries = gl.load(p_entry, mask=m_n, other=zero_entry)
    p_written = _pairs(ring_write) + (row * W)[:, None] * 2 + o_x[None, :] * 2
    written = gl.load(p_written, mask=m_key, other=0)
    folded = gl.load(fold_mask + (row * N)[:, None] + o_n[None, :], mask=m_n, other=0)
    num_live = gl.sum((entries != zero_entry).to(gl.int32), 1)
    head = item % HV * HEADS + num_live * FOLDS + gl.sum(folded.to(gl.int32), 1)
    state_row = gl.load(_pairs(read_rows) + row * 2)
    fold_row = gl.load(_pairs(fold_rows) + row * 2)
    return (head, state_row, row, fold_row), (entries, written)


@gluon.jit
def _phase(j):
    """Return the phase in which buffers become empty for a visit; at first they are."""
    return (j // STAGES + 1) & 1


@gluon.jit
def _head_of(places, j, LAYOUT: gl.constexpr):
    """Return the value head of a visit, and how many entries its row folds."""
    word = gl.sum(_place(places, j, 0, LAYOUT), 0)
    return word // HEADS, word % FOLDS


@gluon.jit
def _fetch_past(
    states, d_ring, of_states, smem_d, places, j, zero_entry,
    NB: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Ask for a visit's state, and for what the ring holds of its d, once there is room: entries
    that there are not become zeros."""
    smem_states, full, empty = of_states
    i = j % STAGES
    head, _ = _head_of(places, j, LAYOUT)
    state_row = gl.sum(_place(places, j, 1, LAYOUT), 0)
    mbarrier.wait(empty.index(i), _phase(j))
    _fetch_state(states, smem_states, full, i, (state_row * HV + head) * V)
    for b in gl.static_range(NB):
        entry = _list(places[1], j, SPAN).slice(8 * b, 8)
        _fetch_ring(d_ring, smem_d.index(i * NB + b), entry, zero_entry, head, HV, V)


@gluon.jit
def _fetch_tokens(
    p_first, token_stride, p_second, second_stride, target,
    W: gl.constexpr, XP: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Ask for a window's vectors of two kinds, [XP, K]; where there is no token they are zeros."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_x = gl.arange(0, XP, gl.SliceLayout(1, VECTORS))
    o_k = gl.arange(0, K, gl.SliceLayout(0, VECTORS))
    node = o_x % (XP // 2)
    p_first = p_first + (node * token_stride)[:, None] + o_k[None, :]
    p_second = p_second + (node * second_stride)[:, None] + o_k[None, :]
    is_first = (o_x < XP // 2)[:, None] & (o_k >= 0)[None, :]
    m_token = (node < W)[:, None] & (o_k >= 0)[None, :]
    p_vectors = gl.where(is_first, p_first, p_second)
    async_copy.async_copy_global_to_shared(target, p_vectors, m_token)


@gluon.jit
def _fetch_values(
    p_value, token_stride, target, W: gl.constexpr, XP: gl.constexpr, V: gl.constexpr
):
    """Ask for a window's values, [XP, V], zeros in all but the keys' columns."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_x = gl.arange(0, XP, gl.SliceLayout(1, VECTORS))
    o_v = gl.arange(0, V, gl.SliceLayout(0, VECTORS))
    m_key = (o_x < W)[:, None] & (o_v >= 0)[None, :]
    p_values = p_value + (o_x * token_stride)[:, None] + o_v[None, :]
    async_copy.async_copy_global_to_shared(target, p_values, m_key)


@gluon.jit
def _fetch_fold(
    folds, k_ring, of_folds, places, j, head, num_folded,
    NB: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Ask for a fold's keys; with a decay per channel for what weighing has left of them, and for
    the state's decay in the first place."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = COPY if IS_PER_CHANNEL else KEYS
    keys, full, _ = of_folds
    o_k = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    for b in gl.static_range(NB):
        o_place = 8 * b + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
        m_fold = 8 * NB - 1 - o_place < num_folded
        if IS_PER_CHANNEL:
            m_fold |= o_place == 0
            p_keys = folds + (o_place * K)[:, None] + o_k[None, :]
        else:
            entry = _list(places[1], j, SPAN).slice(8 * b, 8).load(gl.SliceLayout(1, LAYOUT))
            p_keys = (
                k_ring + ((entry.to(gl.int64) * H + head // (HV // H)) * K)[:, None] + o_k[None, :]
            )
        m_keys = m_fold[:, None] & (o_k >= 0)[None, :]
        async_copy.async_copy_global_to_shared(keys.index(b), p_keys, m_keys)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _fetch_window(
    tokens, v, folds, k_ring, of_windows, of_folds, folded, places, j, k_phase,
    GROUP: gl.constexpr, NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr,
    HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, IS_PER_CHANNEL: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Ask for what the kernels before have written for a visit, and for its fold; return the next
    phase of the fold's buffers. Readers are through with a visit's before its state is asked for.
    """
    _, smem_x, values, full = of_windows
    q, q_stride, q_token_stride = tokens[0]
    k, k_stride, k_token_stride = tokens[1]
    v, v_stride, v_token_stride = v
    i = j % STAGES
    head, num_folded = _head_of(places, j, LAYOUT)
    row = gl.sum(_place(places, j, 2, LAYOUT), 0).to(gl.int64)
    if not IS_PER_CHANNEL:
        channel = head // (HV // H) * K
        p_key, p_query = k + row * k_stride + channel, q + row * q_stride + channel
        _fetch_tokens(p_key, k_token_stride, p_query, q_token_stride, smem_x.index(i), W, XP, K)
    _fetch_values(v + row * v_stride + head * V, v_token_stride, values.index(i), W, XP, V)
    async_copy.mbarrier_arrive(full.index(i), increment_count=False)
    if num_folded != 0:
        if IS_PER_CHANNEL:
            mbarrier.wait(folded.index(j // GROUP % 2), j // (2 * GROUP) & 1)
        mbarrier.wait(of_folds[2], k_phase)
        _fetch_fold(
            folds + j % (2 * GROUP) * (8 * NB * K), k_ring, of_folds, places, j, head, num_folded,
            NB, H, HV, K, IS_PER_CHANNEL,
        )  # fmt: skip
        k_phase ^= 1
    return k_phase


@gluon.jit
def _fetch(
    tokens, v, states, folds, d_ring, k_ring, g_ring, order, ring_read, ring_write, fold_mask,
    read_rows, fold_rows, of_states, of_windows, of_folds, inputs, folded, places, placed,
    visits, zero_entry,
    GROUP: gl.constexpr, N: gl.constexpr, NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr, HAS_TREE: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Keep STAGES items on their way, and ahead of readers what is to be weighed."""
    PLACES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    CHUNK: gl.constexpr = 2 * GROUP
    smem_d = of_windows[0]
    first, step, count = visits
    found = _load_places(
        order, ring_read, ring_write, read_rows, fold_mask, fold_rows, 0, first, step, count,
        zero_entry, CHUNK, N, NB, W, XP, HV, PLACES,
    )  # fmt: skip
    _store_places(found, places, 0)
    mbarrier.arrive(placed, count=1)
    (_fetch_group_channels if IS_PER_CHANNEL else _fetch_group_ring)(
        k_ring, g_ring, inputs, places, 0, zero_entry, NB, GROUP, H, HV, K
    )
    _fetch_past(states, d_ring, of_states, smem_d, places, 0, zero_entry, NB, HV, V, LAYOUT)
    found = _load_places(
        order, ring_read, ring_write, read_rows, fold_mask, fold_rows, CHUNK, first, step, count,
        zero_entry, CHUNK, N, NB, W, XP, HV, PLACES,
    )  # fmt: skip
    if CHAINED:
        gdc_wait()
    if not IS_PER_CHANNEL:
        _fetch_group_tokens(tokens, inputs, places, 0, GROUP, W, XP, H, HV, K, HAS_TREE)
    if count > 1:
        _fetch_past(states, d_ring, of_states, smem_d, places, 1, zero_entry, NB, HV, V, LAYOUT)
    k_phase = 1
    for j in range(0, count):
        if j % CHUNK == GROUP:
            # before the first group of the next chunk is asked for
            _store_places(found, places, j + GROUP)
            mbarrier.arrive(placed, count=1)
            found = _load_places(
                order, ring_read, ring_write, read_rows, fold_mask, fold_rows, j + GROUP + CHUNK,
                first, step, count, zero_entry, CHUNK, N, NB, W, XP, HV, PLACES,
            )  # fmt: skip
        if j > 1:
            _fetch_past(states, d_ring, of_states, smem_d, places, j, zero_entry, NB, HV, V, LAYOUT)
        k_phase = _fetch_window(
            tokens, v, folds, k_ring, of_windows, of_folds, folded, places, j, k_phase,
            GROUP, NB, W, XP, H, HV, K, V, IS_PER_CHANNEL, LAYOUT,
        )  # fmt: skip
        group = j // GROUP + 1
        if (j % GROUP == GROUP // 2 - 1) & (group * GROUP < count):
            mbarrier.wait(inputs[3], (group - 1) & 1)
            (_fetch_group_channels if IS_PER_CHANNEL else _fetch_group_ring)(
                k_ring, g_ring, inputs, places, group, zero_entry, NB, GROUP, H, HV, K
            )
            if not IS_PER_CHANNEL:
                _fetch_group_tokens(tokens, inputs, places, group, GROUP, W, XP, H, HV, K, HAS_TREE)
