"""The accept and draft stages: what a step emits, and what the next window holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.ops.acceptance import Settled, SettledTrees, settle_trees, settle_windows
from gapless.ops.draft_tree import compact
from gapless.ops.sampling import (
    EditRows,
    MaskRows,
    SamplingMode,
    edit_logits,
    edit_trees,
    edit_windows,
    mask_logits,
    packed_logprobs,
)
from gapless.ops.step_metadata import path_moves
from gapless.runner.choice import choose, rank
from gapless.speculative.drafter import Frontier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gapless.core.sampling_params import SamplingParams
    from gapless.layers.logits import LogitShard
    from gapless.runner.device import Device
    from gapless.runner.slot_table import SlotTable
    from gapless.speculative.drafter import Drafter


@dataclass(frozen=True)
class Verified:
    """What verify hands to accept: the target's logits over B windows, and where those stand."""

    slots: Tensor  # [B]
    seq_lens: Tensor  # [B]: committed length before the window
    checkpoint_len: Tensor  # [B]: checkpoint length once the step is over
    sampled_at: Tensor  # [B, W]: position that each sample will occupy
    logits: LogitShard  # of B * W rows
    ancestors: Tensor | None  # [B, W] int64: `draft_tree.ancestor_bits`; None is a chain


@dataclass(frozen=True)
class Accepted:
    """What accept settles."""

    tokens: Tensor  # [B, W] int64: emitted ones first
    lens: Tensor  # [B] int64; 0 for padded rows
    live_slots: Tensor  # [B]: the null slot for rows that are padded or have ended
    seq_lens: Tensor  # [B]: committed length after the step
    newest: Tensor  # [B]: the last token emitted
    logprobs: Tensor | None  # [B * W, 1 + 2 * num_top] of `tokens`, as `packed_logprobs` packs them
    path: Tensor | None  # [B, W]: node after which each of `tokens` was sampled; None of a chain


def accept(
    device: Device,
    verified: Verified,
    emitted: Tensor,
    mode: SamplingMode,
    num_top: int | None,
    masks: MaskRows | None = None,
) -> Accepted:
    """Sample every window position, keep what stands, and store the step's outcome in the table.

    What the target wrote for the longest path of a tree is moved to consecutive positions. The null
    slot stays at length 0 and done: its rows write back what they found.

    Args:
        emitted: [B, 2 + W] int64, written: each row's emitted and proposed counts, and its tokens.
        num_top: most likely tokens whose log-probabilities come with each token's own; None leaves
            out all of them.
        masks: which tokens grammars allow, a row per window position; None allows all.
    """
    table, slots = device.table, verified.slots
    rows = slots.shape[0]
    window = verified.logits.part.shape[0] // rows
    positions, sampling = verified.sampled_at.view(-1), table.sampling_rows(slots, repeat=window)
    logits = verified.logits
    if not mode.is_plain or masks is not None or num_top is not None:
        # once for all that reads whole rows
        logits = logits.gathered()
    edited = logits
    if mode.edits_logits:
        edited = logits.with_whole(_edited(table, verified, logits.whole(), window))
    if masks is not None:
        edited = logits.with_whole(mask_logits(edited.whole(), masks))
    sampled = choose(edited, positions, sampling, mode=mode).view(rows, window)
    settled, tokens, path = _settle(device, verified, sampled, emitted)
    if mode.edits_logits:
        table.count(slots, tokens, device.window_offsets[:window] < settled.lens[:, None])
    logprobs = None
    if num_top is not None:
        logprobs = packed_logprobs(logits.whole(), sampled.view(-1), num_top)
        if path is not None:
            by_node = logprobs.view(rows, window, -1)
            index = path[:, :, None].expand_as(by_node)
            logprobs = by_node.gather(1, index).flatten(0, 1)
    return Accepted(
        tokens,
        settled.lens,
        settled.live_slots,
        settled.seq_lens,
        settled.newest,
        logprobs,
        path,
    )


def _edited(
    table: SlotTable,
    verified: Verified,
    logits: Tensor,  # [B * W, V]
    window: int,
) -> Tensor:  # [B * W, V]
    """Apply bias and penalties at every window position."""
    slots, bits = verified.slots, verified.ancestors
    tokens, rows = table.window_tokens.index_select(0, slots)[:, :window], table.edit_rows(slots)
    logits = logits.view(*tokens.shape, -1)
    if bits is None:
        edited = edit_windows(logits, tokens, rows)
    else:
        edited = edit_trees(logits, tokens, bits, rows)
    return edited.flatten(0, 1)


