"""The accept and draft stages: what a step emits, and what the next window holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.ops.acceptance import settle_windows
from gapless.ops.sampling import (
    EditRows,
    MaskRows,
    SamplingMode,
    edit_logits,
    edit_windows,
    mask_logits,
    packed_logprobs,
    sample,
)
from gapless.speculative.drafter import Frontier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gapless.core.sampling_params import SamplingParams
    from gapless.runner.device import Device
    from gapless.runner.slot_table import SlotTable
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
    logprobs: Tensor | None  # [B * W, 1 + 2 * num_top] of `tokens`, as `packed_logprobs` packs them


def accept(
    device: Device,
    verified: Verified,
    mode: SamplingMode,
    num_top: int | None,
    masks: MaskRows | None = None,
) -> Accepted:
    """Sample every window position, keep what stands, and store the step's outcome in the table.

    The null slot stays at length 0 and done: its rows write back what they found.

    Args:
        num_top: most likely tokens whose log-probabilities come with each token's own; None leaves
            out all of them.
        masks: which tokens grammars allow, a row per window position; None allows all.
    """
    table, slots = device.table, verified.slots
    rows = slots.shape[0]
    window = verified.logits.shape[0] // rows
    logits = verified.logits
    if mode.edits_logits:
        window_tokens = table.window_tokens.index_select(0, slots)[:, :window]
        by_window = logits.view(rows, window, -1)
        logits = edit_windows(by_window, window_tokens, table.edit_rows(slots)).view_as(logits)
    if masks is not None:
        logits = mask_logits(logits, masks)
    sampled_at = verified.seq_lens[:, None] + device.window_offsets[1 : window + 1]
    tokens = sample(
        logits,
        sampled_at.view(-1),
        table.sampling_rows(slots, repeat=window),
        mode=mode,
    ).view(rows, window)
    settled = settle_windows(
        tokens,
        slots,
        verified.seq_lens,
        verified.checkpoint_len,
        table.accept_columns,
        null_slot=device.geometry.null_slot,
        forced=device.forced_drafts(sampled_at[:, 0]),
    )
    if mode.edits_logits:
        table.count(slots, tokens, device.window_offsets[:window] < settled.lens[:, None])
    logprobs = None
    if num_top is not None:
        logprobs = packed_logprobs(verified.logits, tokens.view(-1), num_top)
    return Accepted(
        tokens,
        settled.lens,
        settled.proposed,
        settled.live_slots,
        settled.seq_lens,
        settled.newest,
        logprobs,
    )


def draft(
    device: Device,
    drafter: Drafter,
    accepted: Accepted,
    carry: Tensor,
    *,
    kv_len: int,
    mode: SamplingMode,
    is_planned: bool = False,
) -> None:
    """Let the drafter propose the rest of the next window, and store it in the table.

    Args: is_planned: whether the host has planned the attention of these rows.
    """
    table, slots = device.table, accepted.live_slots
    frontier = Frontier(slots, accepted.seq_lens, accepted.newest, kv_len, is_planned)
    drafts = drafter.draft(frontier, carry, _Proposer(table, slots, mode))
    table.window_tokens[:, 1:].index_copy_(0, slots, drafts.tokens)
    table.num_drafts.index_copy_(0, slots, drafts.counts)


class _Proposer:
    """Samples drafts one after the other, each as the target would after those before it."""

    def __init__(self, table: SlotTable, slots: Tensor, mode: SamplingMode) -> None:
        self._table = table
        self._slots = slots
        self._mode = mode
        self._rows = table.sampling_rows(slots, repeat=1)
        self._edits: EditRows | None = None

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Map `(logits [B, V], positions [B])` to drafts `[B]`, and count those."""
        if not self._mode.edits_logits:
            return sample(logits, positions, self._rows, mode=self._mode)
        # gathered when first asked for: not every drafter samples
        edits = self._edits or self._table.edit_rows(self._slots)
        tokens = sample(edit_logits(logits, edits), positions, self._rows, mode=self._mode)
        self._edits = edits.after(tokens)
        return tokens


def sampling_mode(params: Iterable[SamplingParams]) -> SamplingMode:
    """Return the least that serves every row."""
    own = list(params)
    return SamplingMode.of(
        is_greedy=all(p.is_greedy for p in own), edits_logits=any(p.edits_logits for p in own)
    )
