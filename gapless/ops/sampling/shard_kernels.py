"""The kernels behind `triton.shard_best` and `triton.best_of_all`: one launch each."""

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.sampling.arithmetic import NEG_INF, NO_ID, _best, _better
from gapless.ops.sampling.noise_kernels import _noise_of_run


# any number of rows per slot is served by one compiled kernel
@triton.jit(do_not_specialize=["repeat"])
def _shard_best_kernel(
    logits,
    positions,
    slots,
    temperatures,
    seeds,
    pairs,
    stride_row,
    first,
    num_splits,
    repeat,
    V: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAD: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Find the best of one split of one row: V ids from `first` on, of which LEAD = first % 4."""
    await_inputs(CHAINED)
    i_split = tl.program_id(0)
    i_row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + tl.program_id(1) // repeat)
    temperature = tl.load(temperatures + slot) if IS_DRAWN else 0.0
    b_best = tl.full([BLOCK], NEG_INF, tl.float32)
    b_id = tl.full([BLOCK], NO_ID, tl.int32)
    for i_block in range(SPLIT // BLOCK):
        # runs of noise begin at multiples of 4, LEAD ids before the first of the shard
        i_first = i_split * SPLIT + i_block * BLOCK - LEAD
        o_v = i_first + tl.arange(0, BLOCK)
        m_v = (o_v >= 0) & (o_v < V)
        b_x = tl.load(logits + i_row * stride_row + o_v, mask=m_v, other=NEG_INF)
        # NaN is never chosen
        b_x = tl.where(b_x > NEG_INF, b_x, NEG_INF)
        # one is known when compiling, the other is not
        if IS_DRAWN:  # noqa: SIM102
            if temperature > 0.0:
                b_x = tl.div_rn(b_x, temperature)
                if tl.max(b_x) > NEG_INF:
                    seed, position = tl.load(seeds + slot), tl.load(positions + i_row)
                    b_x += _noise_of_run(seed, position, first + i_first, BLOCK)
        b_best, b_id = _better(b_best, b_id, b_x, tl.where(m_v, o_v, NO_ID))
    best, best_id = _best(b_best, b_id)
    p_pair = pairs + (i_row * num_splits + i_split) * 2
    tl.store(p_pair, best)
    # a split without a finite logit stands for its shard's first id
    tl.store(p_pair + 1, (first + tl.where(best_id < V, best_id, 0)).to(tl.float32))


@triton.jit
def _best_of_all_kernel(
    pairs, tokens, num_pairs, V: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < num_pairs
    p_pair = pairs + (i_row * num_pairs + o_n) * 2
    b_best = tl.load(p_pair, mask=m_n, other=NEG_INF)
    b_id = tl.load(p_pair + 1, mask=m_n, other=0.0)
    # a lost rank leaves anything
    b_best = tl.where(b_best > NEG_INF, b_best, NEG_INF)
    b_id = tl.where((b_id >= 0) & (b_id < V), b_id, 0.0).to(tl.int32)
    _, token = _best(b_best, tl.where(m_n, b_id, NO_ID))
    tl.store(tokens + i_row, token.to(tl.int64))
