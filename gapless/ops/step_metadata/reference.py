"""Step metadata as a chain of torch operations: positions, cache locations and state indices.

Everything is flat: an index names an entry of a pool or ring along its first axis. Reads of what
does not exist name the *zero* entry or row, which is never written; writes of padded rows land on
the null slot, null page and null row, which are never read by a real row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.ops.draft_tree import depths, nth_ancestors
from gapless.ops.linear_replay import ReplayIndices


@dataclass(frozen=True)
class Geometry:
    """Sizes of the device memory, fixed when the pools are made."""

    num_slots: int
    num_pages: int
    page_size: int
    num_state_rows: int
    replay_len: int  # L
    ring_len: int  # R
    conv_width: int
    conv_ring_len: int  # R_c
    max_window: int  # W_max

    @property
    def null_slot(self) -> int:
        """Slot of padded rows."""
        return self.num_slots

    @property
    def null_page(self) -> int:
        """Page that absorbs writes beyond a row's reservation."""
        return self.num_pages

    @property
    def null_row(self) -> int:
        """State row that absorbs writes of rows with nothing to fold."""
        return self.num_state_rows

    @property
    def zero_row(self) -> int:
        """State row of zeros, read while a checkpoint's length is 0."""
        return self.num_state_rows + 1

    @property
    def ring_zero(self) -> int:
        """Replay ring entry of zeros."""
        return (self.num_slots + 1) * self.ring_len

    @property
    def conv_zero(self) -> int:
        """Convolution ring entry of zeros, read below position 0."""
        return (self.num_slots + 1) * self.conv_ring_len

    def conv_tail(self, row: int) -> range:
        """Convolution entries of a state row's tail: the inputs before its position, in order."""
        size = self.conv_width - 1
        start = self.conv_zero + 1 + row * size
        return range(start, start + size)

    @property
    def num_conv_entries(self) -> int:
        """Convolution entries in all: rings, the zero entry, tails, the null row's included."""
        return self.conv_tail(self.null_row).stop

    @property
    def hidden_ring_len(self) -> int:
        """Positions whose hidden state a drafter keeps: a window's, and the one before it.

        So the last committed one outlives a step that the host has not read.
        """
        return self.max_window + 1

    @property
    def num_replayed(self) -> int:
        """N: most committed entries a step can find in a ring, L - 1 + W_max."""
        return self.replay_len - 1 + self.max_window


@dataclass(frozen=True)
class SlotColumns:
    """The columns of the slot table that step metadata reads; the null slot is last."""

    seq_lens: Tensor  # [slots + 1] int64
    checkpoint_len: Tensor  # [slots + 1] int64
    state_rows: Tensor  # [slots + 1] int64
    done: Tensor  # [slots + 1] bool
    page_table: Tensor  # [slots + 1, P] int64, contiguous, written where pages are fresh
    window_tokens: Tensor  # [slots + 1, W_max] int64, contiguous


@dataclass(frozen=True)
class FreshPages:
    """Up to E pages per row that are new to its slot; the rest name the null slot and null page."""

    index: Tensor  # [B, E] int64: entries of the flat page table, of the row's own slot
    page: Tensor  # [B, E] int64


