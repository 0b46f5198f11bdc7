"""The kernel behind `triton.py`: a program owns one row."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


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
    lens,
    proposed,
    live_slots,
    after,
    newest,
    NULL_SLOT: tl.constexpr,
    W: tl.constexpr,
    W_MAX: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_FORCED: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BLOCK_W)
    slot = tl.load(slots + i_row)
    length = tl.load(seq_lens + i_row)
    num_proposed = tl.load(num_drafts + slot)
    b_token = tl.load(sampled + i_row * W + o_w, mask=o_w < W, other=-1)
    # the window's first token is one more than what is committed
    b_ends = (length + 2 + o_w >= tl.load(limit_len + slot)).to(tl.int32)
    for i_stop in tl.static_range(STOPS):
        b_ends |= (b_token == tl.load(stop_ids + slot * STOPS + i_stop)).to(tl.int32)
    m_draft = o_w < W - 1
    if HAS_FORCED:
        b_kept = o_w < tl.load(forced + i_row)
    else:
        b_kept = b_token == tl.load(window_tokens + slot * W_MAX + 1 + o_w, mask=m_draft, other=-1)
    b_goes_on = b_kept & (b_ends == 0) & (o_w < num_proposed) & m_draft
    last = tl.min(tl.where(b_goes_on, BLOCK_W, o_w))
    token = tl.sum(tl.where(o_w == last, b_token, 0))
    is_null = slot == NULL_SLOT
    is_over = (tl.sum(tl.where(o_w == last, b_ends, 0)) > 0) | is_null
    emitted = tl.where(is_null, 0, last + 1).to(tl.int64)
    tl.store(lens + i_row, emitted)
    tl.store(proposed + i_row, num_proposed)
    tl.store(live_slots + i_row, tl.where(is_over, NULL_SLOT, slot))
    tl.store(after + i_row, length + emitted)
    tl.store(newest + i_row, token)
    tl.store(out_seq_lens + slot, length + emitted)
    tl.store(out_checkpoint_len + slot, tl.load(checkpoint_len + i_row))
    tl.store(out_done + slot, is_over.to(tl.uint8))
    tl.store(window_tokens + slot * W_MAX, token)
