"""The kernels behind `triton.py`: a program owns one row."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.draft_tree.kernels import _depths, _highest


@triton.jit
def _ends(b_token, b_total, limit, p_stops, STOPS: tl.constexpr):
    """Whether each token ends its request, which then has `b_total` tokens; int32."""
    b_ends = (b_total >= limit).to(tl.int32)
    for i_stop in tl.static_range(STOPS):
        b_ends |= (b_token == tl.load(p_stops + i_stop)).to(tl.int32)
    return b_ends


@triton.jit
def _store(
    i_row,
    slot,
    length,
    count,
    num_proposed,
    token,
    is_over,
    checkpoint_len,
    out_seq_lens,
    out_checkpoint_len,
    out_done,
    window_tokens,
    emitted,
    lens,
    live_slots,
    after,
    newest,
    NULL_SLOT: tl.constexpr,
    W: tl.constexpr,
    W_MAX: tl.constexpr,
):
    """Write a row's outcome, to the results and to the table's columns."""
    tl.store(emitted + i_row * (2 + W), count)
    tl.store(emitted + i_row * (2 + W) + 1, num_proposed)
    tl.store(lens + i_row, count)
    tl.store(live_slots + i_row, tl.where(is_over, NULL_SLOT, slot))
    tl.store(after + i_row, length + count)
    tl.store(newest + i_row, token)
    tl.store(out_seq_lens + slot, length + count)
    tl.store(out_checkpoint_len + slot, tl.load(checkpoint_len + i_row))
    tl.store(out_done + slot, is_over.to(tl.uint8))
    tl.store(window_tokens + slot * W_MAX, token)


@triton.jit
def _settle_windows_kernel(
    sampled,
    slots,
    seq_lens,
    checkpoint_len,
    forced,
    out_seq_lens,
    out_checkpoint_len,
    out_done,
    window_tokens,
    num_drafts,
    limit_len,
    stop_ids,
    emitted,
    lens,
    live_slots,
    after,
    newest,
    NULL_SLOT: tl.constexpr,
    W: tl.constexpr,
    W_MAX: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NUM_FORCED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BLOCK_W)
    slot = tl.load(slots + i_row)
    length = tl.load(seq_lens + i_row)
    num_proposed = tl.load(num_drafts + slot)
    b_token = tl.load(sampled + i_row * W + o_w, mask=o_w < W, other=-1)
    # the window's first token is one more than what is committed
    limit = tl.load(limit_len + slot)
    b_ends = _ends(b_token, length + 2 + o_w, limit, stop_ids + slot * STOPS, STOPS)
    m_draft = o_w < W - 1
    if NUM_FORCED > 0:
        b_kept = o_w < tl.load(forced + (length + 1) % NUM_FORCED)
    else:
        b_kept = b_token == tl.load(window_tokens + slot * W_MAX + 1 + o_w, mask=m_draft, other=-1)
    b_goes_on = b_kept & (b_ends == 0) & (o_w < num_proposed) & m_draft
    last = tl.min(tl.where(b_goes_on, BLOCK_W, o_w))
    token = tl.sum(tl.where(o_w == last, b_token, 0))
    is_null = slot == NULL_SLOT
    is_over = (tl.sum(tl.where(o_w == last, b_ends, 0)) > 0) | is_null
    count = tl.where(is_null, 0, last + 1).to(tl.int64)
    tl.store(emitted + i_row * (2 + W) + 2 + o_w, b_token, mask=o_w < W)
    _store(
        i_row, slot, length, count, num_proposed, token, is_over, checkpoint_len,
        out_seq_lens, out_checkpoint_len, out_done, window_tokens,
        emitted, lens, live_slots, after, newest, NULL_SLOT, W, W_MAX,
    )  # fmt: skip


@triton.jit
def _settle_trees_kernel(
    sampled,
    slots,
    seq_lens,
    checkpoint_len,
    bits,
    forced,
    out_seq_lens,
    out_checkpoint_len,
    out_done,
    window_tokens,
    num_drafts,
    limit_len,
    stop_ids,
    emitted,
    lens,
    live_slots,
    after,
    newest,
    path,
    tokens,
    NULL_SLOT: tl.constexpr,
    W: tl.constexpr,
    W_MAX: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NUM_FORCED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BLOCK_W).to(tl.int64)
    m_w = o_w < W
    slot = tl.load(slots + i_row)
    length = tl.load(seq_lens + i_row)
    num_proposed = tl.load(num_drafts + slot)
    b_token = tl.load(sampled + i_row * W + o_w, mask=m_w, other=-1)
    b_bits = tl.load(bits + i_row * W + o_w, mask=m_w, other=0)
    b_one = tl.full([BLOCK_W], 1, tl.int64)
    b_depth = _depths(b_bits, o_w)
    b_parent = _highest(b_bits & ((b_one << o_w) - 1), o_w)
    # the window's first token is one more than what is committed
    limit = tl.load(limit_len + slot)
    b_ends = _ends(b_token, length + 2 + b_depth, limit, stop_ids + slot * STOPS, STOPS)

    m_parent = b_parent[:, None] == o_w[None, :]
    b_over = tl.sum(tl.where(m_parent, b_ends[None, :], 0), axis=1)
    if NUM_FORCED > 0:
        m_foretold = b_depth <= tl.load(forced + (length + 1) % NUM_FORCED)
    else:
        b_held = tl.load(window_tokens + slot * W_MAX + o_w, mask=m_w, other=-1)
        m_foretold = tl.sum(tl.where(m_parent, b_token[None, :], 0), axis=1) == b_held
    m_follows = m_foretold & (b_over == 0) & (o_w <= num_proposed) & (b_parent >= 0)
    b_follows = m_follows.to(tl.int32)
    # a node gives way to a lower one with the same parent
    m_lower = (b_parent[:, None] == b_parent[None, :]) & (o_w[None, :] < o_w[:, None])
    b_follows *= 1 - tl.max(tl.where(m_lower, b_follows[None, :], 0), axis=1)
    reached = tl.sum(tl.where(b_follows != 0, b_one << o_w, 0), axis=0) | 1
    m_kept = ((b_bits & reached) == b_bits) & m_w

    last = tl.max(tl.where(m_kept, o_w, 0), axis=0)
    count = tl.sum(m_kept.to(tl.int64), axis=0)
    # of the nodes kept there is one at each depth
    m_at = m_kept[None, :] & (b_depth[None, :] == o_w[:, None])
    b_path = tl.sum(tl.where(m_at, o_w[None, :], 0), axis=1)
    is_null = slot == NULL_SLOT
    b_path = tl.where(o_w < count, b_path, last)
    b_path = tl.where(is_null, 0, b_path)
    m_path = b_path[:, None] == o_w[None, :]
    b_emitted = tl.sum(tl.where(m_path, b_token[None, :], 0), axis=1)
    tl.store(path + i_row * W + o_w, b_path, mask=m_w)
    tl.store(tokens + i_row * W + o_w, b_emitted, mask=m_w)
    tl.store(emitted + i_row * (2 + W) + 2 + o_w, b_emitted, mask=m_w)

    token = tl.sum(tl.where(o_w == last, b_token, 0), axis=0)
    is_over = (tl.sum(tl.where(o_w == last, b_ends, 0), axis=0) > 0) | is_null
    count = tl.where(is_null, 0, count)
    _store(
        i_row, slot, length, count, num_proposed, token, is_over, checkpoint_len,
        out_seq_lens, out_checkpoint_len, out_done, window_tokens,
        emitted, lens, live_slots, after, newest, NULL_SLOT, W, W_MAX,
    )  # fmt: skip
