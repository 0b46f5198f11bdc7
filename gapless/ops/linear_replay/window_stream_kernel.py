"""Windows of 2 to 16 tokens, the second launch: results out of the state and of a record.

What is computed, and what a record holds: `window_scores_kernel.py`.
"""

# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.linear_replay.arithmetic import _cut, _dot, _head
from gapless.ops.linear_replay.fold_kernels import _store_fold


@triton.jit
def _aligned(x, PAIR: tl.constexpr):
    """Reorder columns so that what a thread has loaded is what it feeds to the matrix units.

    Thread t of the four that share a row has loaded columns in sequence; the compiler feeds
    (t), (t + 4), ..., or pairs, (2t, 2t + 1), (2t + 8, 2t + 9), ..., where an operand comes from
    16 bits. A product over columns does not mind their order, so both of its sides are reordered.
    PAIR is 1 or 2, and 0 where several warps share the rows.
    """
    if PAIR > 0:
        rows: tl.constexpr = x.shape[0]
        columns: tl.constexpr = x.shape[1]
        x = tl.reshape(x, [rows, 4, columns // (4 * PAIR), PAIR])
        x = tl.reshape(tl.permute(x, [0, 2, 1, 3]), [rows, columns])
    return x


@triton.jit
def _read(tile, x, sums, PAIR: tl.constexpr, SPLIT_STATE: tl.constexpr, SPLIT_X: tl.constexpr):
    """Add to sums [BV, XP] what vectors x [XP, KB] read out of a tile [BV, KB] of the state.

    Heads and rests have sums of their own: matrix units begin no product before the one that it is
    added to has ended.
    """
    state = _aligned(tile.to(tl.float32), PAIR)
    right = tl.trans(_aligned(x, PAIR))
    of_heads, of_state, of_x = sums
    if SPLIT_STATE:
        head = _cut(state)
        of_state = tl.dot(state - head, right, acc=of_state, input_precision="tf32")
        state = head
    if SPLIT_X:
        head = _head(right)
        of_x = tl.dot(state, right - head, acc=of_x, input_precision="tf32")
        right = head
    return tl.dot(state, right, acc=of_heads, input_precision="tf32"), of_state, of_x


@triton.jit
def _interleaved(a, b):
    """Return the columns of both in turn."""
    return tl.reshape(tl.join(a, b), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def _ring_parts(
    p_d,  # pointer to the head's d
    entries,
    zero_entry,
    o_v,
    N: tl.constexpr,
    NP: tl.constexpr,
    STRIDE: tl.constexpr,  # of an entry
):
    """Load d of the ring's entries in parts [BV, 4] of every fourth of 16: a thread of a row's four
    then has four entries in sequence, as it has channels of the state."""
    o_n = 4 * tl.arange(0, 4)
    parts = ()
    for i in tl.static_range(NP // 4):
        n = i // 4 * 16 + i % 4 + o_n
        entry = tl.load(entries + n, mask=n < N, other=zero_entry)
        p_part = p_d + (entry * STRIDE)[None, :] + o_v[:, None]
        parts = parts + (tl.load(p_part, mask=(entry != zero_entry)[None, :], other=0),)
    return parts


@triton.jit(do_not_specialize=["zero_entry"])
def _window_stream_kernel(
    records,
    q,
    k,
    v,
    out,
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    q_stride,
    q_token_stride,
    k_stride,
    k_token_stride,
    v_stride,
    v_token_stride,
    zero_entry,
    N: tl.constexpr,
    NP: tl.constexpr,
    W: tl.constexpr,
    HALF: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,  # key channels of a tile: four loads of 16 bytes
    PAIR: tl.constexpr,
    SIZE: tl.constexpr,
    RING: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    SPLIT_X: tl.constexpr,
    SPLIT_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Every column of BV value channels, out of one pass over their state; and the fold."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.program_id(1).to(tl.int64)
    i_key_head = i_head // (HV // H)
    o_v = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    XP: tl.constexpr = 2 * HALF
    o_x = tl.arange(0, XP)
    o_k = tl.max_contiguous(tl.arange(0, KB), KB // 4)
    node = o_x % HALF
    m_key = o_x < W
    m_query = (o_x >= HALF) & (node < W)
    entries = ring_read + i_row * N
    row = tl.load(read_rows + i_row)
    is_folding = tl.load(fold_mask + i_row * N) != 0
    written = tl.load(ring_write + i_row * W + node, mask=m_key, other=0)
    p_state = checkpoint + (row * HV + i_head) * (V * K)
    o_entry = tl.arange(0, NP)
    entry = tl.load(entries + o_entry, mask=o_entry < N, other=zero_entry)
    num_ring = tl.sum((entry != zero_entry).to(tl.int32))
    tiles = ()
    for c in tl.static_range(K // KB):
        tiles = tiles + (tl.load(p_state + o_v[:, None] * K + (c * KB + o_k)[None, :]),)
    # apart, so that eight threads share the 32 bytes of a part's column
    o_apart = tl.program_id(0) % (V // BV) * BV + tl.max_contiguous(tl.arange(0, BV), 1)
    ring_d = _ring_parts(d_ring + i_head * V, entries, zero_entry, o_apart, N, NP, HV * V)
    # the vectors come later, or sums would begin before all of the state is asked for
    tl.debug_barrier()
    x = ()
    if not IS_PER_CHANNEL:
        p_key = k + i_row * k_stride + i_key_head * K + (node * k_token_stride)[:, None]
        p_query = q + i_row * q_stride + i_key_head * K + (node * q_token_stride)[:, None]
        for c in tl.static_range(K // KB):
            o_c = (c * KB + o_k)[None, :]
            key = tl.load(p_key + o_c, mask=m_key[:, None], other=0)
            x = x + (tl.load(p_query + o_c, mask=m_query[:, None], other=key),)
    p_value = v + i_row * v_stride + i_head * V + o_v[:, None] + (node * v_token_stride)[None, :]
    value = tl.load(p_value, mask=m_key[None, :], other=0)
    await_inputs(CHAINED)

    # the record is on its way while the state's products are summed
    record = records + (i_row * HV + i_head) * SIZE
    o_n = tl.max_contiguous(tl.arange(0, 16), 4)
    scores = ()
    for i in tl.static_range(NP // 16):
        p_scores = record + RING + (o_x * NP)[:, None] + (i * 16 + o_n)[None, :]
        m_live = (i * 16 + o_n < num_ring)[None, :]
        scores = scores + (tl.load(p_scores, mask=m_live, other=0),)
    o_c = tl.max_contiguous(o_x, 2)
    mixed = tl.load(record + RING + NP * XP + (o_x * XP)[:, None] + o_c[None, :])
    column = tl.load(record + o_x)
    zeros = tl.zeros([BV, XP], tl.float32)
    # every other part has sums of its own; in wide windows those would take too many registers
    even, odd = (zeros, zeros, zeros), (zeros, zeros, zeros)
    for c in tl.static_range(K // KB):
        if IS_PER_CHANNEL:
            o_c = c * KB + o_k
            vectors = tl.load(record + XP + (o_x * K)[:, None] + o_c[None, :])
            vectors *= tl.load(record + XP * (1 + K) + o_c)[None, :]
        else:
            vectors = x[c].to(tl.float32)
        if c % 2 == 0 or HALF > 4:
            even = _read(tiles[c], vectors, even, PAIR, SPLIT_STATE, SPLIT_X)
        else:
            odd = _read(tiles[c], vectors, odd, PAIR, SPLIT_STATE, SPLIT_X)
    y = even[0] + odd[0] + ((even[1] + odd[1]) + (even[2] + odd[2]))
    y *= column[None, :]
    for i in tl.static_range(NP // 16):
        d = tl.join(
            tl.join(ring_d[4 * i], ring_d[4 * i + 2]), tl.join(ring_d[4 * i + 1], ring_d[4 * i + 3])
        )  # fmt: skip
        d = _aligned(tl.reshape(d, [BV, 16]), 2 if PAIR > 0 else 0)
        right = tl.trans(_aligned(scores[i], 2 if PAIR > 0 else 0))
        y = _dot(d, right, y, SPLIT_A=True, SPLIT_B=True)
    y -= value.to(tl.float32)
    # heads and rests enter in one product
    head = _head(y)
    twice = tl.trans(_interleaved(mixed, mixed))
    y = _dot(
        _interleaved(head, y - head), twice, tl.zeros([BV, XP], tl.float32),
        SPLIT_A=False, SPLIT_B=True,
    )  # fmt: skip
    p_out = out + ((i_row * W + node) * (HV * V) + i_head * V)[None, :] + o_v[:, None]
    tl.store(p_out, y.to(out.dtype.element_ty), mask=m_query[None, :])
    p_written = d_ring + ((written * HV + i_head) * V)[None, :] + o_v[:, None]
    tl.store(p_written, y, mask=m_key[None, :])
    if is_folding:
        _store_fold(
            p_state, checkpoint + (tl.load(fold_rows + i_row) * HV + i_head) * (V * K),
            record + RING + (NP + XP) * XP, d_ring, k_ring, g_ring, entries, fold_mask + i_row * N,
            i_head, tl.program_id(0) % (V // BV), 0.0,
            N, NP, H, HV, K, V, BV, 32,
            HAS_RECORD=True, IS_PER_CHANNEL=IS_PER_CHANNEL, HAS_NORM=False,
        )  # fmt: skip
