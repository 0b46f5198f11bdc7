"""Noise in kernels, as `philox.gumbel_noise` defines it, and the kernel that makes nothing else."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from gapless.ops.chaining import await_inputs

# the interpreter has no device library; double precision rounds to the same values, or next to them
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
