"""What the kernels of several stages share: reading logits, the best of many, filters as cuts.

A token's mass is its probability relative to the row's best token, in units of 2^-40: sums of
integers, so neither the split nor the order in which tokens are collected can change a result.
Thresholds are bisected over keys, the integers whose order is that of the logits.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.sampling.noise_kernels import _log

NUM_CUTS = tl.constexpr(8)
MASS_ONE = tl.constexpr(float(1 << 40))
# a row's scratch: counts at the cuts, masses at the cuts, mass of all, tokens collected
ALL_MASS = tl.constexpr(2 * NUM_CUTS.value)
NUM_COLLECTED = tl.constexpr(2 * NUM_CUTS.value + 1)
SCRATCH_LEN = tl.constexpr(2 * NUM_CUTS.value + 2)
NEG_INF = tl.constexpr(float("-inf"))
NO_ID = tl.constexpr(2**31 - 1)


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
def _filters(top_ks, top_ps, slot, V: tl.constexpr):
    """Return a slot's top-k, 0 where it keeps all, its top-p, and whether either filters."""
    top_k, top_p = tl.load(top_ks + slot), tl.load(top_ps + slot)
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
