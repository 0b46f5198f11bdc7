"""The kernels behind `triton.py`: a program owns one row and writes all of its indices."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.draft_tree.kernels import _depths, _highest


@triton.jit
def _place(
    in_slots,
    in_seq_lens,
    in_checkpoint_len,
    in_done,
    i_row,
    is_folding,
    NULL_SLOT: tl.constexpr,
    L: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Return a row's place among all rows where those that fold come first."""
    place = 0
    for first in tl.range(0, tl.num_programs(0), BLOCK_ROWS, num_stages=1):
        o_row = first + tl.arange(0, BLOCK_ROWS)
        m_row = o_row < tl.num_programs(0)
        slot = tl.load(in_slots + o_row, mask=m_row, other=NULL_SLOT)
        slot = tl.where(tl.load(in_done + slot) != 0, NULL_SLOT, slot).to(tl.int64)
        on_grid = tl.load(in_seq_lens + slot) // L * L
        m_folding = m_row & (on_grid > tl.load(in_checkpoint_len + slot))
        m_before = o_row < i_row
        m_before = tl.where(is_folding, m_folding & m_before, m_folding | m_before)
        place += tl.sum(m_before.to(tl.int32))
    return place


# any number of tokens is served by one compiled kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _window_indices_kernel(
    in_slots,
    in_seq_lens,
    in_checkpoint_len,
    in_state_rows,
    in_done,
    page_table,
    window_tokens,
    fresh_index,
    fresh_page,
    tree,
    slots,
    seq_lens,
    tokens,
    fold_len,
    positions,
    logical,
    sampled_at,
    ancestors,
    kv_write,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    order,
    conv_write,
    conv_taps,
    live,
    num_tokens,
    page_stride,
    tree_stride,
    NULL_SLOT: tl.constexpr,
    NULL_ROW: tl.constexpr,
    ZERO_ROW: tl.constexpr,
    RING_ZERO: tl.constexpr,
    CONV_ZERO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    R_C: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    W_MAX: tl.constexpr,
    NUM_FRESH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(in_slots + i_row)
    slot = tl.where(tl.load(in_done + slot) != 0, NULL_SLOT, slot).to(tl.int64)
    length = tl.load(in_seq_lens + slot)
    checkpoint = tl.load(in_checkpoint_len + slot)
    state_row = tl.load(in_state_rows + slot)
    folded = tl.maximum(checkpoint, length // L * L)
    tl.store(slots + i_row, slot)
    tl.store(seq_lens + i_row, length)
    tl.store(fold_len + i_row, folded)
    tl.store(read_rows + i_row, tl.where(checkpoint == 0, ZERO_ROW, state_row))
    tl.store(fold_rows + i_row, tl.where(folded == checkpoint, NULL_ROW, state_row))
    place = _place(
        in_slots, in_seq_lens, in_checkpoint_len, in_done, i_row, folded > checkpoint,
        NULL_SLOT, L, BLOCK_ROWS,
    )  # fmt: skip
    tl.store(order + place, i_row)

    o_w = tl.arange(0, BLOCK_W)
    m_w = o_w < W
    position = length + o_w
    o_token = i_row * W + o_w
    o_page = slot * page_stride + position // PAGE_SIZE
    page = tl.load(page_table + o_page, mask=m_w, other=0)
    for i_fresh in tl.static_range(NUM_FRESH):
        # what is written here is not read back: fresh pages take the place of those that were read
        o_fresh = tl.load(fresh_index + i_row * NUM_FRESH + i_fresh)
        fresh = tl.load(fresh_page + i_row * NUM_FRESH + i_fresh)
        page = tl.where(o_page == o_fresh, fresh, page)
        tl.store(page_table + o_fresh, fresh)
    b_held = tl.load(window_tokens + slot * W_MAX + o_w, mask=m_w)
    tl.store(tokens + o_token, b_held, mask=m_w)
    tl.store(positions + o_token, position, mask=m_w)
    tl.store(kv_write + o_token, page * PAGE_SIZE + position % PAGE_SIZE, mask=m_w)
    tl.store(ring_write + o_token, slot * R + position % R, mask=m_w)
    tl.store(conv_write + o_token, slot * R_C + position % R_C, mask=m_w)
    b_live = tl.full([BLOCK_W], 1, tl.uint8)
    tl.store(live + o_token, tl.where(slot == NULL_SLOT, 0, b_live).to(tl.uint8), mask=m_w)
    if HAS_TREE:
        b_one = tl.full([1], 1, tl.int64)
        o_node = tl.arange(0, BLOCK_W).to(tl.int64)
        b_bits = tl.load(tree + slot * tree_stride + o_w, mask=m_w, other=0)
        b_bits = tl.where(slot == NULL_SLOT, b_one << o_node, b_bits)
        b_logical = length + _depths(b_bits, o_node)
        tl.store(ancestors + o_token, b_bits, mask=m_w)
        tl.store(logical + o_token, b_logical, mask=m_w)
        tl.store(sampled_at + o_token, b_logical + 1, mask=m_w)
    else:
        tl.store(sampled_at + o_token, position + 1, mask=m_w)
    for i_far in tl.static_range(WIDTH):
        i_tap = WIDTH - 1 - i_far
        if HAS_TREE:
            # the bits left are those of ancestors at this distance and farther
            b_node = _highest(b_bits, o_node)
            b_bits &= (b_one << tl.maximum(b_node, 0)) - 1
            before = tl.where(b_node < 0, b_logical - i_far, length + b_node)
        else:
            before = position - i_far
        # the sum keeps the remainder of a masked position off the negative numbers
        entry = slot * R_C + (before + WIDTH * R_C) % R_C
        entry = tl.where(before < 0, CONV_ZERO, entry)
        tl.store(conv_taps + i_tap * num_tokens + o_token, entry, mask=m_w)

    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    replayed = checkpoint + o_n
    entry = tl.where(replayed >= length, RING_ZERO, slot * R + replayed % R)
    tl.store(ring_read + i_row * N + o_n, entry, mask=m_n)
    tl.store(fold_mask + i_row * N + o_n, (replayed < folded).to(tl.uint8), mask=m_n)


@triton.jit
def _path_moves_kernel(
    path,
    lens,
    slots,
    seq_lens,
    page_table,
    kv_read,
    kv_write,
    ring_read,
    ring_write,
    conv_read,
    conv_write,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    R: tl.constexpr,
    R_C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_row)
    length = tl.load(seq_lens + i_row)
    o_w = tl.arange(0, BLOCK_W)
    m_w = o_w < W
    o_node = i_row * W + o_w
    b_node = tl.load(path + o_node, mask=m_w, other=0)
    source = length + tl.where(o_w < tl.load(lens + i_row), b_node, o_w)
    target = length + o_w
    p_pages = page_table + slot * page_stride
    page = tl.load(p_pages + source // PAGE_SIZE, mask=m_w, other=0)
    tl.store(kv_read + o_node, page * PAGE_SIZE + source % PAGE_SIZE, mask=m_w)
    page = tl.load(p_pages + target // PAGE_SIZE, mask=m_w, other=0)
    tl.store(kv_write + o_node, page * PAGE_SIZE + target % PAGE_SIZE, mask=m_w)
    tl.store(ring_read + o_node, slot * R + source % R, mask=m_w)
    tl.store(ring_write + o_node, slot * R + target % R, mask=m_w)
    tl.store(conv_read + o_node, slot * R_C + source % R_C, mask=m_w)
    tl.store(conv_write + o_node, slot * R_C + target % R_C, mask=m_w)


@triton.jit
def _extend_indices_kernel(
    slots,
    seq_lens,
    lens,
    page_table,
    positions,
    kv_write,
    ring_write,
    newest,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_row)
    o_w = tl.arange(0, BLOCK_W)
    m_w = o_w < W
    o_token = i_row * W + o_w
    before = tl.load(seq_lens + i_row) + o_w
    position = before + 1
    page = tl.load(page_table + slot * page_stride + position // PAGE_SIZE, mask=m_w, other=0)
    tl.store(positions + o_token, position, mask=m_w)
    tl.store(kv_write + o_token, page * PAGE_SIZE + position % PAGE_SIZE, mask=m_w)
    tl.store(ring_write + o_token, slot * R + before % R, mask=m_w)
    tl.store(newest + i_row, i_row * W + tl.maximum(tl.load(lens + i_row) - 1, 0))


# any number of rows is served by one compiled kernel
@triton.jit(do_not_specialize=["num_rows"])
def _draft_indices_kernel(
    slots,
    seq_lens,
    page_table,
    positions,
    kv_write,
    num_rows,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_row)
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o_draft = o_n * num_rows + i_row
    position = tl.load(seq_lens + i_row) + 1 + o_n
    page = tl.load(page_table + slot * page_stride + position // PAGE_SIZE, mask=m_n, other=0)
    tl.store(positions + o_draft, position, mask=m_n)
    tl.store(kv_write + o_draft, page * PAGE_SIZE + position % PAGE_SIZE, mask=m_n)
