"""What a drafter is: it reads what a step settled, and proposes the tokens that may follow.

Its proposals are compared with the target's own samples, so they change how many tokens a step
emits and never which. Everything it keeps is addressed by slot and position, so a rejected
proposal is undone by not counting it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.layers.batch import AttentionBatch
    from gapless.layers.logits import LogitShard


class Proposer(Protocol):
    """Chooses tokens from a drafter's logits under each row's options and noise."""

    def sample(self, logits: LogitShard, positions: Tensor) -> Tensor:
        """Map `(logits of B rows, positions [B])` to tokens `[B]`, which then count as output."""
        ...

    def rank(
        self,
        logits: LogitShard,  # of B * Q rows: after Q drafts of each row
        positions: Tensor,  # [B]: position that the tokens would occupy
        paths: Tensor,  # [B, Q, N]: the drafts that lead there, which count as output
        count: int,
    ) -> tuple[Tensor, Tensor]:  # [B, Q, count] int64 and floating
        """Return the likeliest tokens, best first, and the logarithm of how likely they are."""
        ...


@dataclass(frozen=True)
class PromptChunk:
    """A prefill chunk, T packed tokens, once its S sampled segments have their first token."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    token_ids: Tensor  # [T]
    next_ids: Tensor  # [T]: the token after each, sampled ones included
    hidden: Tensor  # [T, D]: the target's post-final-norm hidden states
    last_token: Tensor  # [S]: index of each sampled segment's last token
    shifted: ShiftedChunk
    past: PastTokens
    kept: KeptTokens


@dataclass(frozen=True)
class ShiftedChunk:
    """A prefill chunk one position later, T + E tokens, for KV of (hidden before, token).

    The first position of each of the E resumed segments is among them: the hidden state before it
    is the snapshot's, and what a cached page holds there belongs to another continuation.
    """

    batch: AttentionBatch  # over KV that begins at 1
    order: Tensor  # [T + E]: which of the chunk's tokens stands before; T + e: the snapshot e
    resumed_rows: Tensor  # [E]: state rows of the snapshots
    resumed_ids: Tensor  # [E]: the tokens after them
    last_token: Tensor  # [S]: index of each sampled segment's last token


@dataclass(frozen=True)
class PastTokens:
    """N tokens before resumed segments; given where the drafter `reads_past`, else 0."""

    slots: Tensor  # [N]
    positions: Tensor  # [N]
    token_ids: Tensor  # [N]


@dataclass(frozen=True)
class KeptTokens:
    """Tokens of a chunk at which a later step may have to go on: hidden states to keep."""

    ends: Tensor  # [G]: index of each segment's last token
    snapshots: Tensor  # [N]: index of the token before each snapshot's position
    rows: Tensor  # [N]: their state rows


@dataclass(frozen=True)
class SavedSlots:
    """B positions of slots, each the last committed one that the host has read, and their rows."""

    slots: Tensor  # [B]
    positions: Tensor  # [B]
    rows: Tensor  # [B]


@dataclass(frozen=True)
class Outcome:
    """A decode step once accept has settled it, B rows of W tokens; of a tree, its longest path."""

    slots: Tensor  # [B]; padded rows name the null slot
    seq_lens: Tensor  # [B]: committed length before the step
    lens: Tensor  # [B]: tokens emitted, 0 for padded rows
    tokens: Tensor  # [B, W]: emitted ones first, then what was sampled after a rejected draft
    hidden: Tensor  # [B * W, D]: the target's post-final-norm hidden states before `tokens`
    kv_len: int  # bound of the positions that drafting reaches


@dataclass(frozen=True)
class Frontier:
    """Where rows stand when drafts are wanted; rows that have ended name the null slot."""

    slots: Tensor  # [B]
    seq_lens: Tensor  # [B]: position of the newest token
    newest: Tensor  # [B]: the newest token
    kv_len: int  # bound of the positions that drafting reaches
    is_planned: bool = False  # whether the host has planned attention, as it does for decode steps


@dataclass(frozen=True)
class Drafts:
    """Proposals for the positions after the newest token, in a row or as a tree."""

    tokens: Tensor  # [B, k], valid token ids all
    counts: Tensor | None = None
    """[B]: how many of them are proposals; None is all of them, in every step."""
    bits: Tensor | None = None
    """[B, 1 + k] int64: `ancestor_bits` of the newest token and the drafts; None is a row. Children
    of one parent differ."""


class Drafter(Protocol):
    """Proposes up to `num_drafts` tokens per row and step, with device operations only."""

    num_drafts: int
    reads_past: bool
    """Whether it wants the cached tokens of a resumed request."""

    @property
    def row_memory(self) -> list[Tensor]:
        """What a snapshot holds of the drafter, row by row: [rows, ...] each."""
        ...

    def read_prompt(self, chunk: PromptChunk) -> Tensor:
        """Take in a prefill chunk; return what `draft` needs of its S sampled segments."""
        ...

    def read_window(self, outcome: Outcome) -> Tensor:
        """Take in a decode step; return what `draft` needs of its B rows."""
        ...

    def draft(self, frontier: Frontier, carry: Tensor, proposer: Proposer) -> Drafts:
        """Propose; `carry` is what a read returned."""
        ...

    def save(self, saved: SavedSlots) -> None:
        """Store in state rows what resuming at a position needs."""
        ...
