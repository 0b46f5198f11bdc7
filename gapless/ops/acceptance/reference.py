"""How many tokens of a window are emitted, and what the slot table holds after; the definition.

Drafts are kept while they equal the target's own tokens. Also the CPU path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.ops.draft_tree import depths, nth_ancestors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """What one step emits, B rows."""

    lens: Tensor  # [B] int64, 1 .. W
    newest: Tensor  # [B] int64: the last token emitted
    ends: Tensor  # [B] bool: whether it ends its request


@dataclass(frozen=True)
class AcceptColumns:
    """The columns of the slot table that acceptance reads or writes; the null slot is last."""

    seq_lens: Tensor  # [slots + 1] int64, written
    checkpoint_len: Tensor  # [slots + 1] int64, written
    done: Tensor  # [slots + 1] bool, written
    window_tokens: Tensor  # [slots + 1, W_max] int64, the first column written
    num_drafts: Tensor  # [slots + 1] int64
    limit_len: Tensor  # [slots + 1] int64
    stop_ids: Tensor  # [slots + 1, S] int64, -1 where unused


@dataclass(frozen=True)
class Settled:
    """A step's outcome, B rows."""

    lens: Tensor  # [B] int64: tokens emitted; 0 for padded rows
    live_slots: Tensor  # [B] int64: the null slot for rows that are padded or have ended
    seq_lens: Tensor  # [B] int64: committed length after the step
    newest: Tensor  # [B] int64: the last token emitted


@dataclass(frozen=True)
class SettledTrees(Settled):
    """A step's outcome where windows are trees; what lies past `lens` repeats the last."""

    path: Tensor  # [B, W] int64: node whose sample each emitted token is; node 0 for padded rows
    tokens: Tensor  # [B, W] int64: emitted tokens


def accept_chain(
    sampled: Tensor,  # [B, W] int64: the target's token after each window position
    window: Tensor,  # [B, W] int64: the newest token, then the drafts
    total_len: Tensor,  # [B] int64: tokens of the request before this step, window[:, 0] included
    limit_len: Tensor,  # [B] int64
    stop_ids: Tensor,  # [B, S] int64, -1 where unused
    num_drafts: Tensor,  # [B] int64: window tokens after the first that are proposals
    forced: Tensor | None = None,  # [B] int64: drafts to keep whatever they are, for benchmarks
) -> Acceptance:
    """Emit sampled tokens up to the first that no draft foretold, or that ends the request."""
    width = sampled.shape[1]
    is_stop = (sampled[:, :, None] == stop_ids[:, None, :]).any(-1)
    lens_after = total_len[:, None] + torch.arange(1, width + 1, device=sampled.device)
    ends = is_stop | (lens_after >= limit_len[:, None])
    if width == 1:
        return Acceptance(torch.ones_like(total_len), sampled[:, 0], ends[:, 0])
    depth = torch.arange(width - 1, device=sampled.device)
    is_kept = sampled[:, :-1] == window[:, 1:] if forced is None else depth < forced[:, None]
    goes_on = is_kept & ~ends[:, :-1] & (depth < num_drafts[:, None])
    last = goes_on.long().cumprod(-1).sum(-1)
    at_last = last[:, None]
    return Acceptance(last + 1, sampled.gather(1, at_last)[:, 0], ends.gather(1, at_last)[:, 0])


def settle_windows(
    sampled: Tensor,  # [B, W] int64
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    checkpoint_len: Tensor,  # [B] int64: checkpoint length once the step is over
    columns: AcceptColumns,  # written
    emitted: Tensor,  # [B, 2 + W] int64, contiguous, written
    *,
    null_slot: int,
    forced: Tensor | None = None,  # [N] int64
) -> Settled:
    """Run `accept_chain` on the slots' windows and store the outcome in their columns.

    The null slot stays at length 0 and done; of the tokens that its rows put into its window any
    one may stay. A row of `emitted`, which the host reads, is how many tokens were emitted, how
    many drafts the window held, and the window's tokens, emitted ones first. Of `forced` drafts as
    many are kept as the entry says of the first sample's position, modulo N.
    """
    proposed = columns.num_drafts.index_select(0, slots)
    outcome = accept_chain(
        sampled,
        columns.window_tokens.index_select(0, slots)[:, : sampled.shape[1]],
        seq_lens + 1,
        columns.limit_len.index_select(0, slots),
        columns.stop_ids.index_select(0, slots),
        proposed,
        _forced_at(seq_lens + 1, forced),
    )
    settled = _store(outcome, slots, seq_lens, checkpoint_len, columns, null_slot)
    _report(settled, proposed, sampled, emitted)
    return settled


