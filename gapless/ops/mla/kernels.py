"""The kernels behind `triton.py`: a window over pages of latents, its joining, a prefill chunk.

Program indices are `i_`, offsets `o_`, pointers `p_`, masks `m_` and blocks of values `b_`. In
shapes, C counts channels of the latent, R those of the rotated key, M queries and N positions.

A GPU's matrix units want 64 rows. The running sums are [channels, queries], so that few queries
cost little; a block of latents stands in fast memory once, for both products. In scores the rows
are queries where there are 64 of them, else positions: `_positions_axis`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.paged_attention.kernels import SPLIT_GRAIN, _sees_node


@triton.constexpr_function
def _positions_axis(block_m):
    """Return which axis of scores counts positions."""
    return 1 if block_m >= 64 else 0


@triton.jit
def _zeros(M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    """Return zeros of scores' shape."""
    return tl.zeros([M, N] if AXIS == 1 else [N, M], dtype=tl.float32)


@triton.jit
def _split_len(
    length,
    MIN_SPLIT: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    FULL_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Positions of each split of a row of `length` positions; see `tuning.LatentTiling`."""
    few = tl.cdiv(tl.cdiv(length, FEW_SPLITS), SPLIT_GRAIN) * SPLIT_GRAIN
    most = tl.cdiv(tl.cdiv(length, MAX_SPLITS), SPLIT_GRAIN) * SPLIT_GRAIN
    return tl.maximum(tl.maximum(tl.minimum(few, FULL_SPLIT), most), MIN_SPLIT)


@triton.jit
def _load_rows(p_row, o, m_row, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Load `COUNT` channels of each row, zeros past them and in rows not named; None names all."""
    p = p_row[:, None] + o[None, :]
    if m_row is not None:
        b = tl.load(p, mask=m_row[:, None] & (o < COUNT)[None, :], other=0.0)
    elif COUNT < BLOCK:
        b = tl.load(p, mask=(o < COUNT)[None, :], other=0.0)
    else:
        b = tl.load(p)
    return b


@triton.jit
def _look_up(p_pages, o_pos, end, PAGE_SIZE: tl.constexpr):
    """Return the entries [N] int32 of positions, the last one's for those from `end` on."""
    # no position is negative, which makes the division a shift
    o_place = tl.maximum(tl.minimum(o_pos, end - 1), 0).to(tl.uint32)
    b_page = tl.load(p_pages + o_place // PAGE_SIZE).to(tl.int32)
    return b_page * PAGE_SIZE + (o_place % PAGE_SIZE).to(tl.int32)


@triton.jit
def _attend(
    b_acc,  # [C, M]: sum of weighted latents
    b_max,  # [M]
    b_sum,  # scores' shape: sums of weights, to be added up in the end
    b_q,  # [M, C]
    b_q_rope,  # [M, R]
    pool,
    b_entry,  # [N] int32
    m_load,  # [N]: positions to read, the others being zeros; None: all
    m_see,  # scores' shape: positions that each query attends to
    is_cut,  # whether `m_see` is anywhere false
    scale_log2,
    stride_entry,
    o_c,
    o_r,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    AXIS: tl.constexpr,  # of positions in scores
):
    """Take a block of positions into the running softmax."""
    p_entry = pool + b_entry.to(tl.int64) * stride_entry
    b_latent = _load_rows(p_entry, o_c, m_load, RANK, BLOCK_C)
    b_key = _load_rows(p_entry + RANK, o_r, m_load, ROPE, BLOCK_R)
    if AXIS == 1:
        b_score = tl.dot(b_q, tl.trans(b_latent), input_precision=PRECISION)
        b_rope = tl.dot(b_q_rope, tl.trans(b_key), input_precision=PRECISION)
    else:
        b_score = tl.dot(b_latent, tl.trans(b_q), input_precision=PRECISION)
        b_rope = tl.dot(b_key, tl.trans(b_q_rope), input_precision=PRECISION)
    # Two products and a branch: where the compiler sees that one product is made of another, it has
    # half the warps repeat what the others compute. It does not look past a branch, nor does Triton
    # 3.6 compile one that takes a product itself.
    b_score = b_score * scale_log2 + b_rope * scale_log2
    if is_cut:
        b_score = tl.where(m_see, b_score, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_score, axis=AXIS))
    # a query that has seen nothing yet: any finite reference gives weights of 0
    b_ref = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_weight = tl.exp2(b_score - tl.expand_dims(b_ref, AXIS))
    b_decay = tl.exp2(b_max - b_ref)
    b_sum = b_sum * tl.expand_dims(b_decay, AXIS) + b_weight
    b_weight = b_weight.to(b_latent.dtype)
    if AXIS == 1:
        b_weight = tl.trans(b_weight)
    b_acc = b_acc * b_decay[None, :]
    b_acc = tl.dot(tl.trans(b_latent), b_weight, b_acc, input_precision=PRECISION)
    return b_acc, b_new_max, b_sum


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
    FEW_SPLITS: tl.constexpr,
    FULL_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    AXIS: tl.constexpr = _positions_axis(BLOCK_M)
    # queries of one row that do not fit one program come next to each other, for the L2 cache
    i_tile = tl.program_id(0)
    i_split = tl.program_id(1)
    i_row = tl.program_id(2)
    p_pos = positions + i_row * stride_pos_row
    last = tl.load(p_pos + (WINDOW - 1) * stride_pos_token).to(tl.int32)
    # beside the length, not after it
    slot = tl.load(slots + i_row).to(tl.int64)
    length = last + 1 - first
    split_len = _split_len(length, MIN_SPLIT, FEW_SPLITS, FULL_SPLIT, MAX_SPLITS)
    start = first + i_split * split_len
    # the grid holds as many splits as the longest row may need
    if (i_split > 0) & (start > last):
        return
    end = tl.minimum(start + split_len, last + 1)

    # entries are looked up one block ahead, so that no block waits for two reads in a row
    p_pages = page_table + slot * stride_page_row
    o_n = tl.arange(0, BLOCK_N)
    b_next = _look_up(p_pages, start + o_n, end, PAGE_SIZE)
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
        least = cut
    else:
        cut = end
        b_pos = tl.load(p_pos + o_window * stride_pos_token, mask=m_m, other=-1).to(tl.int32)
        b_limit = tl.minimum(b_pos + 1, end)
        # what the program's first query sees, all its queries see
        p_least = p_pos + i_tile * BLOCK_M // HEADS * stride_pos_token
        least = tl.minimum(tl.load(p_least).to(tl.int32) + 1, end)
    p_q = q + o_token * stride_q_token + o_head * stride_q_head
    b_q = _load_rows(p_q, o_c, m_m, RANK, BLOCK_C)
    b_q_rope = _load_rows(p_q + RANK, o_r, m_m, ROPE, BLOCK_R)
    o_limit = tl.expand_dims(b_limit, AXIS)

    b_acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = _zeros(BLOCK_M, BLOCK_N, AXIS)
    for begin in range(start, cut, BLOCK_N):
        b_entry = b_next
        o_pos = begin + o_n
        b_next = _look_up(p_pages, o_pos + BLOCK_N, end, PAGE_SIZE)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            b_q_rope,
            pool,
            b_entry,
            None,
            tl.expand_dims(o_pos, 1 - AXIS) < o_limit,
            begin + BLOCK_N > least,
            scale_log2,
            stride_entry,
            o_c,
            o_r,
            RANK,
            ROPE,
            BLOCK_C,
            BLOCK_R,
            PRECISION,
            AXIS,
        )
    if HAS_TREE:
        p_bits = tree_bits + i_row * stride_bits_row + o_window
        o_bits = tl.expand_dims(tl.load(p_bits, mask=m_m, other=0), AXIS)
        # a block or two: nothing to load ahead
        for begin in tl.range(cut, end, BLOCK_N, num_stages=1):
            b_entry = b_next
            o_pos = begin + o_n
            b_next = _look_up(p_pages, o_pos + BLOCK_N, end, PAGE_SIZE)
            o_node = tl.expand_dims(o_pos, 1 - AXIS)
            m_see = _sees_node(o_bits, o_node, tree_from) & (o_node < end)
            b_acc, b_max, b_sum = _attend(
                b_acc,
                b_max,
                b_sum,
                b_q,
                b_q_rope,
                pool,
                b_entry,
                # what nobody sees is read as zeros: a weight of 0 does not undo a NaN
                tl.max(m_see.to(tl.int32), axis=1 - AXIS) > 0,
                m_see,
                begin < end,
                scale_log2,
                stride_entry,
                o_c,
                o_r,
                RANK,
                ROPE,
                BLOCK_C,
                BLOCK_R,
                PRECISION,
                AXIS,
            )
    b_sum = tl.sum(b_sum, axis=AXIS)
    m_seen = b_sum > 0.0
    b_sum = tl.where(m_seen, b_sum, 1.0)
    b_out = b_acc * (1.0 / b_sum)[None, :]

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
    RANK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    FULL_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_token = tl.program_id(0)
    p_pos = positions + i_token // WINDOW * stride_pos_row
    last = tl.load(p_pos + (WINDOW - 1) * stride_pos_token).to(tl.int32)
    length = last + 1 - first
    split_len = _split_len(length, MIN_SPLIT, FEW_SPLITS, FULL_SPLIT, MAX_SPLITS)
    # a row of one split has its result already
    if length <= split_len:
        return
    count = tl.cdiv(length, split_len)
    o_c = tl.arange(0, BLOCK_C)
    o_s = tl.arange(0, MAX_SPLITS)
    o_result = i_token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    p_lse = partial_lse + o_result * splits
    b_lse = tl.load(p_lse + o_s, mask=o_s < count, other=float("-inf"))
    most = tl.max(b_lse, axis=0)
    total = tl.sum(tl.exp2(b_lse - most), axis=0)
    b_out = tl.zeros([BLOCK_C], dtype=tl.float32)
    # as many reads in flight as a short row has splits; the order of sums is the row's own
    o_few = tl.arange(0, FEW_SPLITS)
    for begin in range(0, count, FEW_SPLITS):
        o_split = begin + o_few
        m_split = o_split < count
        b_weight = tl.exp2(tl.load(p_lse + o_split, mask=m_split, other=float("-inf")) - most)
        p_part = partial + (o_result * splits + o_split)[:, None] * RANK + o_c[None, :]
        m_part = m_split[:, None] & (o_c < RANK)[None, :]
        b_part = tl.load(p_part, mask=m_part, other=0.0)
        b_out += tl.sum(b_part * b_weight[:, None], axis=0)
    b_out = b_out / total
    tl.store(out + o_result * RANK + o_c, b_out.to(out.dtype.element_ty), mask=o_c < RANK)


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
    AXIS: tl.constexpr = _positions_axis(BLOCK_M)
    p_tile = tiles + tl.program_id(1) * 4
    token_start = tl.load(p_tile)
    token_end = tl.load(p_tile + 1)
    if token_start == token_end:
        return
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
    b_q = _load_rows(p_q, o_c, m_m, RANK, BLOCK_C)
    b_q_rope = _load_rows(p_q + RANK, o_r, m_m, ROPE, BLOCK_R)

    kv_end = token_end + offset
    # every token of the tile sees the positions before this one
    least = token_start + offset + 1
    o_last = tl.expand_dims(o_token + offset, AXIS)
    b_acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_sum = _zeros(BLOCK_M, BLOCK_N, AXIS)
    o_n = tl.arange(0, BLOCK_N)
    b_next = tl.load(kv_read + tl.minimum(kv_start + o_n, kv_end - 1)).to(tl.int32)
    for begin in range(kv_start, kv_end, BLOCK_N):
        b_entry = b_next
        o_read = begin + o_n
        b_next = tl.load(kv_read + tl.minimum(o_read + BLOCK_N, kv_end - 1)).to(tl.int32)
        b_acc, b_max, b_sum = _attend(
            b_acc,
            b_max,
            b_sum,
            b_q,
            b_q_rope,
            pool,
            b_entry,
            None,
            tl.expand_dims(o_read, 1 - AXIS) <= o_last,
            begin + BLOCK_N > least,
            scale_log2,
            stride_entry,
            o_c,
            o_r,
            RANK,
            ROPE,
            BLOCK_C,
            BLOCK_R,
            PRECISION,
            AXIS,
        )
    b_out = b_acc * (1.0 / tl.sum(b_sum, axis=AXIS))[None, :]
    p_out = out + o_c[:, None] + ((o_wide * HEADS + o_head) * RANK)[None, :]
    m_out = (o_c < RANK)[:, None] & m_m[None, :]
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_out)
