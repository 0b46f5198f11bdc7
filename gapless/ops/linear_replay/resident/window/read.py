"""Outputs and folds out of states that have arrived, by parts of a program: `kernel.py`."""

# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.ops.linear_replay.arithmetic import _cut, _head
from gapless.ops.linear_replay.resident.fetch import _list, _place
from gapless.ops.linear_replay.resident.window.fetch import STAGES, _head_of
from gapless.ops.linear_replay.resident.window.groups import SPAN

# key channels of a part of a tile: swizzled vectors of 16 bits begin anew there
KB = gl.constexpr(64)


@gluon.jit
def _tf32(a, b, sums):
    """Add a @ b of the leading 11 bits of each value."""
    return mma_v2(a, b, sums, input_precision="tf32")


@gluon.jit
def _beside(a, b, AXIS: gl.constexpr, OPERAND: gl.constexpr):
    """Return two operands' eights side by side along what is summed."""
    both = gl.join(a, b)
    if AXIS == 1:
        both = gl.reshape(gl.permute(both, [0, 2, 1]), [a.shape[0], 2 * a.shape[1]])
    else:
        both = gl.reshape(gl.permute(both, [2, 0, 1]), [2 * a.shape[0], a.shape[1]])
    return gl.convert_layout(both, OPERAND, assert_trivial=True)