def accept_tree(
    sampled: Tensor,  # [B, W] int64: the target's token after each node
    window: Tensor,  # [B, W] int64: the newest token, then the drafts
    bits: Tensor,  # [B, W] int64: `draft_tree.ancestor_bits`
    total_len: Tensor,  # [B] int64: tokens of the request before this step, window[:, 0] included
    limit_len: Tensor,  # [B] int64
    stop_ids: Tensor,  # [B, S] int64, -1 where unused
    num_drafts: Tensor,  # [B] int64: nodes after the first that are proposals
    forced: Tensor | None = None,  # [B] int64: drafts to keep whatever they are, for benchmarks
) -> tuple[Acceptance, Tensor]:
    """Walk from node 0 to the child that holds the sample; return also the path [B, W].

    The walk ends where no child does, or where the sample ends the request. Of several such
    children the lowest is taken. `forced` drafts are first children. Past its end the path repeats
    its last node.
    """
    width = sampled.shape[1]
    node, depth = torch.arange(width, device=sampled.device), depths(bits, width)
    is_stop = (sampled[:, :, None] == stop_ids[:, None, :]).any(-1)
    ends = is_stop | (total_len[:, None] + depth + 1 >= limit_len[:, None])
    parent = nth_ancestors(bits, torch.ones_like(node[:1]))[0]
    above = parent.clamp(min=0)
    is_foretold = sampled.gather(1, above) == window if forced is None else depth <= forced[:, None]
    follows = is_foretold & ~ends.gather(1, above) & (node <= num_drafts[:, None]) & (parent >= 0)
    # a node gives way to a lower one with the same parent
    is_sibling = (parent[:, :, None] == parent[:, None, :]) & (node < node[:, None])
    follows &= ~(is_sibling & follows[:, None, :]).any(-1)
    reached = (follows.long() << node).sum(-1, keepdim=True) | 1
    is_kept = bits & ~reached == 0
    last = (is_kept * node).amax(-1, keepdim=True)
    # of the nodes kept there is one at each depth
    at_depth = is_kept[:, None, :] & (depth[:, None, :] == node[:, None])
    path = torch.maximum((at_depth * node).sum(-1), last * (node > depth.gather(1, last)))
    newest, is_over = sampled.gather(1, last)[:, 0], ends.gather(1, last)[:, 0]
    return Acceptance(is_kept.sum(-1), newest, is_over), path


def settle_trees(
    sampled: Tensor,  # [B, W] int64
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    checkpoint_len: Tensor,  # [B] int64: checkpoint length once the step is over
    columns: AcceptColumns,  # written
    emitted: Tensor,  # [B, 2 + W] int64, contiguous, written
    bits: Tensor,  # [B, W] int64: `draft_tree.ancestor_bits`
    *,
    null_slot: int,
    forced: Tensor | None = None,  # [N] int64
) -> SettledTrees:
    """Run `accept_tree` on the slots' windows and store the outcome; as `settle_windows`."""
    proposed = columns.num_drafts.index_select(0, slots)
    outcome, path = accept_tree(
        sampled,
        columns.window_tokens.index_select(0, slots)[:, : sampled.shape[1]],
        bits,
        seq_lens + 1,
        columns.limit_len.index_select(0, slots),
        columns.stop_ids.index_select(0, slots),
        proposed,
        _forced_at(seq_lens + 1, forced),
    )
    settled = _store(outcome, slots, seq_lens, checkpoint_len, columns, null_slot)
    path = path.masked_fill((slots == null_slot)[:, None], 0)
    tokens = sampled.gather(1, path)
    _report(settled, proposed, tokens, emitted)
    return SettledTrees(**vars(settled), path=path, tokens=tokens)


def _forced_at(positions: Tensor, forced: Tensor | None) -> Tensor | None:
    return None if forced is None else forced.index_select(0, positions % forced.shape[0])


def _report(settled: Settled, proposed: Tensor, tokens: Tensor, emitted: Tensor) -> None:
    emitted.copy_(torch.cat((settled.lens[:, None], proposed[:, None], tokens), dim=1))


def _store(
    outcome: Acceptance,
    slots: Tensor,
    seq_lens: Tensor,
    checkpoint_len: Tensor,
    columns: AcceptColumns,
    null_slot: int,
) -> Settled:
    """Write what the slots' rows of the table hold after the step."""
    is_null = slots == null_slot
    lens = outcome.lens.masked_fill(is_null, 0)
    after = seq_lens + lens
    is_over = outcome.ends | is_null
    columns.seq_lens.index_copy_(0, slots, after)
    columns.checkpoint_len.index_copy_(0, slots, checkpoint_len)
    columns.done.index_copy_(0, slots, is_over)
    columns.window_tokens.select(1, 0).index_copy_(0, slots, outcome.newest)
    live_slots = slots.masked_fill(is_over, null_slot)
    return Settled(lens, live_slots, after, outcome.newest)
