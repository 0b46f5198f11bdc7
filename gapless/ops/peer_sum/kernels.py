"""The kernels behind `triton.py`: a program sends its part of a message and awaits the others'."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _send(
    x,
    addresses,
    num_calls,
    o_word,
    mask,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Write words [BLOCK] of the message into the mailboxes that the other ranks keep for this one.

    Return the program's call number, the words, and the mailbox where rank 0's arrive; those of the
    other ranks follow, CAPACITY entries each. Calls take turns with two sets of mailboxes.
    """
    call = tl.load(num_calls + tl.program_id(0)) + 1
    b_own = tl.load(x + o_word, mask=mask, other=0)
    turn = (call & 1) * (WORLD * CAPACITY)
    offset = turn + RANK * CAPACITY
    b_entry = (call.to(tl.int64) << 32) | (b_own.to(tl.int64) & 0xFFFFFFFF)
    for step in tl.static_range(1, WORLD):
        # ranks begin with different peers, so that no link is everybody's first
        base = tl.load(addresses + (RANK + step) % WORLD).to(tl.pointer_type(tl.int64))
        tl.store(base + offset + o_word, b_entry, mask=mask)
    # what is sent must be under way before anything is awaited
    tl.debug_barrier()
    own = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + turn
    return call, b_own, own


@triton.jit
def _await(p_entry, mask, call, is_stopped, POLLS: tl.constexpr):
    """Return the words [BLOCK] of entries, once all of them are of this call.

    Host memory is slow to read: only one in POLLS looks whether there is nothing to wait for.
    """
    b_entry = tl.load(p_entry, mask=mask, other=0, volatile=True)
    num_missing = tl.sum((mask & ((b_entry >> 32).to(tl.int32) != call)).to(tl.int32))
    num_polls = 0
    stop = 0
    while (num_missing > 0) & (stop == 0):
        b_entry = tl.load(p_entry, mask=mask, other=0, volatile=True)
        num_missing = tl.sum((mask & ((b_entry >> 32).to(tl.int32) != call)).to(tl.int32))
        num_polls += 1
        if num_polls % POLLS == 0:
            stop = tl.load(is_stopped, volatile=True)
    return b_entry.to(tl.int32)


@triton.jit
def _low_half(b_word, DTYPE: tl.constexpr):
    return (b_word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high_half(b_word, DTYPE: tl.constexpr):
    return _low_half(b_word >> 16, DTYPE)


@triton.jit
def _to_half(b_x, DTYPE: tl.constexpr):
    return b_x.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


# any size of message is served by one compiled kernel
@triton.jit(do_not_specialize=["num_words"])
def _peer_sum_kernel(
    x,
    out,
    addresses,
    num_calls,
    is_stopped,
    num_words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    POLLS: tl.constexpr,
):
    """Sum messages of 32-bit words that hold one value of DTYPE each, or two of half the size."""
    o_word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_word < num_words
    call, b_own, own = _send(x, addresses, num_calls, o_word, mask, RANK, WORLD, CAPACITY)
    b_first = tl.zeros([BLOCK], dtype=tl.float32)
    b_second = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(WORLD):
        if source == RANK:
            b_word = b_own
        else:
            b_word = _await(own + source * CAPACITY + o_word, mask, call, is_stopped, POLLS)
        if DTYPE.primitive_bitwidth == 32:
            b_first += b_word.to(tl.float32, bitcast=True)
        else:
            b_first += _low_half(b_word, DTYPE)
            b_second += _high_half(b_word, DTYPE)
    if DTYPE.primitive_bitwidth == 32:
        b_out = b_first.to(tl.int32, bitcast=True)
    else:
        b_out = _to_half(b_first, DTYPE) | (_to_half(b_second, DTYPE) << 16)
    tl.store(out + o_word, b_out, mask=mask)
    tl.store(num_calls + tl.program_id(0), call)


# any size of message is served by one compiled kernel
@triton.jit(do_not_specialize=["num_words", "row_words"])
def _peer_gather_kernel(
    x,
    out,
    addresses,
    num_calls,
    is_stopped,
    num_words,
    row_words,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
):
    """Put messages of 32-bit words side by side, row by row."""
    o_word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = o_word < num_words
    call, b_own, own = _send(x, addresses, num_calls, o_word, mask, RANK, WORLD, CAPACITY)
    p_out = out + o_word // row_words * (WORLD * row_words) + o_word % row_words
    for source in tl.static_range(WORLD):
        if source == RANK:
            b_word = b_own
        else:
            b_word = _await(own + source * CAPACITY + o_word, mask, call, is_stopped, POLLS)
        tl.store(p_out + source * row_words, b_word, mask=mask)
    tl.store(num_calls + tl.program_id(0), call)