@gluon.jit
def _dot_eight(a, b, sums, UNITS: gl.constexpr, SPLIT_B: gl.constexpr):
    """Add a @ b, [M, 8] and [8, N], of 23 bits: matrix units take 16 at once, head and rest."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    head = _head(a)
    a = _beside(head, a - head, 1, gl.DotOperandLayout(0, UNITS, 1))
    if SPLIT_B:
        head = _head(b)
        sums = _tf32(a, _beside(b - head, b - head, 0, RIGHT), sums)
        b = head
    return _tf32(a, _beside(b, b, 0, RIGHT), sums)


@gluon.jit
def _twice(mixed, XP: gl.constexpr, RIGHT: gl.constexpr):
    """Return [2 XP, XP] of a square: all rows twice, in the order of `_mix`."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0])
    square = gl.reshape(gl.permute(mixed.load(ROWS), [1, 0]), [XP // 2, 2, XP])
    both = gl.permute(gl.join(square, square), [1, 3, 0, 2])
    return gl.convert_layout(gl.reshape(both, [2 * XP, XP]), RIGHT, assert_trivial=True)


@gluon.jit
def _mix(y, mixed, zeros, V: gl.constexpr, XP: gl.constexpr, LEFT: gl.constexpr):
    """Return what columns [V, XP] come to. Heads and rests enter in one product, in an order in
    which each thread feeds to the matrix units what it holds: two neighbours of each."""
    head, mixed_head = _head(y), _head(mixed)
    parts = gl.reshape(gl.join(head, y - head), [V, XP // 2, 2, 2])
    left = gl.reshape(gl.permute(parts, [0, 2, 3, 1]), [V, 2 * XP])
    left = gl.convert_layout(left, LEFT, assert_trivial=True)
    return _tf32(left, mixed_head, zeros) + _tf32(left, mixed - mixed_head, zeros)


@gluon.jit
def _load_vectors(
    smem_x, slot, w, GROUP: gl.constexpr, RIGHT: gl.constexpr, IS_PER_CHANNEL: gl.constexpr
):
    """Return a window's vectors in parts of KB channels."""
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    vectors = ()
    for c in gl.static_range(2):
        if IS_PER_CHANNEL:
            parts = smem_x._reinterpret(gl.float32, [4 * GROUP, 8, KB], WIDE)
            part = parts.index((slot // GROUP * 2 + c) * GROUP + slot % GROUP)
        else:
            part = smem_x.index(w).slice(c * KB, KB, dim=1)
        vectors = vectors + (part.permute([1, 0]).load(RIGHT).to(gl.float32),)
    return vectors


@gluon.jit
def _read_state(tile, vectors, zeros, LEFT: gl.constexpr, IS_PER_CHANNEL: gl.constexpr):
    """Return what a window's vectors read out of a tile, [V, XP].

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
    tile, p_out, smem_d, first_d, keys, factors, num_folded,
    NB: gl.constexpr, K: gl.constexpr, V: gl.constexpr, UNITS: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
):  # fmt: skip
    """Store a folded state, as `fold_kernels._store_fold` does; the oldest entries come last."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, UNITS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    eights = factors._reinterpret(gl.float32, [SPAN // 8, 8], FLAT)
    o_v = gl.arange(0, V, gl.SliceLayout(1, UNITS))
    for c in gl.static_range(K // KB):
        added = gl.zeros([V, KB], gl.float32, UNITS)
        # unrolled it would not stay in the instruction cache
        for b in range(NB - (num_folded + 7) // 8, NB):
            # so keys of 16 bits stay what they are, their own heads
            factor = eights.index(b).load(gl.SliceLayout(0, LEFT))
            d = smem_d.index(first_d + b).permute([1, 0]).load(LEFT) * factor[None, :]
            key = keys.index(b).slice(c * KB, KB, dim=1).load(RIGHT)
            added = _dot_eight(d, key.to(gl.float32), added, UNITS, IS_PER_CHANNEL)
        # what is in the first place is the state's
        if IS_PER_CHANNEL:
            first = keys._reinterpret(gl.float32, [8 * NB, K], FLAT).index(0)
            decay = first.slice(c * KB, KB).load(COLUMNS)
        else:
            decay = factors.slice(0, 1).load(COLUMNS)
        state = tile.slice(c * KB, KB, dim=1).load(UNITS) * decay[None, :] + added
        o_k = c * KB + gl.arange(0, KB, COLUMNS)
        gl.store(p_out + o_v[:, None] * K + o_k[None, :], state)


@gluon.jit
def _read(
    out, checkpoint, d_ring, of_states, of_windows, of_folds, of_weights, places, visits,
    GROUP: gl.constexpr, NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, IS_PER_CHANNEL: gl.constexpr, CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Read all of a program's items."""
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, UNITS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SLOTS: gl.constexpr = 2 * GROUP
    smem_states, full, empty = of_states
    smem_d, smem_x, values, w_full = of_windows
    keys, k_full, k_empty = of_folds
    columns, scores, mixed, factors, _, weighed, taken = of_weights
    columns = columns._reinterpret(gl.float32, [SLOTS, XP], FLAT)
    scores = scores._reinterpret(gl.float32, [SLOTS * NB, XP, 8], PLAIN)
    mixed = mixed._reinterpret(gl.float32, [SLOTS, XP, XP], PLAIN)
    factors = factors._reinterpret(gl.float32, [SLOTS, SPAN], FLAT)
    o_v = gl.arange(0, V, gl.SliceLayout(1, UNITS))
    o_x = gl.arange(0, XP, COLUMNS)
    node = o_x % (XP // 2)
    m_row = o_v >= 0
    m_key = m_row[:, None] & (o_x < W)[None, :]
    m_query = m_row[:, None] & ((o_x >= XP // 2) & (node < W))[None, :]
    zeros = gl.zeros([V, XP], gl.float32, UNITS)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    k_phase = 0
    for j in range(0, visits[2]):
        w, phase = j % STAGES, j // STAGES & 1
        slot = j % SLOTS
        tile = smem_states.index(w)
        mbarrier.wait(w_full.index(w), phase)
        mbarrier.wait(weighed.index(j // GROUP % 2), j // SLOTS & 1)
        of_ring = zeros
        for b in gl.static_range(NB):
            right = scores.index((slot // GROUP * NB + b) * GROUP + slot % GROUP)
            d = smem_d.index(w * NB + b).permute([1, 0]).load(LEFT)
            of_ring = _dot_eight(d, right.permute([1, 0]).load(RIGHT), of_ring, UNITS, SPLIT_B=True)
        value = values.index(w).permute([1, 0]).load(UNITS)
        of_ring -= value.to(gl.float32)
        head, num_folded = _head_of(places, j, COLUMNS)
        column = columns.index(slot).load(COLUMNS)
        right = _twice(mixed.index(slot), XP, RIGHT)
        vectors = _load_vectors(smem_x, slot, w, GROUP, RIGHT, IS_PER_CHANNEL)
        # all is at hand that a state is needed for, so that its buffer is free again soon
        mbarrier.wait(full.index(w), phase)
        y = _read_state(tile, vectors, zeros, LEFT, IS_PER_CHANNEL)
        if num_folded != 0:
            fold_row = gl.sum(_place(places, j, 3, COLUMNS), 0).to(gl.int64)
            mbarrier.wait(k_full, k_phase)
            _store_fold(
                tile, checkpoint + (fold_row * HV + head) * (V * K), smem_d, w * NB, keys,
                factors.index(slot), num_folded, NB, K, V, UNITS, IS_PER_CHANNEL,
            )  # fmt: skip
            mbarrier.arrive(k_empty, count=1)
            k_phase ^= 1
        row = _place(places, j, 2, COLUMNS).to(gl.int64)
        o_written = _list(places[2], j, XP).load(COLUMNS).to(gl.int64)
        # the last of what shared memory has for a visit is read
        mbarrier.arrive(empty.index(w), count=1)
        mbarrier.arrive(taken.index(j // GROUP % 2), count=1, pred=j % GROUP == GROUP - 1)
        y = _mix(y * column[None, :] + of_ring, right, zeros, V, XP, LEFT)
        p_out = out + ((row * W + node) * (HV * V) + head * V)[None, :] + o_v[:, None]
        gl.store(p_out, y.to(out.dtype.element_ty), mask=m_query)
        p_written = d_ring + ((o_written * HV + head) * V)[None, :] + o_v[:, None]
        gl.store(p_written, y, mask=m_key)
