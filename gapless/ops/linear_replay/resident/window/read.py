"""Outputs and folds out of states that have arrived, by parts of a program: `kernel.py`."""

# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.ops.linear_replay.arithmetic import _cut, _head
from gapless.ops.linear_replay.resident.fetch import CHUNK, _entries, _place
from gapless.ops.linear_replay.resident.window.fetch import STAGES, _head_of

# key channels of a part of a tile: swizzled vectors of 16 bits begin anew there
KB = gl.constexpr(64)


@gluon.jit
def _tf32(a, b, sums):
    """Add a @ b of the leading 11 bits of each value."""
    return mma_v2(a, b, sums, input_precision="tf32")


@gluon.jit
def _dot(a, b, sums, SPLIT_B: gl.constexpr):
    """Add a @ b of 23 bits, as `arithmetic._dot` does."""
    a_head = _head(a)
    sums = _tf32(a - a_head, b, sums)
    if SPLIT_B:
        b_head = _head(b)
        sums = _tf32(a_head, b - b_head, sums)
        b = b_head
    return _tf32(a_head, b, sums)


@gluon.jit
def _mix(y, mixed, zeros, BV: gl.constexpr, XP: gl.constexpr, LEFT: gl.constexpr):
    """Return what columns [BV, XP] come to. Heads and rests enter in one product, in an order in
    which each thread feeds to the matrix units what it holds: two neighbours of each."""
    head, mixed_head = _head(y), _head(mixed)
    parts = gl.reshape(gl.join(head, y - head), [BV, XP // 2, 2, 2])
    left = gl.reshape(gl.permute(parts, [0, 2, 3, 1]), [BV, 2 * XP])
    left = gl.convert_layout(left, LEFT, assert_trivial=True)
    return _tf32(left, mixed_head, zeros) + _tf32(left, mixed - mixed_head, zeros)


@gluon.jit
def _load_vectors(x, decays, K: gl.constexpr, RIGHT: gl.constexpr, IS_PER_CHANNEL: gl.constexpr):
    """Return a window's vectors in parts of KB channels; with a decay per channel times those of a
    state's channels."""
    vectors = ()
    for c in gl.static_range(K // KB):
        part = x.slice(c * KB, KB, dim=1).permute([1, 0]).load(RIGHT).to(gl.float32)
        if IS_PER_CHANNEL:
            part *= decays.slice(c * KB, KB).load(gl.SliceLayout(1, RIGHT))[:, None]
        vectors = vectors + (part,)
    return vectors


@gluon.jit
def _read_state(tile, vectors, zeros, LEFT: gl.constexpr, IS_PER_CHANNEL: gl.constexpr):
    """Return what a window's vectors read out of a tile, [BV, XP].

    Heads and rests, and each part, have sums of their own: matrix units begin no product before the
    one that it is added to has ended.
    """
    y = zeros
    for c in gl.static_range(len(vectors)):
        state, right = tile.slice(c * KB, KB, dim=1).load(LEFT), vectors[c]
        head = _cut(state)
        if IS_PER_CHANNEL:
            right_head = _head(right)
            y += _tf32(head, right - right_head, zeros)
            right = right_head
        y += _tf32(state - head, right, zeros)
        y += _tf32(head, right, zeros)
    return y


@gluon.jit
def _store_fold(
    tile, p_out, ring_d, keys, of_fold, first_channel,
    NP: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, UNITS: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Store a tile of a folded state, as `fold_kernels._store_fold` does."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, UNITS)
    o_v = first_channel + gl.arange(0, BV, gl.SliceLayout(1, UNITS))
    for c in gl.static_range(K // KB):
        added = gl.zeros([BV, KB], gl.float32, UNITS)
        # 16 entries at a time, or more would take too many registers
        for n in gl.static_range(NP // 16):
            d = ring_d.slice(n * 16, 16).permute([1, 0]).load(LEFT)
            if not IS_PER_CHANNEL:
                # keys stay what they are, 16 bits, and are their own heads
                d *= of_fold.slice(n * 16, 16).load(gl.SliceLayout(0, LEFT))[None, :]
            right = keys.slice(n * 16, 16).slice(c * KB, KB, dim=1).load(RIGHT)
            added = _dot(d, right.to(gl.float32), added, IS_PER_CHANNEL)
        if IS_PER_CHANNEL:
            decay = of_fold.slice(c * KB, KB).load(COLUMNS)
        else:
            decay = of_fold.slice(NP, 1).load(COLUMNS)
        state = tile.slice(c * KB, KB, dim=1).load(UNITS) * decay[None, :] + added
        o_k = c * KB + gl.arange(0, KB, COLUMNS)
        gl.store(p_out + o_v[:, None] * K + o_k[None, :], state)


@gluon.jit
def _read(
    out, checkpoint, d_ring, of_states, of_windows, of_folds, places, visits, zero_entry,
    HALF: gl.constexpr, NP: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, IS_PER_CHANNEL: gl.constexpr,
    CHAINED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Read all of a program's items: half of their value channels."""
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, UNITS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem_states, full, empty = of_states
    smem_d, smem_x, decays, values, columns, scores, mixed, w_full, w_empty = of_windows
    keys, of_fold, k_full, k_empty = of_folds
    _, entries, written = places
    o_v = HALF * BV + gl.arange(0, BV, gl.SliceLayout(1, UNITS))
    o_x = gl.arange(0, XP, COLUMNS)
    node = o_x % (XP // 2)
    m_row = o_v >= 0
    m_key = m_row[:, None] & (o_x < W)[None, :]
    m_query = m_row[:, None] & ((o_x >= XP // 2) & (node < W))[None, :]
    zeros = gl.zeros([BV, XP], gl.float32, UNITS)
    written = written._reinterpret(gl.int32, [2 * CHUNK, XP], FLAT)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    k_phase = 0
    for j in range(0, visits[2]):
        w, phase = j % STAGES, j // STAGES & 1
        i = HALF * STAGES + w
        tile, ring_d = smem_states.index(i), smem_d.index(i)
        mbarrier.wait(w_full.index(w), phase)
        # the record says nothing of entries that there are not
        is_live = _entries(entries, j, gl.SliceLayout(1, RIGHT), NP) != zero_entry
        right = gl.where(is_live[:, None], scores.index(w).permute([1, 0]).load(RIGHT), 0.0)
        of_ring = _dot(ring_d.permute([1, 0]).load(LEFT), right, zeros, SPLIT_B=True)
        value = values.index(w).slice(HALF * BV, BV, dim=1).permute([1, 0]).load(UNITS)
        of_ring -= value.to(gl.float32)
        head, num_folded = _head_of(places, j, COLUMNS)
        column = columns.index(w).load(COLUMNS)
        right = mixed.index(w).permute([1, 0]).load(RIGHT)
        row = _place(places, j, 2, COLUMNS).to(gl.int64)
        o_written = written.index(j % (2 * CHUNK)).load(COLUMNS).to(gl.int64)
        vectors = _load_vectors(smem_x.index(w), decays.index(w), K, RIGHT, IS_PER_CHANNEL)
        # all is at hand that a state is needed for, so that its buffer is free again soon
        mbarrier.wait(full.index(i), phase)
        y = _read_state(tile, vectors, zeros, LEFT, IS_PER_CHANNEL)
        if num_folded != 0:
            fold_row = gl.sum(_place(places, j, 3, COLUMNS), 0).to(gl.int64)
            mbarrier.wait(k_full, k_phase)
            _store_fold(
                tile, checkpoint + (fold_row * HV + head) * (V * K), ring_d, keys, of_fold,
                HALF * BV, NP, K, BV, UNITS, IS_PER_CHANNEL,
            )  # fmt: skip
            mbarrier.arrive(k_empty, count=1)
            k_phase ^= 1
        mbarrier.arrive(empty.index(i), count=1)
        mbarrier.arrive(w_empty.index(w), count=1)
        y = _mix(y * column[None, :] + of_ring, right, zeros, BV, XP, LEFT)
        p_out = out + ((row * W + node) * (HV * V) + head * V)[None, :] + o_v[:, None]
        gl.store(p_out, y.to(out.dtype.element_ty), mask=m_query)
        p_written = d_ring + ((o_written * HV + head) * V)[None, :] + o_v[:, None]
        gl.store(p_written, y, mask=m_key)
