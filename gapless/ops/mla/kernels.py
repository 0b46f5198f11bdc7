"""The kernels behind `triton.py`: a window over pages of latents, and a prefill chunk.

Program indices are `i_`, offsets `o_`, pointers `p_`, masks `m_` and blocks of values `b_`. In
shapes, C counts channels of the latent, R those of the rotated key, M queries and N positions.

Positions and channels are the rows of the matrix products, and queries their columns: scores are
[positions, queries] and the running sums [channels, queries]. A GPU's matrix units want 64 rows and
as few as 8 columns, and a window has few queries, so that nothing is spent on padding; and a block
of latents stands in fast memory once, the left side of both products.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.paged_attention.kernels import _sees_node, _split_len


@triton.jit
def _load_queries(p_q, m_m, o_c, o_r, RANK: tl.constexpr, ROPE: tl.constexpr):
    """Load what meets the latents [M, C] and what meets the rotated keys [M, R]."""
    m_c = m_m[:, None] & (o_c < RANK)[None, :]
    m_r = m_m[:, None] & (o_r < ROPE)[None, :]
    b_q = tl.load(p_q[:, None] + o_c[None, :], mask=m_c, other=0.0)
    return b_q, tl.load(p_q[:, None] + RANK + o_r[None, :], mask=m_r, other=0.0)


@triton.jit
def _attend(
    b_acc,  # [C, M]: sum of weighted latents
    b_max,  # [M]
    b_sum,  # [M]: sum of weights
    b_q,  # [M, C]
    b_q_rope,  # [M, R]
    pool,
    b_entry,  # [N] int64
    m_load,  # [N]: positions to read
    m_see,  # [N, M]: positions that each query attends to
    scale_log2,
    stride_entry,
    o_c,
    o_r,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take a block of positions into the running softmax."""
    p_entry = pool + (b_entry * stride_entry)[:, None]
    m_c = m_load[:, None] & (o_c < RANK)[None, :]
    m_r = m_load[:, None] & (o_r < ROPE)[None, :]
    b_latent = tl.load(p_entry + o_c[None, :], mask=m_c, other=0.0)
    b_key = tl.load(p_entry + RANK + o_r[None, :], mask=m_r, other=0.0)
    b_score = tl.dot(b_latent, tl.trans(b_q), input_precision=PRECISION)
    b_score = tl.dot(b_key, tl.trans(b_q_rope), b_score, input_precision=PRECISION)
    b_score = tl.where(m_see, b_score * scale_log2, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_score, axis=0))
    # a query that has seen nothing yet: any finite reference gives weights of 0
    b_ref = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weight = tl.exp2(b_score - b_ref[None, :])
    b_decay = tl.exp2(b_max - b_ref)
    b_acc = b_acc * b_decay[None, :]
    b_acc = tl.dot(
        tl.trans(b_latent), b_weight.to(b_latent.dtype), b_acc, input_precision=PRECISION
    )
    return b_acc, b_new_max, b_sum * b_decay + tl.sum(b_weight, axis=0)


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
    partial,  # [T, H, splits, RANK]
    partial_lse,  # [T, H, splits]: log2 of each split's sum of weights
    scale_log2,
    first,
    stride_q_token,
    stride_q_head,
    stride_entry,
    stride_pos_row,
    stride_pos_token,
    stride_bits_row,
    stride_page_row,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
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
    # queries of one row that do not fit one program come next to each other, for the L2 cache
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
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

    o_c = tl.arange(0, BLOCK_C)
    o_r = tl.arange(0, BLOCK_R)
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < WINDOW * HEADS
    o_window = o_m // HEADS
    o_token = (i_row * WINDOW + o_window).to(tl.int64)
    o_head = o_m % HEADS
    if HAS_TREE:
        # all queries see the blocks before this position, and of the others what their bits say
        tree_from = tl.load(tree_start + i_row).to(tl.int32)
        cut = start + tl.maximum(tl.minimum(tree_from, end) - start, 0) // BLOCK_N * BLOCK_N
        b_limit = tl.full([BLOCK_M], 0, tl.int32) + cut
    else:
        cut = end
        b_pos = tl.load(p_pos + o_window * stride_pos_token, mask=m_m, other=-1).to(tl.int32)
        b_limit = tl.minimum(b_pos + 1, end)
    p_q = q + o_token * stride_q_token + o_head * stride_q_head
    b_q, b_q_rope = _load_queries(p_q, m_m, o_c, o_r, RANK, ROPE)

    p_pages = page_table + tl.load(slots + i_row).to(tl.int64) * stride_page_row
    b_acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    o_n = tl.arange(0, BLOCK_N)
    o_pos = start + o_n
    # pages are looked up one block ahead, so that no block waits for two reads in a row; numbers of
    # pages and entries fit 32 bits, and registers are scarce
    b_page = tl.load(p_pages + o_pos // PAGE_SIZE, mask=o_pos < end, other=0).to(tl.int32)
    for begin in range(start, cut, BLOCK_N):
        o_pos = begin + o_n
        b_entry = b_page.to(tl.int64) * PAGE_SIZE + o_pos % PAGE_SIZE
        o_ahead = o_pos + BLOCK_N
        b_page = tl.load(p_pages + o_ahead // PAGE_SIZE, mask=o_ahead < end, other=0).to(tl.int32)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            b_q_rope,
            pool,
            b_entry,
            o_pos < end,
            o_pos[:, None] < b_limit[None, :],
            scale_log2,
            stride_entry,
            o_c,
            o_r,
            RANK,
            ROPE,
            PRECISION,
        )
    if HAS_TREE:
        p_bits = tree_bits + i_row * stride_bits_row + o_window
        b_bits = tl.load(p_bits, mask=m_m, other=0)
        # a block or two: nothing to load ahead
        for begin in tl.range(cut, end, BLOCK_N, num_stages=1):
            o_pos = begin + o_n
            b_entry = b_page.to(tl.int64) * PAGE_SIZE + o_pos % PAGE_SIZE
            o_ahead = o_pos + BLOCK_N
            b_page = tl.load(p_pages + o_ahead // PAGE_SIZE, mask=o_ahead < end, other=0)
            b_page = b_page.to(tl.int32)
            m_see = _sees_node(b_bits[None, :], o_pos[:, None], tree_from)
            m_see = m_see & (o_pos < end)[:, None]
            b_acc, b_max, b_sum = _attend(
                b_acc,
                b_max,
                b_sum,
                b_q,
                b_q_rope,
                pool,
                b_entry,
                # what nobody sees is read as zeros: a weight of 0 does not undo a NaN
                tl.max(m_see.to(tl.int32), axis=1) > 0,
                m_see,
                scale_log2,
                stride_entry,
                o_c,
                o_r,
                RANK,
                ROPE,
                PRECISION,
            )
    m_seen = b_sum > 0.0
    b_sum = tl.where(m_seen, b_sum, 1.0)
    b_out = b_acc / b_sum[None, :]

    o_result = o_token * HEADS + o_head
    m_out = (o_c < RANK)[:, None] & m_m[None, :]
    if length <= split_len:
        p_out = out + o_c[:, None] + (o_result * RANK)[None, :]
        tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
    else:
        o_part = o_result * tl.num_programs(1) + i_split
        tl.store(partial + o_c[:, None] + (o_part * RANK)[None, :], b_out, mask=m_out)
        b_lse = tl.where(m_seen, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(partial_lse + o_part, b_lse, mask=m_m)


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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # heads of a program
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    p_tile = tiles + tl.program_id(1) * 4
    token_start = tl.load(p_tile)
    token_end = tl.load(p_tile + 1)
    kv_start = tl.load(p_tile + 2)
    offset = tl.load(p_tile + 3)

    o_c = tl.arange(0, BLOCK_C)
    o_r = tl.arange(0, BLOCK_R)
    o_m = tl.arange(0, BLOCK_M)
    o_token = token_start + o_m // GROUP
    o_head = tl.program_id(0) * GROUP + o_m % GROUP
    m_m = (o_m < BLOCK_M // GROUP * GROUP) & (o_token < token_end) & (o_head < HEADS)
    o_wide = o_token.to(tl.int64)
    p_q = q + o_wide * stride_q_token + o_head * stride_q_head
    b_q, b_q_rope = _load_queries(p_q, m_m, o_c, o_r, RANK, ROPE)

    kv_end = token_end + offset
    b_acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    o_n = tl.arange(0, BLOCK_N)
    p_read = kv_read + o_n
    b_next = tl.load(p_read + kv_start, mask=kv_start + o_n < kv_end, other=0).to(tl.int32)
    for begin in range(kv_start, kv_end, BLOCK_N):
        b_entry = b_next.to(tl.int64)
        o_read = begin + o_n
        ahead = begin + BLOCK_N
        b_next = tl.load(p_read + ahead, mask=ahead + o_n < kv_end, other=0).to(tl.int32)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            b_q_rope,
            pool,
            b_entry,
            o_read < kv_end,
            o_read[:, None] <= (o_token + offset)[None, :],
            scale_log2,
            stride_entry,
            o_c,
            o_r,
            RANK,
            ROPE,
            PRECISION,
        )
    b_out = b_acc / b_sum[None, :]
    p_out = out + o_c[:, None] + ((o_wide * HEADS + o_head) * RANK)[None, :]
    m_out = (o_c < RANK)[:, None] & m_m[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
