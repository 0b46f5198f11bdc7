"""Drafting with the checkpoint's own multi-token-prediction layer.

Its KV at index p is a function of (hidden[p - 1], token[p]); index 0 does not exist. `read_window`
is the *extend* stage: it fills the indices of a window, at every depth, since the hidden states are
gone afterwards. `draft` goes on from there, feeding the layer its own hidden state.

A request that resumes at position p needs hidden[p - 1] for index p, so snapshots carry it. Each
slot's newest hidden states are in a ring by position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.layers.batch import AttentionBatch
from gapless.ops.draft_tree import TreeMask
from gapless.ops.step_metadata import draft_indices, extend_indices, kv_entries
from gapless.speculative.drafter import Drafts
from gapless.speculative.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.attention.backend import AttentionBackend
    from gapless.core.draft_shape import TreeShape
    from gapless.layers.batch import LayerMemory
    from gapless.layers.placement import Placement
    from gapless.models.decoder import Decoder
    from gapless.models.mtp import MtpHead
    from gapless.ops.step_metadata import Geometry
    from gapless.speculative.drafter import Frontier, Outcome, PromptChunk, Proposer, SavedSlots

# the first index of the layer's KV that exists
FIRST_INDEX = 1
# names of the plans that the host makes for the layer, where its backend wants some
EXTEND_PLAN = "extend"


def draft_plan(depth: int) -> str:
    """Name of the host's plan of the draft pass at some depth, 1 or more."""
    return f"draft {depth}"


