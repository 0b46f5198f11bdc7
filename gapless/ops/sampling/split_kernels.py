"""The stages of `triton.sample` that read whole rows of logits: a program owns a split of a row."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.sampling.arithmetic import (
    ALL_MASS,
    NEG_INF,
    NO_ID,
    NUM_COLLECTED,
    NUM_CUTS,
    SCRATCH_LEN,
    _best,
    _best_of_splits,
    _better,
    _cut,
    _depth,
    _filters,
    _floor,
    _logits,
    _mass,
)
from gapless.ops.sampling.noise_kernels import _noise_of_run


# any number of rows per slot is served by one compiled kernel
@triton.jit(do_not_specialize=["repeat"])
def _maximum_kernel(
    logits,
    positions,
    slots,
    min_len,
    stop_ids,
    scratch,
    part_value,
    part_id,
    stride_row,
    num_splits,
    repeat,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + tl.program_id(1) // repeat)
    is_early = tl.load(positions + i_row) < tl.load(min_len + slot) if STOPS > 0 else False
    b_best = tl.full([BLOCK], NEG_INF, tl.float32)
    b_id = tl.full([BLOCK], NO_ID, tl.int32)
    for i_block in range(SPLIT // BLOCK):
        o_v = i_split * SPLIT + i_block * BLOCK + tl.arange(0, BLOCK)
        p_row = logits + i_row * stride_row
        b_x = _logits(p_row, o_v, V, stop_ids + slot * STOPS, is_early, STOPS)
        b_best, b_id = _better(b_best, b_id, b_x, o_v)
    best, best_id = _best(b_best, b_id)
    tl.store(part_value + i_row * num_splits + i_split, best)
    tl.store(part_id + i_row * num_splits + i_split, best_id)
    # one is known when compiling, the other is not
    if IS_DRAWN:  # noqa: SIM102
        if i_split == 0:
            o_s = tl.arange(0, triton.next_power_of_2(SCRATCH_LEN))
            p_scratch = scratch + i_row * SCRATCH_LEN + o_s
            tl.store(p_scratch, tl.zeros_like(o_s).to(tl.int64), mask=o_s < SCRATCH_LEN)


@triton.jit(do_not_specialize=["repeat"])
def _survey_kernel(
    logits,
    positions,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_len,
    stop_ids,
    scratch,
    part_value,
    part_id,
    stride_row,
    num_splits,
    repeat,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STOPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + tl.program_id(1) // repeat)
    temperature = tl.load(temperatures + slot)
    _, _, has_filter = _filters(top_ks, top_ps, slot, V)
    best, _ = _best_of_splits(part_value, part_id, i_row, num_splits, BLOCK_S)
    if has_filter & (temperature > 0.0) & (best > NEG_INF):
        is_early = tl.load(positions + i_row) < tl.load(min_len + slot) if STOPS > 0 else False
        peak = tl.div_rn(best, temperature)
        o_cut = tl.arange(0, NUM_CUTS)
        b_cut = peak - _depth(o_cut)
        b_count = tl.zeros([BLOCK, NUM_CUTS], tl.int32)
        b_mass = tl.zeros([BLOCK, NUM_CUTS], tl.int64)
        b_all = tl.zeros([BLOCK], tl.int64)
        for i_block in range(SPLIT // BLOCK):
            o_v = i_split * SPLIT + i_block * BLOCK + tl.arange(0, BLOCK)
            p_row = logits + i_row * stride_row
            b_x = _logits(p_row, o_v, V, stop_ids + slot * STOPS, is_early, STOPS)
            b_x = tl.div_rn(b_x, temperature)
            b_own = _mass(b_x, peak)
            is_above = b_x[:, None] >= b_cut[None, :]
            b_count += is_above.to(tl.int32)
            b_mass += tl.where(is_above, b_own[:, None], 0)
            b_all += b_own
        p_scratch = scratch + i_row * SCRATCH_LEN
        tl.atomic_add(p_scratch + o_cut, tl.sum(b_count, axis=0).to(tl.int64), sem="relaxed")
        tl.atomic_add(p_scratch + NUM_CUTS + o_cut, tl.sum(b_mass, axis=0), sem="relaxed")
        tl.atomic_add(p_scratch + ALL_MASS, tl.sum(b_all), sem="relaxed")


@triton.jit(do_not_specialize=["repeat"])
def _collect_kernel(
    logits,
    positions,
    slots,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    min_len,
    stop_ids,
    scratch,
    part_value,
    part_id,
    drawn_value,
    drawn_id,
    kept_value,
    kept_id,
    stride_row,
    num_splits,
    repeat,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STOPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + tl.program_id(1) // repeat)
    temperature = tl.load(temperatures + slot)
    best, _ = _best_of_splits(part_value, part_id, i_row, num_splits, BLOCK_S)
    if (temperature > 0.0) & (best > NEG_INF):
        position = tl.load(positions + i_row)
        is_early = position < tl.load(min_len + slot) if STOPS > 0 else False
        top_k, top_p, has_filter = _filters(top_ks, top_ps, slot, V)
        peak = tl.div_rn(best, temperature)
        p_row = logits + i_row * stride_row
        if has_filter:
            p_scratch = scratch + i_row * SCRATCH_LEN
            cut, count = _cut(p_scratch, peak, top_k, top_p, V)
            if count <= CAPACITY:
                for i_block in range(SPLIT // BLOCK):
                    o_v = i_split * SPLIT + i_block * BLOCK + tl.arange(0, BLOCK)
                    b_x = _logits(p_row, o_v, V, stop_ids + slot * STOPS, is_early, STOPS)
                    b_x = tl.div_rn(b_x, temperature)
                    b_kept = ((b_x >= cut) & (o_v < V)).to(tl.int32)
                    own = tl.sum(b_kept)
                    if own > 0:
                        start = tl.atomic_add(
                            p_scratch + NUM_COLLECTED, own.to(tl.int64), sem="relaxed"
                        )
                        o_kept = i_row * CAPACITY + start + tl.cumsum(b_kept) - 1
                        tl.store(kept_value + o_kept, b_x, mask=b_kept > 0)
                        tl.store(kept_id + o_kept, o_v, mask=b_kept > 0)
        else:
            seed = tl.load(seeds + slot)
            floor = _floor(peak, tl.load(min_ps + slot))
            b_best = tl.full([BLOCK], NEG_INF, tl.float32)
            b_id = tl.full([BLOCK], NO_ID, tl.int32)
            for i_block in range(SPLIT // BLOCK):
                i_first = i_split * SPLIT + i_block * BLOCK
                o_v = i_first + tl.arange(0, BLOCK)
                b_x = _logits(p_row, o_v, V, stop_ids + slot * STOPS, is_early, STOPS)
                b_x = tl.div_rn(b_x, temperature)
                b_x = tl.where(b_x < floor, NEG_INF, b_x)
                # a block with nothing to choose from needs no noise
                if tl.max(b_x) > NEG_INF:
                    b_x += _noise_of_run(seed, position, i_first, BLOCK)
                b_best, b_id = _better(b_best, b_id, b_x, o_v)
            best, best_id = _best(b_best, b_id)
            tl.store(drawn_value + i_row * num_splits + i_split, best)
            tl.store(drawn_id + i_row * num_splits + i_split, best_id)