def _settle(
    device: Device,
    verified: Verified,
    sampled: Tensor,  # [B, W]
    emitted: Tensor,  # [B, 2 + W], written
) -> tuple[Settled, Tensor, Tensor | None]:
    """Decide what the rows emit; return also the tokens [B, W] in order, and a tree's path."""
    where = verified.slots, verified.seq_lens
    written = device.table.accept_columns, emitted
    bits, checkpoint_len = verified.ancestors, verified.checkpoint_len
    null_slot, forced = device.geometry.null_slot, device.forced_drafts
    if bits is None:
        settled = settle_windows(
            sampled, *where, checkpoint_len, *written, null_slot=null_slot, forced=forced
        )
        return settled, sampled, None
    walked = settle_trees(sampled, *where, checkpoint_len, *written, bits, null_slot=null_slot)
    close_up(device, *where, walked)
    return walked, walked.tokens, walked.path


def close_up(device: Device, slots: Tensor, seq_lens: Tensor, walked: SettledTrees) -> None:
    """Move what the target's layers hold of the longest paths to consecutive positions.

    Args: seq_lens: committed lengths [B] before the windows.
    """
    pools, page_table = device.pools, device.table.columns.page_table
    moves = path_moves(walked.path, walked.lens, slots, seq_lens, page_table, device.geometry)
    compact(pools.trunk_kv, moves.kv_read, moves.kv_write)
    for memory, spec in zip(pools.linear, pools.linear_specs, strict=True):
        compact([memory.conv_ring], moves.conv_read, moves.conv_write)
        if spec.num_value_heads:
            replay = memory.replay
            rings = replay.d_ring, replay.k_ring, replay.g_ring
            compact(rings, moves.ring_read, moves.ring_write)


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
    if drafts.counts is not None:
        table.num_drafts.index_copy_(0, slots, drafts.counts)
    if drafts.bits is not None:
        table.draft_bits.index_copy_(0, slots, drafts.bits)


class _Proposer:
    """Chooses drafts as the target would after those before them."""

    def __init__(self, table: SlotTable, slots: Tensor, mode: SamplingMode) -> None:
        self._table = table
        self._slots = slots
        self._mode = mode
        self._rows = table.sampling_rows(slots, repeat=1)
        self._edits: EditRows | None = None

    def sample(self, logits: LogitShard, positions: Tensor) -> Tensor:
        """See `Proposer`."""
        if not self._mode.edits_logits:
            return choose(logits, positions, self._rows, mode=self._mode)
        edits = self._edit_rows()
        edited = logits.with_whole(edit_logits(logits.whole(), edits))
        tokens = choose(edited, positions, self._rows, mode=self._mode)
        self._edits = edits.after(tokens[:, None])
        return tokens

    def rank(
        self, logits: LogitShard, positions: Tensor, paths: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """See `Proposer`."""
        width = paths.shape[1]
        if self._mode.edits_logits:
            edits = self._edit_rows().repeated(width).after(paths.flatten(0, 1))
            logits = logits.with_whole(edit_logits(logits.whole(), edits))
        tokens, logprobs = rank(
            logits,
            positions[:, None].expand(-1, width).reshape(-1),
            self._table.sampling_rows(self._slots, repeat=width),
            mode=self._mode,
            count=count,
        )
        return tokens.view(-1, width, count), logprobs.view(-1, width, count)

    def _edit_rows(self) -> EditRows:
        # gathered when first asked for: not every drafter samples
        if self._edits is None:
            self._edits = self._table.edit_rows(self._slots)
        return self._edits


def sampling_mode(params: Iterable[SamplingParams]) -> SamplingMode:
    """Return the least that serves every row."""
    own = list(params)
    is_greedy = all(p.is_greedy for p in own)
    if any(p.edits_logits for p in own):
        return SamplingMode.GREEDY if is_greedy else SamplingMode.SAMPLED
    if is_greedy:
        return SamplingMode.ARGMAX
    return SamplingMode.DRAWN if any(p.has_filters for p in own) else SamplingMode.PLAIN
