"""Drafting by looking up the newest tokens in the request's own text (prompt lookup)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.speculative.drafter import Drafts

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.speculative.drafter import Frontier, Outcome, PromptChunk, Proposer, SavedSlots

# longest run of newest tokens that is looked up
LONGEST_MATCH = 3


class NgramDrafter:
    """Proposes what followed the latest earlier occurrence of the newest tokens.

    Longer matches are preferred. Keeps each slot's tokens on the device, by position.
    """

    reads_past = True

    def __init__(
        self, *, num_slots: int, num_positions: int, num_drafts: int, device: torch.device
    ):
        """Args: num_positions: positions that a step may name, drafts included."""
        self.num_drafts = num_drafts
        self._num_positions = num_positions
        self._tokens = torch.zeros(num_slots + 1, num_positions, dtype=torch.int64, device=device)
        self._position = torch.arange(num_positions, device=device)

    @property
    def row_memory(self) -> list[Tensor]:
        """What a snapshot holds of it: nothing, the text is read again."""
        return []

    def read_prompt(self, chunk: PromptChunk) -> Tensor:
        """Keep the chunk's tokens, and the first one sampled after it."""
        base = chunk.slots * self._num_positions + chunk.positions
        past = chunk.past.slots * self._num_positions + chunk.past.positions
        flat = self._tokens.view(-1)
        flat.index_copy_(0, past, chunk.past.token_ids)
        flat.index_copy_(0, base, chunk.token_ids)
        flat.index_copy_(0, base + 1, chunk.next_ids)
        return chunk.last_token

    def read_window(self, outcome: Outcome) -> Tensor:
        """Keep the window's tokens; those that were not emitted are overwritten later."""
        width = outcome.tokens.shape[1]
        positions = outcome.seq_lens[:, None] + self._position[1 : width + 1]
        base = outcome.slots[:, None] * self._num_positions
        self._tokens.view(-1).index_copy_(
            0, (base + positions).view(-1), outcome.tokens.reshape(-1)
        )
        return outcome.lens

    def draft(self, frontier: Frontier, carry: Tensor, proposer: Proposer) -> Drafts:
        """Propose up to `num_drafts` tokens; none where the newest token is new to the text."""
        del carry, proposer
        found = self._match_ends(frontier)
        start = (found + 1)[:, None] + self._position[: self.num_drafts]
        tokens = self._tokens.index_select(0, frontier.slots)
        drafts = tokens.gather(1, start.clamp(max=self._num_positions - 1))
        known = (frontier.seq_lens - found).clamp(max=self.num_drafts)
        return Drafts(drafts, known.masked_fill(found < 0, 0))

    def save(self, saved: SavedSlots) -> None:
        """Nothing: a resumed request brings its tokens along."""

    def _match_ends(self, frontier: Frontier) -> Tensor:
        """Position of the token before the proposals, [B]; -1 where nothing matches."""
        tokens = self._tokens.index_select(0, frontier.slots)
        position = self._position[: frontier.kv_len]
        tokens = tokens[:, : frontier.kv_len]
        is_match = position < frontier.seq_lens[:, None]
        best = torch.full_like(frontier.seq_lens, -1)
        for length in range(1, LONGEST_MATCH + 1):
            back = length - 1
            at = (frontier.seq_lens - back).clamp(min=0)
            wanted = tokens.gather(1, at[:, None])
            shifted = tokens if back == 0 else torch.roll(tokens, back, dims=1)
            is_match = is_match & (shifted == wanted) & (position >= back)
            latest = torch.where(is_match, position, -1).amax(1)
            # a longer match, where there is one, replaces the shorter
            best = torch.where(latest >= 0, latest, best)
        return best
