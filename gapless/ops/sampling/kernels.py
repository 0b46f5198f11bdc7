"""The kernels behind `triton.py`: four stages, of which a greedy row takes the first and last.

    maximum   the largest logit of each split of a row
    survey    for top-k and top-p: how many tokens, and how much mass, lie above each of a few cuts
    collect   without those filters: the best perturbed logit of each split; with them: the tokens
              above the highest cut that is sure to hold all that is kept
    choose    the filters' thresholds by bisection over what was collected, and the best of the rest

A token's mass is its probability relative to the row's best token, in units of 2^-40: sums of
integers, so neither the split nor the order in which tokens are collected can change a result.
Thresholds are bisected over keys, the integers whose order is that of the logits.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from gapless.ops.chaining import await_inputs

# the interpreter has no device library; double precision rounds to the same values, or next to them
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NUM_CUTS = tl.constexpr(8)
MASS_ONE = tl.constexpr(float(1 << 40))
# a row's scratch: counts at the cuts, masses at the cuts, mass of all, tokens collected
ALL_MASS = tl.constexpr(2 * NUM_CUTS.value)
NUM_COLLECTED = tl.constexpr(2 * NUM_CUTS.value + 1)
SCRATCH_LEN = tl.constexpr(2 * NUM_CUTS.value + 2)
NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _log(x):
    if IS_INTERPRETED:
        return tl.log(x.to(tl.float64)).to(tl.float32)
    else:
        return libdevice.log(x)


@triton.jit
def _log1p(x):
    if IS_INTERPRETED:
        return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)
    else:
        return libdevice.log1p(x)


@triton.jit
def _philox(block, seed, position):
    """Return the words of counters (block, position, 0, 0) under a seed, as `philox.philox`."""
    nothing = block ^ block
    c0, c1, c2, c3 = block, nothing + (position & 0xFFFFFFFF).to(tl.uint32), nothing, nothing
    for i_round in tl.static_range(10):
        k0 = (((seed & 0xFFFFFFFF) + i_round * 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((((seed >> 32) & 0xFFFFFFFF) + i_round * 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
        high0 = tl.umulhi(c0, nothing + 0xD2511F53)
        high2 = tl.umulhi(c2, nothing + 0xCD9E8D57)
        low0 = c0 * (nothing + 0xD2511F53)
        low2 = c2 * (nothing + 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word):
    uniform = tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    return -_log(-_log1p(-uniform))


@triton.jit
def _noise_of_run(seed, position, i_first, BLOCK: tl.constexpr):
    """Noise of BLOCK ids from a multiple of 4 on: every word of every counter."""
    block = (i_first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    c0, c1, c2, c3 = _philox(block, seed, position)
    word = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    return _gumbel(word)


@triton.jit
def _noise_of_ids(seed, position, ids):
    """Noise of any ids: one word of each one's counter."""
    c0, c1, c2, c3 = _philox((ids // 4).to(tl.uint32), seed, position)
    i_word = ids % 4
    word = tl.where(i_word < 2, tl.where(i_word == 0, c0, c1), tl.where(i_word == 2, c2, c3))
    return _gumbel(word)


@triton.jit
def _logits(p_row, o_v, V: tl.constexpr, p_stops, is_early, STOPS: tl.constexpr):
    """Load logits of a row, -inf for NaN, beyond the vocabulary, and for early stop ids."""
    b_x = tl.load(p_row + o_v, mask=o_v < V, other=NEG_INF)
    b_x = tl.where(b_x > NEG_INF, b_x, NEG_INF)
    # one is known when compiling, the other is not
    if STOPS > 0:  # noqa: SIM102
        if is_early:
            for i_stop in tl.static_range(STOPS):
                b_x = tl.where(o_v == tl.load(p_stops + i_stop), NEG_INF, b_x)
    return b_x


@triton.jit
def _better(b_best, b_id, b_x, o_v):
    """Keep the larger value of each lane, of equals the one with the lower id."""
    wins = (b_x > b_best) | ((b_x == b_best) & (o_v < b_id))
    return tl.where(wins, b_x, b_best), tl.where(wins, o_v, b_id)


@triton.jit
def _best(b_best, b_id):
    """Return the largest value, and the lowest id that has it."""
    best = tl.max(b_best)
    return best, tl.min(tl.where(b_best == best, b_id, NO_ID))


@triton.jit
def _best_of_splits(values, ids, i_row, num_splits, BLOCK_S: tl.constexpr):
    o_s = tl.arange(0, BLOCK_S)
    m_s = o_s < num_splits
    b_best = tl.load(values + i_row * num_splits + o_s, mask=m_s, other=NEG_INF)
    b_id = tl.load(ids + i_row * num_splits + o_s, mask=m_s, other=NO_ID)
    return _best(b_best, b_id)


@triton.jit
def _key(b_x):
    """Map floats to integers of the same order; both zeros to one."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _filters(top_ks, top_ps, i_row, V: tl.constexpr):
    """Return a row's top-k, 0 where it keeps all, its top-p, and whether either filters."""
    top_k, top_p = tl.load(top_ks + i_row), tl.load(top_ps + i_row)
    top_k = tl.where((top_k > 0) & (top_k < V), top_k, 0)
    return top_k, top_p, (top_k > 0) | (top_p < 1.0)


@triton.jit
def _floor(peak, min_p):
    """Return the least scaled logit that min-p keeps."""
    return tl.where(min_p > 0.0, peak + _log(tl.maximum(min_p, 1e-38)), NEG_INF)


@triton.jit
def _mass(b_x, peak):
    return (tl.exp(b_x - peak) * MASS_ONE).to(tl.int64)


@triton.jit
def _depth(o_cut):
    """How far a cut lies under the row's largest logit: 1.5 to 18.125, exact in float32."""
    number = o_cut.to(tl.float32)
    return 1.5 * (number + 1.0) + 0.125 * number * number


@triton.jit
def _cut(p_scratch, peak, top_k, top_p, V: tl.constexpr):
    """Return the highest cut that has all that top-k and top-p keep, and how many lie above it."""
    o_cut = tl.arange(0, NUM_CUTS)
    b_count = tl.load(p_scratch + o_cut)
    b_mass = tl.load(p_scratch + NUM_CUTS + o_cut).to(tl.float64)
    wanted = top_p.to(tl.float64) * tl.load(p_scratch + ALL_MASS).to(tl.float64)
    serves = (b_count >= top_k) & (b_mass >= tl.where(top_p < 1.0, wanted, -1.0))
    i_cut = tl.min(tl.where(serves, o_cut, NUM_CUTS))
    count = tl.sum(tl.where(o_cut == i_cut, b_count, 0))
    is_deepest = i_cut == NUM_CUTS
    return tl.where(is_deepest, NEG_INF, peak - _depth(i_cut)), tl.where(is_deepest, V, count)


@triton.jit
def _maximum_kernel(
    logits,
    positions,
    min_len,
    stop_ids,
    scratch,
    part_value,
    part_id,
    stride_row,
    num_splits,
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
    is_early = tl.load(positions + i_row) < tl.load(min_len + i_row) if STOPS > 0 else False
    b_best = tl.full([BLOCK], NEG_INF, tl.float32)
    b_id = tl.full([BLOCK], NO_ID, tl.int32)
    for i_block in range(SPLIT // BLOCK):
        o_v = i_split * SPLIT + i_block * BLOCK + tl.arange(0, BLOCK)
        p_row = logits + i_row * stride_row
        b_x = _logits(p_row, o_v, V, stop_ids + i_row * STOPS, is_early, STOPS)
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


@triton.jit
def _survey_kernel(
    logits,
    positions,
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
    temperature = tl.load(temperatures + i_row)
    _, _, has_filter = _filters(top_ks, top_ps, i_row, V)
    best, _ = _best_of_splits(part_value, part_id, i_row, num_splits, BLOCK_S)
    if has_filter & (temperature > 0.0) & (best > NEG_INF):
        is_early = tl.load(positions + i_row) < tl.load(min_len + i_row) if STOPS > 0 else False
        peak = tl.div_rn(best, temperature)
        o_cut = tl.arange(0, NUM_CUTS)
        b_cut = peak - _depth(o_cut)
        b_count = tl.zeros([BLOCK, NUM_CUTS], tl.int32)
        b_mass = tl.zeros([BLOCK, NUM_CUTS], tl.int64)
        b_all = tl.zeros([BLOCK], tl.int64)
        for i_block in range(SPLIT // BLOCK):
            o_v = i_split * SPLIT + i_block * BLOCK + tl.arange(0, BLOCK)
            p_row = logits + i_row * stride_row
            b_x = _logits(p_row, o_v, V, stop_ids + i_row * STOPS, is_early, STOPS)
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


@triton.jit
def _collect_kernel(
    logits,
    positions,
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
    temperature = tl.load(temperatures + i_row)
    best, _ = _best_of_splits(part_value, part_id, i_row, num_splits, BLOCK_S)
    if (temperature > 0.0) & (best > NEG_INF):
        position = tl.load(positions + i_row)
        is_early = position < tl.load(min_len + i_row) if STOPS > 0 else False
        top_k, top_p, has_filter = _filters(top_ks, top_ps, i_row, V)
        peak = tl.div_rn(best, temperature)
        p_row = logits + i_row * stride_row
        if has_filter:
            p_scratch = scratch + i_row * SCRATCH_LEN
            cut, count = _cut(p_scratch, peak, top_k, top_p, V)
            if count <= CAPACITY:
                for i_block in range(SPLIT // BLOCK):
                    o_v = i_split * SPLIT + i_block * BLOCK + tl.arange(0, BLOCK)
                    b_x = _logits(p_row, o_v, V, stop_ids + i_row * STOPS, is_early, STOPS)
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
            seed = tl.load(seeds + i_row)
            floor = _floor(peak, tl.load(min_ps + i_row))
            b_best = tl.full([BLOCK], NEG_INF, tl.float32)
            b_id = tl.full([BLOCK], NO_ID, tl.int32)
            for i_block in range(SPLIT // BLOCK):
                i_first = i_split * SPLIT + i_block * BLOCK
                o_v = i_first + tl.arange(0, BLOCK)
                b_x = _logits(p_row, o_v, V, stop_ids + i_row * STOPS, is_early, STOPS)
                b_x = tl.div_rn(b_x, temperature)
                b_x = tl.where(b_x < floor, NEG_INF, b_x)
                # a block with nothing to choose from needs no noise
                if tl.max(b_x) > NEG_INF:
                    b_x += _noise_of_run(seed, position, i_first, BLOCK)
                b_best, b_id = _better(b_best, b_id, b_x, o_v)
            best, best_id = _best(b_best, b_id)
            tl.store(drawn_value + i_row * num_splits + i_split, best)
            tl.store(drawn_id + i_row * num_splits + i_split, best_id)


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


@triton.jit
def _choose_kernel(
    logits,
    positions,
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
        temperature = tl.load(temperatures + i_row)
        # a row without a finite logit is none that anyone asked about
        if (temperature > 0.0) & (best > NEG_INF):
            top_k, top_p, has_filter = _filters(top_ks, top_ps, i_row, V)
            if has_filter:
                position, seed = tl.load(positions + i_row), tl.load(seeds + i_row)
                is_early = position < tl.load(min_len + i_row) if STOPS > 0 else False
                min_p = tl.load(min_ps + i_row)
                p_stops = stop_ids + i_row * STOPS
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


@triton.jit
def _noise_kernel(
    seeds,
    positions,
    out,
    first,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(1).to(tl.int64)
    # runs of noise begin at multiples of 4, LEAD ids before the first that is wanted
    i_first = tl.program_id(0) * BLOCK - LEAD
    o_v = i_first + tl.arange(0, BLOCK)
    seed, position = tl.load(seeds + i_row), tl.load(positions + i_row)
    b_noise = _noise_of_run(seed, position, first + i_first, BLOCK)
    tl.store(out + i_row * V + o_v, b_noise, mask=(o_v >= 0) & (o_v < V))


@triton.jit
def _mask_kernel(
    logits,
    mask_of,
    masks,
    out,
    stride_row,
    stride_mask,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < V
    b_x = tl.load(logits + i_row * stride_row + o_v, mask=m_v)
    i_mask = tl.load(mask_of + i_row).to(tl.int64)
    # rows without a grammar, nearly all of them, are spared the reading of a mask
    if i_mask > 0:
        b_words = tl.load(masks + i_mask * stride_mask + o_v // 32, mask=m_v, other=0)
        b_x = tl.where((b_words >> (o_v % 32)) & 1 == 1, b_x, NEG_INF)
    tl.store(out + i_row * V + o_v, b_x, mask=m_v)
