"""The last stage of `triton.sample`: a program owns a row and settles its token."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.sampling.arithmetic import (
    ALL_MASS,
    NEG_INF,
    NO_ID,
    SCRATCH_LEN,
    _best,
    _best_of_splits,
    _better,
    _cut,
    _filters,
    _floor,
    _key,
    _logits,
    _mass,
)
from gapless.ops.sampling.noise_kernels import _noise_of_ids


@triton.jit
def _candidates(
    i_first,
    p_value,
    p_id,
    num,
    temperature,
    p_stops,
    is_early,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    IS_COLLECTED: tl.constexpr,
):
    """Load scaled logits and ids, of collected tokens or of a row's own."""
    o_n = i_first + tl.arange(0, BLOCK)
    if IS_COLLECTED:
        b_x = tl.load(p_value + o_n, mask=o_n < num, other=NEG_INF)
        b_id = tl.load(p_id + o_n, mask=o_n < num, other=NO_ID)
    else:
        b_x = tl.div_rn(_logits(p_value, o_n, V, p_stops, is_early, STOPS), temperature)
        b_id = o_n
    return b_x, b_id


@triton.jit
def _count_from(
    key,
    p_value,
    p_id,
    num,
    temperature,
    p_stops,
    is_early,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    IS_COLLECTED: tl.constexpr,
):
    """Count the candidates whose keys are at least `key`."""
    b_count = tl.zeros([BLOCK], tl.int32)
    for i_first in range(0, num, BLOCK):
        b_x, _ = _candidates(
            i_first, p_value, p_id, num, temperature, p_stops, is_early, V, BLOCK, STOPS,
            IS_COLLECTED,
        )  # fmt: skip
        b_count += (_key(b_x) >= key).to(tl.int32)
    return tl.sum(b_count)


@triton.jit
def _mass_beyond(
    key,
    peak,
    p_value,
    p_id,
    num,
    temperature,
    p_stops,
    is_early,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    IS_COLLECTED: tl.constexpr,
):
    """Sum the mass of the candidates whose keys are above `key`."""
    b_mass = tl.zeros([BLOCK], tl.int64)
    for i_first in range(0, num, BLOCK):
        b_x, _ = _candidates(
            i_first, p_value, p_id, num, temperature, p_stops, is_early, V, BLOCK, STOPS,
            IS_COLLECTED,
        )  # fmt: skip
        b_mass += tl.where(_key(b_x) > key, _mass(b_x, peak), 0)
    return tl.sum(b_mass)


@triton.jit
def _choose_among(
    p_value,
    p_id,
    num,
    temperature,
    p_stops,
    is_early,
    cut,
    peak,
    all_mass,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    IS_COLLECTED: tl.constexpr,
):
    """Find the thresholds of top-k and top-p among candidates, and the best of what they keep."""
    low = _key(cut).to(tl.int64)
    top = _key(peak).to(tl.int64)
    if top_k > 0:
        # the largest key with k keys from it on; there are none beyond the top
        high = top + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            count = _count_from(
                middle, p_value, p_id, num, temperature, p_stops, is_early, V, BLOCK, STOPS,
                IS_COLLECTED,
            )  # fmt: skip
            low = tl.where(count >= top_k, middle, low)
            high = tl.where(count >= top_k, high, middle)
        all_mass = _mass_beyond(
            low - 1, peak, p_value, p_id, num, temperature, p_stops, is_early, V, BLOCK, STOPS,
            IS_COLLECTED,
        )  # fmt: skip
    if top_p < 1.0:
        # the smallest key with less than top-p's share of the mass beyond it; the top always stays
        wanted = top_p.to(tl.float64) * all_mass.to(tl.float64)
        low -= 1
        high = top
        while high - low > 1:
            middle = low + (high - low) // 2
            mass = _mass_beyond(
                middle, peak, p_value, p_id, num, temperature, p_stops, is_early, V, BLOCK,
                STOPS, IS_COLLECTED,
            )  # fmt: skip
            is_less = mass.to(tl.float64) < wanted
            high = tl.where(is_less, middle, high)
            low = tl.where(is_less, low, middle)
        low = high
    floor = _floor(peak, min_p)
    b_best = tl.full([BLOCK], NEG_INF, tl.float32)
    b_best_id = tl.full([BLOCK], NO_ID, tl.int32)
    for i_first in range(0, num, BLOCK):
        b_x, b_id = _candidates(
            i_first, p_value, p_id, num, temperature, p_stops, is_early, V, BLOCK, STOPS,
            IS_COLLECTED,
        )  # fmt: skip
        b_x = tl.where((_key(b_x) < low) | (b_x < floor), NEG_INF, b_x)
        if tl.max(b_x) > NEG_INF:
            b_x += _noise_of_ids(seed, position, b_id)
        b_best, b_best_id = _better(b_best, b_best_id, b_x, b_id)
    _, best_id = _best(b_best, b_best_id)
    return best_id


# any number of rows per slot is served by one compiled kernel
@triton.jit(do_not_specialize=["repeat"])
def _choose_kernel(
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
    tokens,
    stride_row,
    num_splits,
    repeat,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STOPS: tl.constexpr,
    CAPACITY: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    best, token = _best_of_splits(part_value, part_id, i_row, num_splits, BLOCK_S)
    if IS_DRAWN:
        slot = tl.load(slots + tl.program_id(0) // repeat)
        temperature = tl.load(temperatures + slot)
        # a row without a finite logit is none that anyone asked about
        if (temperature > 0.0) & (best > NEG_INF):
            top_k, top_p, has_filter = _filters(top_ks, top_ps, slot, V)
            if has_filter:
                position, seed = tl.load(positions + i_row), tl.load(seeds + slot)
                is_early = position < tl.load(min_len + slot) if STOPS > 0 else False
                min_p = tl.load(min_ps + slot)
                p_stops = stop_ids + slot * STOPS
                p_scratch = scratch + i_row * SCRATCH_LEN
                peak = tl.div_rn(best, temperature)
                cut, count = _cut(p_scratch, peak, top_k, top_p, V)
                all_mass = tl.load(p_scratch + ALL_MASS)
                if count <= CAPACITY:
                    token = _choose_among(
                        kept_value + i_row * CAPACITY, kept_id + i_row * CAPACITY,
                        count.to(tl.int32), temperature, p_stops, is_early, cut, peak, all_mass,
                        top_k, top_p, min_p, seed, position, V, BLOCK, STOPS, IS_COLLECTED=True,
                    )  # fmt: skip
                else:
                    token = _choose_among(
                        logits + i_row * stride_row, kept_id,
                        V, temperature, p_stops, is_early, cut, peak, all_mass,
                        top_k, top_p, min_p, seed, position, V, BLOCK, STOPS, IS_COLLECTED=False,
                    )  # fmt: skip
            else:
                _, token = _best_of_splits(drawn_value, drawn_id, i_row, num_splits, BLOCK_S)
    # whatever lies in a row, its token is one
    tl.store(tokens + i_row, tl.minimum(token, V - 1).to(tl.int64))