class MtpDrafter:
    """Proposes a chain: the extend pass gives the first draft, each further pass one more.

    Or a tree: each of the same passes runs the best drafts of the last depth side by side.
    """

    reads_past = False

    def __init__(
        self,
        trunk: Decoder,
        head: MtpHead,
        memory: Sequence[LayerMemory],
        *,
        backend: AttentionBackend,
        page_table: Tensor,
        geometry: Geometry,
        place: Placement,
        tree: TreeShape | None = None,
    ) -> None:
        """Args: memory: KV pools of the head's layers, addressed by `page_table`. tree: how drafts
        branch; None proposes chains."""
        self.num_drafts = geometry.max_window - 1
        self._tree = tree
        self._trunk = trunk
        self._head = head
        self._memory = memory
        self._backend = backend
        self._page_table = page_table
        self._geometry = geometry
        size = trunk.architecture.hidden_size
        self._hidden_ring = place.weight((geometry.num_slots + 1) * geometry.hidden_ring_len, size)
        self._hidden_rows = place.weight(geometry.num_state_rows + 1, size)

    @property
    def row_memory(self) -> list[Tensor]:
        """What a snapshot holds of it: hidden states [rows, D]."""
        return [self._hidden_rows]

    def read_prompt(self, chunk: PromptChunk) -> Tensor:
        """Fill the chunk's KV; return the layer's hidden states [S, D] at the sampled tokens."""
        shifted, kept = chunk.shifted, chunk.kept
        resumed = self._hidden_rows.index_select(0, shifted.resumed_rows)
        hidden = self._head.forward(
            self._trunk,
            torch.cat((chunk.next_ids, shifted.resumed_ids)).index_select(0, shifted.order),
            torch.cat((chunk.hidden, resumed)).index_select(0, shifted.order),
            self._memory,
            shifted.batch,
        )
        slots, positions = (x.index_select(0, kept.ends) for x in (chunk.slots, chunk.positions))
        ends = chunk.hidden.index_select(0, kept.ends)
        self._hidden_ring.index_copy_(0, self._entries(slots, positions), ends)
        before = chunk.hidden.index_select(0, kept.snapshots)
        self._hidden_rows.index_copy_(0, kept.rows, before)
        return hidden.index_select(0, shifted.last_token)

    def read_window(self, outcome: Outcome) -> Tensor:
        """Fill the window's KV; return the layer's hidden states [B, D] at the newest tokens."""
        slots, page_table = outcome.slots, self._page_table
        indices = extend_indices(
            slots,
            outcome.seq_lens,
            outcome.lens,
            page_table,
            self._geometry,
            width=outcome.tokens.shape[1],
        )
        self._hidden_ring.index_copy_(0, indices.ring_write, outcome.hidden)
        batch = self._batch(slots, indices.positions, indices.kv_write, outcome.kv_len, EXTEND_PLAN)
        hidden = self._head.forward(
            self._trunk, outcome.tokens.reshape(-1), outcome.hidden, self._memory, batch
        )
        return hidden.index_select(0, indices.newest)

    def draft(self, frontier: Frontier, carry: Tensor, proposer: Proposer) -> Drafts:
        """Propose `num_drafts` tokens for every row."""
        if self._tree is not None:
            return self._draft_tree(self._tree, frontier, carry, proposer)
        slots, geometry, count = frontier.slots, self._geometry, self.num_drafts
        indices = draft_indices(slots, frontier.seq_lens, self._page_table, geometry, count=count)
        hidden = carry
        drafts: list[Tensor] = []
        for depth, position in enumerate(indices.positions):
            if depth:
                plan = draft_plan(depth) if frontier.is_planned else None
                last = indices.positions[depth - 1][:, None], indices.kv_write[depth - 1]
                batch = self._batch(slots, *last, frontier.kv_len, plan)
                hidden = self._head.forward(self._trunk, drafts[-1], hidden, self._memory, batch)
            drafts.append(proposer.sample(self._trunk.draft_logit_shard(hidden), position))
        return Drafts(torch.stack(drafts, dim=1))

    def _draft_tree(
        self, shape: TreeShape, frontier: Frontier, carry: Tensor, proposer: Proposer
    ) -> Drafts:
        """Propose the best of a tree; each pass goes on from the best drafts of the last depth.

        KV of these lies where that of a chain would, and on: they see the ones before them on
        their path, and siblings do not see each other.
        """
        tree = DraftTree(shape, carry.shape[0], carry.device)
        first = frontier.seq_lens + 1
        hidden = carry
        for depth in range(shape.num_steps):
            position = first + depth
            if depth:
                hidden = tree.of_parents(hidden)
                batch = self._tree_batch(frontier, first, tree)
                tokens = tree.beam.tokens.flatten()
                hidden = self._head.forward(self._trunk, tokens, hidden, self._memory, batch)
            logits = self._trunk.draft_logit_shard(hidden)
            found = proposer.rank(logits, position, tree.beam.paths, shape.topk)
            tree.grow(*found)
        return tree.best(self.num_drafts)

    def save(self, saved: SavedSlots) -> None:
        """Store the hidden states before the positions."""
        entries = self._entries(saved.slots, saved.positions - 1)
        self._hidden_rows.index_copy_(0, saved.rows, self._hidden_ring.index_select(0, entries))

    def _entries(self, slots: Tensor, positions: Tensor) -> Tensor:
        ring_len = self._geometry.hidden_ring_len
        return slots * ring_len + positions % ring_len

    def _tree_batch(self, frontier: Frontier, first: Tensor, tree: DraftTree) -> AttentionBatch:
        """Args: first: [B] position after the newest token, where the drafts' KV begins."""
        storage = first[:, None] + tree.beam.storage
        logical = (first[:, None] + tree.depth - 1).expand_as(storage)
        return AttentionBatch(
            positions=logical.flatten(),
            kv_write=kv_entries(
                self._page_table, frontier.slots, storage, self._geometry.page_size
            ),
            attention=self._backend.plan_window(
                frontier.slots,
                storage,
                self._page_table,
                kv_len=frontier.kv_len,
                first=FIRST_INDEX,
                tree=TreeMask(first, tree.beam.bits),
            ),
            live=None,
        )

    def _batch(
        self,
        slots: Tensor,
        positions: Tensor,
        kv_write: Tensor,
        kv_len: int,
        host_plan: str | None,
    ) -> AttentionBatch:
        return AttentionBatch(
            positions=positions.view(-1),
            kv_write=kv_write,
            attention=self._backend.plan_window(
                slots,
                positions,
                self._page_table,
                kv_len=kv_len,
                first=FIRST_INDEX,
                host_plan=host_plan,
            ),
            live=None,
        )
