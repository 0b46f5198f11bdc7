"""Outputs and folds out of states that have arrived, by parts of a resident program.

`kernel.py` has the whole.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.ops.linear_replay.arithmetic import _decay, _exact_decay, _head
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
    WORDS,
    WRITTEN,
    _add,
    _bits,
    _newest_first,
    _number,
    _visited,
    _word,
)


@gluon.jit
def _partial(products, PARTS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the sums of each thread's own products, [V, 8] of [V, PARTS * 8 * WIDTH]."""
    products = gl.reshape(products, [products.shape[0], PARTS, 8, WIDTH])
    return gl.convert_layout(gl.sum(gl.sum(products, 3), 1), LAYOUT)


@gluon.jit
def _store_fold(
    tile, p_out, ring_d, weights, folded, k_phase,
    NP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Store a tile of a folded state, as `fold_kernels._store_fold` does.

    d enters the matrix units as three bfloat16 values, 24 bits.
    """
    smem_keys, _, k_full, k_empty = folded
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 2)
    factor = weights.slice(2 * NP, NP).load(gl.SliceLayout(0, LEFT))
    d = ring_d.permute([1, 0]).load(LEFT) * factor[None, :]
    decay = _word(weights, 3 * NP + FOLD_DECAY, gl.SliceLayout(1, UNITS))
    mbarrier.wait(k_full, k_phase)
    keys = smem_keys.load(RIGHT)
    mbarrier.arrive(k_empty, count=1)
    high = d.to(gl.bfloat16)
    d -= high.to(gl.float32)
    middle = d.to(gl.bfloat16)
    low = (d - middle.to(gl.float32)).to(gl.bfloat16)
    added = mma_v2(low, keys, gl.zeros([V, K], gl.float32, UNITS))
    added = mma_v2(middle, keys, added)
    added = mma_v2(high, keys, added)
    o_v = gl.arange(0, V, gl.SliceLayout(1, UNITS))
    o_k = gl.arange(0, K, gl.SliceLayout(0, UNITS))
    state = tile.load(UNITS) * decay[:, None] + added
    gl.store(p_out + o_v[:, None] * K + o_k[None, :], state)


@gluon.jit
def _decay_keys(
    smem_keys, smem_g, decayed, decays, num_folded, NP: gl.constexpr, K: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Store the keys of a fold as they count in it, and what the state decays by [K].

    A thread has a channel. Entries that are not folded become zeros.
    """
    KEYS: gl.constexpr = gl.BlockedLayout([NP, 1], [1, 32], [1, num_warps], [0, 1])
    o_n = _newest_first(NP, gl.SliceLayout(1, KEYS))[:, None]
    keys = smem_keys.load(KEYS).to(gl.float32)
    g = smem_g.load(KEYS)
    g_newer = gl.where(o_n + 1 < num_folded, g, 0.0)
    keys *= _decay(gl.associative_scan(g_newer, 0, _add))
    decayed.store(gl.where(o_n < num_folded, keys, 0.0))
    g_oldest = gl.where(o_n == NP - 1, g, 0.0)
    decays.store(_exact_decay(gl.sum(g_newer, 0) + gl.sum(g_oldest, 0)))


@gluon.jit
def _store_channel_fold(
    tile, p_out, ring_d, weights, folded, k_phase, decayed, decays, num_folded,
    NP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Store the same with a decay per channel: keys are fp32 then, and products of 23 bits."""
    smem_keys, smem_g, k_full, k_empty = folded
    KB: gl.constexpr = 32
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    factor = weights.slice(2 * NP, NP).load(gl.SliceLayout(0, LEFT))
    d = ring_d.permute([1, 0]).load(LEFT) * factor[None, :]
    d_head = _head(d)
    o_v = gl.arange(0, V, gl.SliceLayout(1, UNITS))
    o_k = gl.arange(0, KB, gl.SliceLayout(0, UNITS))
    mbarrier.wait(k_full, k_phase)
    _decay_keys(smem_keys, smem_g, decayed, decays, num_folded, NP, K, num_warps)
    mbarrier.arrive(k_empty, count=1)
    for c in gl.static_range(K // KB):
        keys = decayed.slice(c * KB, KB, dim=1).load(RIGHT)
        head = _head(keys)
        added = gl.zeros([V, KB], gl.float32, UNITS)
        added = mma_v2(d - d_head, head, added, input_precision="tf32")
        added = mma_v2(d_head, keys - head, added, input_precision="tf32")
        added = mma_v2(d_head, head, added, input_precision="tf32")
        decay = decays.slice(c * KB, KB).load(gl.SliceLayout(0, UNITS))
        state = tile.slice(c * KB, KB, dim=1).load(UNITS) * decay[None, :] + added
        gl.store(p_out + o_v[:, None] * K + (c * KB + o_k)[None, :], state)


@gluon.jit
def _read(
    out, checkpoint, d_ring, fetched, weighed, folded, decayed, visits,
    NP: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr, CHAINED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Read all of a program's items."""
    # four rows of a thread; eight threads share a row's 128 bytes
    TILE: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [num_warps, 1], [1, 0])
    PARTIAL: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [num_warps, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, TILE)
    FACTOR: gl.constexpr = gl.SliceLayout(1, PARTIAL)
    ENTRIES: gl.constexpr = gl.SliceLayout(0, PARTIAL)
    REST: gl.constexpr = 3 * NP
    o_v = gl.arange(0, V, ROWS)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem_states, smem_d, smem_x, smem_v, full, empty = fetched
    weights, _, w_full, w_empty = weighed
    first, step, count = visits
    weights = weights._reinterpret(gl.float32, [2 * GROUP, WORDS], FLAT)
    if IS_PER_CHANNEL:
        smem_x = smem_x._reinterpret(gl.float32, [2 * GROUP, 2 * K], FLAT)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    stage = 0
    phase = 0
    k_phase = 0
    for j in range(0, count):
        head = (first + _visited(j, first, count) * step) % HV
        mbarrier.wait(full.index(stage), phase)
        tile = smem_states.index(stage).load(TILE)
        group = j // GROUP
        own = weights.index(j % (2 * GROUP))
        if IS_PER_CHANNEL:
            mbarrier.wait(w_full.index(group & 1), (group >> 1) & 1)
            x = smem_x.index(j % (2 * GROUP))
        else:
            x = smem_x.index(stage)
        key, query = x.slice(0, K).load(COLUMNS), x.slice(K, K).load(COLUMNS)
        of_key = _partial(tile * key.to(gl.float32)[None, :], K // 32, 4, PARTIAL)
        of_query = _partial(tile * query.to(gl.float32)[None, :], K // 32, 4, PARTIAL)
        if not IS_PER_CHANNEL:
            mbarrier.wait(w_full.index(group & 1), (group >> 1) & 1)
        value = smem_v.index(stage).load(ROWS).to(gl.float32)
        ring_d = smem_d.index(stage).permute([1, 0]).load(PARTIAL)
        num_folded = _number(own, REST + NUM_FOLDED, ROWS)
        # all that an item without a fold needs is in registers
        mbarrier.arrive(empty.index(stage), count=1, pred=num_folded == 0)
        d_weights, out_weights = own.slice(0, NP).load(ENTRIES), own.slice(NP, NP).load(ENTRIES)
        d, y = of_key, of_query
        if not IS_PER_CHANNEL:
            d = of_key * _word(own, REST + OF_KEY, FACTOR)[:, None]
            y = of_key * _word(own, REST + OUT_OF_KEY, FACTOR)[:, None]
            y += of_query * _word(own, REST + OUT_OF_QUERY, FACTOR)[:, None]
        d += _partial(ring_d * d_weights[None, :], NP // 8, 1, PARTIAL)
        y += _partial(ring_d * out_weights[None, :], NP // 8, 1, PARTIAL)
        d_value = value * _word(own, REST + OF_VALUE, ROWS)
        y_value = value * _word(own, REST + OUT_OF_VALUE, ROWS)
        row = _bits(_word(own, REST + ROW, ROWS)).to(gl.int64)
        written = _bits(_word(own, REST + WRITTEN, ROWS)).to(gl.int64)
        if num_folded != 0:
            fold_row = _number(own, REST + FOLD_ROW, ROWS).to(gl.int64)
            p_out = checkpoint + (fold_row * HV + head) * (V * K)
            if IS_PER_CHANNEL:
                _store_channel_fold(
                    smem_states.index(stage), p_out, smem_d.index(stage), own, folded, k_phase,
                    decayed[0], decayed[1], num_folded, NP, K, V, num_warps,
                )  # fmt: skip
            else:
                _store_fold(
                    smem_states.index(stage), p_out, smem_d.index(stage), own, folded, k_phase,
                    NP, K, V, num_warps,
                )  # fmt: skip
            mbarrier.arrive(empty.index(stage), count=1)
            k_phase ^= 1
        mbarrier.arrive(w_empty.index(group & 1), count=1, pred=j % GROUP == GROUP - 1)
        d = gl.convert_layout(gl.sum(d, 1), ROWS) + d_value
        y = gl.convert_layout(gl.sum(y, 1), ROWS) + y_value
        gl.store(d_ring + (written * HV + head) * V + o_v, d)
        gl.store(out + (row * HV + head) * V + o_v, y.to(out.dtype.element_ty))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