class StepConstants:
    """Constant index tensors, made once so that no step allocates them."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.window = torch.arange(geometry.max_window, device=device)
        self.replayed = torch.arange(geometry.num_replayed, device=device)
        # distance of each tap from its token, oldest first
        self.tap_distance = torch.arange(geometry.conv_width - 1, -1, -1, device=device)[:, None]


@dataclass(frozen=True)
class WindowIndices:
    """Where the tokens of one decode step read and write, B rows of W tokens."""

    slots: Tensor  # [B]: the null slot for rows that are padded, or done when the step starts
    seq_lens: Tensor  # [B]
    tokens: Tensor  # [B, W]: the windows' tokens
    fold_len: Tensor  # [B]: checkpoint length once the step has folded
    positions: Tensor  # [B, W]: where a node's KV and ring entries are stored
    logical: Tensor  # [B, W]: of a tree's nodes seq_lens + depth; of a chain's `positions` itself
    sampled_at: Tensor  # [B, W]: logical position that a node's sample will occupy
    ancestors: Tensor | None  # [B, W] int64: `draft_tree.ancestor_bits`; None is a chain
    kv_write: Tensor  # [B * W]
    replay: ReplayIndices
    conv_write: Tensor  # [B * W]
    conv_taps: Tensor  # [width, B * W]
    live: Tensor  # [B * W] bool: whether the token is of a row that is neither padded nor done


@dataclass(frozen=True)
class PathMoves:
    """Which entries `draft_tree.compact` moves once B trees of W nodes are settled, each [B, W]."""

    kv_read: Tensor
    kv_write: Tensor
    ring_read: Tensor
    ring_write: Tensor
    conv_read: Tensor
    conv_write: Tensor


@dataclass(frozen=True)
class ExtendIndices:
    """Where a layer that reads hidden states one position before takes in B windows of W tokens."""

    positions: Tensor  # [B, W]
    kv_write: Tensor  # [B * W]
    ring_write: Tensor  # [B * W]: entries of a ring of hidden states, those before the positions
    newest: Tensor  # [B]: which of the B * W tokens was emitted last; of padded rows the first


@dataclass(frozen=True)
class DraftIndices:
    """Where N drafts of each of B rows stand, in a row after the newest token; each [N, B]."""

    positions: Tensor
    kv_write: Tensor


def kv_entries(
    page_table: Tensor,  # [slots + 1, P]
    slots: Tensor,  # [B]
    positions: Tensor,  # [B, W]
    page_size: int,
) -> Tensor:  # [B * W]
    """Return the KV entries of some positions of each row."""
    pages = page_table[slots[:, None], positions // page_size]
    return (pages * page_size + positions % page_size).view(-1)


def window_indices(
    slots: Tensor,  # [B] int64, padded rows name the null slot
    columns: SlotColumns,
    geometry: Geometry,
    constants: StepConstants,
    *,
    window: int,  # W
    tree: Tensor | None = None,  # [slots + 1, W_max] int64: `draft_tree.ancestor_bits` of each slot
    fresh: FreshPages | None = None,
) -> WindowIndices:
    """Derive a step's index tensors from its slots and the slot table, on the device.

    Fresh pages are put into the page table first. A row whose slot is done is renamed to the null
    slot here, once for every layer and stage.

    With `tree`, node i is stored at seq_lens + i, and the tap at distance t of it is its t-th
    ancestor, or where its path is shorter the committed position seq_lens + depth - t. A null row's
    bits are not read: its nodes see themselves alone, at depth 0.
    """
    if fresh is not None:
        columns.page_table.view(-1).index_copy_(0, fresh.index.view(-1), fresh.page.view(-1))
    done = columns.done.index_select(0, slots)
    slots = slots.masked_fill(done, geometry.null_slot)
    seq_lens = columns.seq_lens.index_select(0, slots)
    checkpoint_len = columns.checkpoint_len.index_select(0, slots)
    rows = columns.state_rows.index_select(0, slots)
    on_grid = seq_lens // geometry.replay_len * geometry.replay_len
    fold_len = torch.maximum(checkpoint_len, on_grid)

    positions = seq_lens[:, None] + constants.window[:window]
    flat = positions.view(-1)
    token_slots = slots[:, None].expand(-1, window).reshape(-1)
    conv_base = token_slots * geometry.conv_ring_len
    ancestors, logical, tap_positions = None, positions, flat - constants.tap_distance
    if tree is not None:
        is_null = (slots == geometry.null_slot)[:, None]
        ancestors = tree.index_select(0, slots)[:, :window]
        ancestors = torch.where(is_null, 1 << constants.window[:window], ancestors)
        logical = seq_lens[:, None] + depths(ancestors, window)
        tap_positions = _path_taps(ancestors, seq_lens, logical, constants)
    conv_taps = (conv_base + tap_positions % geometry.conv_ring_len).masked_fill(
        tap_positions < 0, geometry.conv_zero
    )
    replayed = checkpoint_len[:, None] + constants.replayed
    ring_read = (slots * geometry.ring_len)[:, None] + replayed % geometry.ring_len
    return WindowIndices(
        slots=slots,
        seq_lens=seq_lens,
        tokens=columns.window_tokens.index_select(0, slots)[:, :window].contiguous(),
        fold_len=fold_len,
        positions=positions,
        logical=logical,
        sampled_at=logical + 1,
        ancestors=ancestors,
        kv_write=kv_entries(columns.page_table, slots, positions, geometry.page_size),
        replay=ReplayIndices(
            ring_read=ring_read.masked_fill(replayed >= seq_lens[:, None], geometry.ring_zero),
            ring_write=(token_slots * geometry.ring_len + flat % geometry.ring_len).view(
                -1, window
            ),
            fold_mask=replayed < fold_len[:, None],
            read_rows=rows.masked_fill(checkpoint_len == 0, geometry.zero_row),
            fold_rows=rows.masked_fill(fold_len == checkpoint_len, geometry.null_row),
            order=(fold_len == checkpoint_len).to(torch.uint8).argsort(stable=True),
        ),
        conv_write=conv_base + flat % geometry.conv_ring_len,
        conv_taps=conv_taps,
        live=token_slots != geometry.null_slot,
    )


def _path_taps(
    ancestors: Tensor,  # [B, W]
    seq_lens: Tensor,  # [B]
    logical: Tensor,  # [B, W]
    constants: StepConstants,
) -> Tensor:  # [width, B * W]: storage positions of nodes, then committed ones, also below 0
    distance = constants.tap_distance
    nodes = nth_ancestors(ancestors, distance[:, 0])
    committed = logical - distance[:, :, None]
    return torch.where(nodes < 0, committed, seq_lens[:, None] + nodes).flatten(1)


def extend_indices(
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    lens: Tensor,  # [B] int64: tokens emitted; 0 for padded rows
    page_table: Tensor,  # [slots + 1, P]
    geometry: Geometry,
    *,
    width: int,  # W
) -> ExtendIndices:
    """Return the indices of W tokens from one position past the committed length on."""
    before = seq_lens[:, None] + torch.arange(width, device=slots.device)
    positions, ring_len = before + 1, geometry.hidden_ring_len
    first = torch.arange(slots.shape[0], device=slots.device) * width
    return ExtendIndices(
        positions=positions,
        kv_write=kv_entries(page_table, slots, positions, geometry.page_size),
        ring_write=(slots[:, None] * ring_len + before % ring_len).view(-1),
        newest=first + (lens - 1).clamp(min=0),
    )


def draft_indices(
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: position of the newest token
    page_table: Tensor,  # [slots + 1, P]
    geometry: Geometry,
    *,
    count: int,  # N
) -> DraftIndices:
    """Return positions and KV entries of the N tokens after the newest."""
    positions = seq_lens[:, None] + torch.arange(1, count + 1, device=slots.device)
    entries = kv_entries(page_table, slots, positions, geometry.page_size).view_as(positions)
    return DraftIndices(positions.t().contiguous(), entries.t().contiguous())


def path_moves(
    path: Tensor,  # [B, W] int64: nodes of the accepted path, node 0 first
    lens: Tensor,  # [B] int64: how many of them were kept; 0 for padded rows
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    page_table: Tensor,  # [slots + 1, P]
    geometry: Geometry,
) -> PathMoves:
    """Return the moves that make the path's i-th node stand at position seq_lens + i.

    What lies past the path stays where it is.
    """
    write = torch.arange(path.shape[1], device=path.device).expand_as(path)
    read = torch.where(write < lens[:, None], path, write)

    def in_ring(nodes: Tensor, ring_len: int) -> Tensor:
        return slots[:, None] * ring_len + (seq_lens[:, None] + nodes) % ring_len

    def in_pages(nodes: Tensor) -> Tensor:
        positions = seq_lens[:, None] + nodes
        return kv_entries(page_table, slots, positions, geometry.page_size).view_as(path)

    return PathMoves(
        kv_read=in_pages(read),
        kv_write=in_pages(write),
        ring_read=in_ring(read, geometry.ring_len),
        ring_write=in_ring(write, geometry.ring_len),
        conv_read=in_ring(read, geometry.conv_ring_len),
        conv_write=in_ring(write, geometry.conv_ring_len),
    )
