"""The items of a resident program, and what its parts share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# renamed in Triton 3.7
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# items that are weighed at once
GROUP = gl.constexpr(4)
# words of an item's weights: the ring's for d, the ring's for the output and the fold's, NP each,
# and then these
OF_VALUE = gl.constexpr(0)
OUT_OF_VALUE = gl.constexpr(1)
OF_KEY = gl.constexpr(2)
OUT_OF_KEY = gl.constexpr(3)
OUT_OF_QUERY = gl.constexpr(4)
FOLD_DECAY = gl.constexpr(5)
ROW = gl.constexpr(6)
WRITTEN = gl.constexpr(7)
NUM_FOLDED = gl.constexpr(8)
FOLD_ROW = gl.constexpr(9)
WORDS = gl.constexpr(64)


@gluon.jit
def _visited(j, first, count):
    """Return which of a program's items its j-th visit is to.

    Every fourth is one of the first quarter, among which are those that fold; and programs begin at
    different ones, or all of them would write their folds at the same time, and read at others.
    """
    j = (j + first) % count
    other = (count + 3) // 4 + j - j // 4 - 1
    return other + (j % 4 == 0) * (j // 4 - other)


@gluon.jit
def _items(j0, first, step, count, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the items [SIZE] of visits from j0 on; beyond the last one, the last one's."""
    j = gl.minimum(j0 + gl.arange(0, SIZE, LAYOUT), count - 1)
    return first + _visited(j, first, count) * step


@gluon.jit
def _newest_first(NP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the numbers of a ring's entries [NP] in the order in which all parts have them.

    Decays add up from the newest on, and sums in the other direction take an exchange each.
    """
    return NP - 1 - gl.arange(0, NP, LAYOUT)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _bits(x):
    """Return whole numbers below 2^31 as words that hold them, or the other way round."""
    if x.dtype == gl.float32:
        return x.to(gl.int32, bitcast=True)
    else:
        return x.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _word(weights, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a word of an item's weights, [1]."""
    return weights.slice(i, 1).load(LAYOUT)


@gluon.jit
def _number(weights, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a whole number out of an item's weights."""
    return gl.sum(_bits(_word(weights, i, LAYOUT)), 0)


@gluon.jit
def _pairs(p):
    """Return a pointer to pairs of bfloat16: single ones would each take a register."""
    return p.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _unpacked(x):
    """Return both values of pairs of bfloat16."""
    return (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _float_pairs(p):
    """Return a pointer to pairs of fp32."""
    return p.to(gl.pointer_type(gl.int64), bitcast=True)


@gluon.jit
def _unpacked_floats(x):
    """Return both values of pairs of fp32."""
    first = x.to(gl.int32).to(gl.float32, bitcast=True)
    return first, (x >> 32).to(gl.int32).to(gl.float32, bitcast=True)
