"""The kernels behind `triton.py`: a window over pages, the joining of its splits, a prefill chunk.

Program indices are `i_`, offsets `o_`, pointers `p_`, masks `m_` and blocks of values `b_`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs

# split lengths are multiples of this many positions
SPLIT_GRAIN = tl.constexpr(64)


@triton.jit
def _split_len(length, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Positions of each split of a row of `length` positions."""
    even = tl.cdiv(tl.cdiv(length, MAX_SPLITS), SPLIT_GRAIN) * SPLIT_GRAIN
    return tl.maximum(even, MIN_SPLIT)


@triton.jit
def _attend(
    b_acc,  # [M, D]: sum of weighted values
    b_max,  # [M]
    b_sum,  # [M]
    b_q,
    p_pool,  # the head's keys of entry 0
    b_entry,  # [N] int64
    m_load,  # [N]: positions to read
    m_see,  # [M, N]: positions that each row attends to
    scale_log2,
    stride_entry,
    stride_value,  # from keys to values
    o_d,
    PRECISION: tl.constexpr,
):
    """Take a block of positions into the running softmax."""
    p_key = p_pool + (b_entry * stride_entry)[:, None] + o_d[None, :]
    b_k = tl.load(p_key, mask=m_load[:, None], other=0.0)
    b_score = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
    b_score = tl.where(m_see, b_score, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_score, axis=1))
    # a row that has seen nothing yet: any finite reference gives weights of 0
    b_ref = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weight = tl.exp2(b_score - b_ref[:, None])
    b_decay = tl.exp2(b_max - b_ref)
    b_v = tl.load(p_key + stride_value, mask=m_load[:, None], other=0.0)
    b_acc = b_acc * b_decay[:, None]
    b_acc = tl.dot(b_weight.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_new_max, b_sum * b_decay + tl.sum(b_weight, axis=1)


@triton.jit
def _sees_node(b_bits, o_pos, start):
    """Whether queries see positions of which those below `start` are seen by all.

    `b_bits` and `o_pos` are shaped to be broadcast; bit j stands for position start + j.
    """
    o_node = o_pos - start
    # the last bit is clear, and stands for all nodes past it
    b_shift = tl.minimum(tl.maximum(o_node, 0), 63).to(tl.int64)
    return (o_node < 0) | (((b_bits >> b_shift) & 1) != 0)


# what differs between calls of one engine must not make another kernel
@triton.jit(
    do_not_specialize=[
        "first", "stride_pos_row", "stride_pos_token", "stride_bits_row", "stride_page_row",
    ],
    do_not_specialize_on_alignment=["slots", "positions", "tree_start", "tree_bits"],
)  # fmt: skip
def _window_kernel(
    q,
    pool,
    slots,
    positions,
    tree_start,
    tree_bits,
    page_table,
    out,
    partial,  # [T, H, splits, D]
    partial_lse,  # [T, H, splits]: log2 of each split's sum of weights
    scale_log2,
    first,
    stride_q_token,
    stride_q_head,
    stride_entry,
    stride_value,
    stride_kv_head,
    stride_pos_row,
    stride_pos_token,
    stride_bits_row,
    stride_page_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_split = tl.program_id(0)
    i_kv_head = tl.program_id(1) % KV_HEADS
    i_tile = tl.program_id(1) // KV_HEADS
    i_row = tl.program_id(2)
    p_pos = positions + i_row * stride_pos_row
    last = tl.load(p_pos + (WINDOW - 1) * stride_pos_token).to(tl.int32)
    length = last + 1 - first
    split_len = _split_len(length, MIN_SPLIT, MAX_SPLITS)
    start = first + i_split * split_len
    # the grid holds as many splits as the longest row may need
    if (i_split > 0) & (start > last):
        return
    end = tl.minimum(start + split_len, last + 1)

    o_d = tl.arange(0, HEAD_DIM)
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < WINDOW * GROUP
    o_window = o_m // GROUP
    o_token = (i_row * WINDOW + o_window).to(tl.int64)
    o_head = i_kv_head * GROUP + o_m % GROUP
    if HAS_TREE:
        # all queries see the blocks before this position, and of the others what their bits say
        tree_from = tl.load(tree_start + i_row).to(tl.int32)
        cut = start + tl.maximum(tl.minimum(tree_from, end) - start, 0) // BLOCK_N * BLOCK_N
        b_limit = tl.full([BLOCK_M], 0, tl.int32) + cut
    else:
        cut = end
        b_pos = tl.load(p_pos + o_window * stride_pos_token, mask=m_m, other=-1).to(tl.int32)
        b_limit = tl.minimum(b_pos + 1, end)
    p_q = q + (o_token * stride_q_token + o_head * stride_q_head)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None], other=0.0)

    p_pages = page_table + tl.load(slots + i_row).to(tl.int64) * stride_page_row
    p_pool = pool + i_kv_head * stride_kv_head
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    o_n = tl.arange(0, BLOCK_N)
    o_pos = start + o_n
    # pages are looked up one block ahead, so that no block waits for two reads in a row
    b_page = tl.load(p_pages + o_pos // PAGE_SIZE, mask=o_pos < end, other=0).to(tl.int64)
    for begin in range(start, cut, BLOCK_N):
        o_pos = begin + o_n
        b_entry = b_page * PAGE_SIZE + o_pos % PAGE_SIZE
        o_ahead = o_pos + BLOCK_N
        b_page = tl.load(p_pages + o_ahead // PAGE_SIZE, mask=o_ahead < end, other=0).to(tl.int64)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_pool,
            b_entry,
            o_pos < end,
            o_pos[None, :] < b_limit[:, None],
            scale_log2,
            stride_entry,
            stride_value,
            o_d,
            PRECISION,
        )
    if HAS_TREE:
        p_bits = tree_bits + i_row * stride_bits_row + o_window
        b_bits = tl.load(p_bits, mask=m_m, other=0)
        # a block or two: nothing to load ahead
        for begin in tl.range(cut, end, BLOCK_N, num_stages=1):
            o_pos = begin + o_n
            b_entry = b_page * PAGE_SIZE + o_pos % PAGE_SIZE
            o_ahead = o_pos + BLOCK_N
            b_page = tl.load(p_pages + o_ahead // PAGE_SIZE, mask=o_ahead < end, other=0)
            b_page = b_page.to(tl.int64)
            m_see = _sees_node(b_bits[:, None], o_pos[None, :], tree_from)
            m_see = m_see & (o_pos < end)[None, :]
            b_acc, b_max, b_sum = _attend(
                b_acc,
                b_max,
                b_sum,
                b_q,
                p_pool,
                b_entry,
                # what nobody sees is read as zeros: a weight of 0 does not undo a NaN
                tl.max(m_see.to(tl.int32), axis=0) > 0,
                m_see,
                scale_log2,
                stride_entry,
                stride_value,
                o_d,
                PRECISION,
            )
    m_seen = b_sum > 0.0
    b_sum = tl.where(m_seen, b_sum, 1.0)
    b_out = b_acc / b_sum[:, None]

    o_result = o_token * (KV_HEADS * GROUP) + o_head
    if length <= split_len:
        p_out = out + (o_result * HEAD_DIM)[:, None] + o_d[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_m[:, None])
    else:
        o_part = o_result * tl.num_programs(0) + i_split
        p_part = partial + (o_part * HEAD_DIM)[:, None] + o_d[None, :]
        tl.store(p_part, b_out, mask=m_m[:, None])
        b_lse = tl.where(m_seen, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(partial_lse + o_part, b_lse, mask=m_m)


@triton.jit(
    do_not_specialize=["splits", "first", "stride_pos_row", "stride_pos_token"],
    do_not_specialize_on_alignment=["positions"],
)
def _window_combine_kernel(
    partial,
    partial_lse,
    positions,
    out,
    splits,
    first,
    stride_pos_row,
    stride_pos_token,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_token = tl.program_id(0)
    p_pos = positions + i_token // WINDOW * stride_pos_row
    last = tl.load(p_pos + (WINDOW - 1) * stride_pos_token).to(tl.int32)
    length = last + 1 - first
    split_len = _split_len(length, MIN_SPLIT, MAX_SPLITS)
    # a row of one split has its result already
    if length <= split_len:
        return
    o_s = tl.arange(0, MAX_SPLITS)
    o_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_s = o_s < tl.cdiv(length, split_len)
    o_result = i_token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    o_part = o_result * splits + o_s
    b_lse = tl.load(partial_lse + o_part, mask=m_s, other=float("-inf"))
    b_weight = tl.exp2(b_lse - tl.max(b_lse, axis=0))
    p_part = partial + (o_part * HEAD_DIM)[:, None] + o_d[None, :]
    b_part = tl.load(p_part, mask=m_s[:, None], other=0.0)
    b_out = tl.sum(b_part * b_weight[:, None], axis=0) / tl.sum(b_weight, axis=0)
    tl.store(out + o_result * HEAD_DIM + o_d, b_out.to(out.dtype.element_ty))


@triton.jit
def _prefill_kernel(
    q,
    pool,
    kv_read,
    tiles,
    out,
    scale_log2,
    stride_q_token,
    stride_q_head,
    stride_entry,
    stride_value,
    stride_kv_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_kv_head = tl.program_id(0)
    p_tile = tiles + tl.program_id(1) * 4
    token_start = tl.load(p_tile)
    token_end = tl.load(p_tile + 1)
    kv_start = tl.load(p_tile + 2)
    offset = tl.load(p_tile + 3)

    o_d = tl.arange(0, HEAD_DIM)
    o_m = tl.arange(0, BLOCK_M)
    o_token = token_start + o_m // GROUP
    m_m = (o_m < BLOCK_M // GROUP * GROUP) & (o_token < token_end)
    o_head = i_kv_head * GROUP + o_m % GROUP
    o_wide = o_token.to(tl.int64)
    p_q = q + (o_wide * stride_q_token + o_head * stride_q_head)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None], other=0.0)

    p_pool = pool + i_kv_head * stride_kv_head
    kv_end = token_end + offset
    # every token of the tile sees the blocks before this one
    kv_cut = kv_start + (token_start + offset + 1 - kv_start) // BLOCK_N * BLOCK_N
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    o_n = tl.arange(0, BLOCK_N)
    p_read = kv_read + o_n
    b_next = tl.load(p_read + kv_start, mask=kv_start + o_n < kv_end, other=0).to(tl.int64)
    for begin in range(kv_start, kv_cut, BLOCK_N):
        b_entry = b_next
        ahead = begin + BLOCK_N
        b_next = tl.load(p_read + ahead, mask=ahead + o_n < kv_end, other=0).to(tl.int64)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_pool,
            b_entry,
            tl.full([BLOCK_N], 1, dtype=tl.int1),
            tl.full([1, 1], 1, dtype=tl.int1),
            scale_log2,
            stride_entry,
            stride_value,
            o_d,
            PRECISION,
        )
    for begin in range(kv_cut, kv_end, BLOCK_N):
        b_entry = b_next
        o_read = begin + o_n
        ahead = begin + BLOCK_N
        b_next = tl.load(p_read + ahead, mask=ahead + o_n < kv_end, other=0).to(tl.int64)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            p_pool,
            b_entry,
            o_read < kv_end,
            o_read[None, :] <= (o_token + offset)[:, None],
            scale_log2,
            stride_entry,
            stride_value,
            o_d,
            PRECISION,
        )
    o_out = (o_wide * (KV_HEADS * GROUP) + o_head) * HEAD_DIM
    b_out = b_acc / b_sum[:, None]
    tl.store(out + o_out[:, None] + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_m[:, None])
