"""The accept and draft stages: what a step emits, and what the next window holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.ops.sampling import SamplingMode, sample
from gapless.speculative.accept import accept_chain
from gapless.speculative.drafter import Frontier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gapless.core.sampling_params import SamplingParams
    from gapless.runner.device import Device
    from gapless.speculative.drafter import Drafter


@dataclass(frozen=True)
class Verified:
    """What verify hands to accept: the target's logits over B windows, and where those stand."""

    slots: Tensor  # [B]
    seq_lens: Tensor  # [B]: committed length before the window
    checkpoint_len: Tensor  # [B]: checkpoint length once the step is over
    logits: Tensor  # [B * W, V]


@dataclass(frozen=True)
class Accepted:
    """What accept settles."""

    tokens: Tensor  # [B, W] int64: emitted ones first
    lens: Tensor  # [B] int64; 0 for padded rows
    proposed: Tensor  # [B] int64: drafts that the window held
    live_slots: Tensor  # [B]: the null slot for rows that are padded or have ended
    seq_lens: Tensor  # [B]: committed length after the step
    newest: Tensor  # [B]: the last token emitted


def accept(device: Device, verified: Verified, mode: SamplingMode) -> Accepted:
    """Sample every window position, keep what stands, and store the step's outcome in the table.

    The null slot stays at length 0 and done: its rows write back what they found.
    """
    table, slots = device.table, verified.slots
    rows = slots.shape[0]
    window = verified.logits.shape[0] // rows
    sampled_at = verified.seq_lens[:, None] + device.window_offsets[1 : window + 1]
    tokens = sample(
        verified.logits,
        sampled_at.view(-1),
        table.sampling_rows(slots, repeat=window),
        mode=mode,
    ).view(rows, window)
    proposed = table.num_drafts.index_select(0, slots)
    outcome = accept_chain(
        tokens,
        table.window_tokens.index_select(0, slots)[:, :window],
        verified.seq_lens + 1,
        table.limit_len.index_select(0, slots),
        table.stop_ids.index_select(0, slots),
        proposed,
        device.forced_drafts(sampled_at[:, 0]),
    )
    is_null = slots == device.geometry.null_slot
    lens = outcome.lens.masked_fill(is_null, 0)
    seq_lens = verified.seq_lens + lens
    is_over = outcome.ends | is_null
    table.columns.seq_lens.index_copy_(0, slots, seq_lens)
    table.columns.checkpoint_len.index_copy_(0, slots, verified.checkpoint_len)
    table.columns.done.index_copy_(0, slots, is_over)
    table.window_tokens.select(1, 0).index_copy_(0, slots, outcome.newest)
    live = slots.masked_fill(is_over, device.geometry.null_slot)
    return Accepted(tokens, lens, proposed, live, seq_lens, outcome.newest)


def draft(
    device: Device,
    drafter: Drafter,
    accepted: Accepted,
    carry: Tensor,
    *,
    kv_len: int,
    mode: SamplingMode,
) -> None:
    """Let the drafter propose the rest of the next window, and store it in the table."""
    table, slots = device.table, accepted.live_slots
    rows = table.sampling_rows(slots, repeat=1)
    frontier = Frontier(slots, accepted.seq_lens, accepted.newest, kv_len)
    drafts = drafter.draft(
        frontier, carry, lambda logits, positions: sample(logits, positions, rows, mode=mode)
    )
    table.window_tokens[:, 1:].index_copy_(0, slots, drafts.tokens)
    table.num_drafts.index_copy_(0, slots, drafts.counts)


def sampling_mode(params: Iterable[SamplingParams]) -> SamplingMode:
    """Return the least that serves every row."""
    own = list(params)
    if not all(p.is_greedy for p in own):
        return SamplingMode.SAMPLED
    return SamplingMode.GREEDY if any(p.min_tokens for p in own) else SamplingMode.ARGMAX
