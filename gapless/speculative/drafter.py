"""What a drafter is: it reads what a step settled, and proposes the tokens that may follow.

Its proposals are compared with the target's own samples, so they change how many tokens a step
emits and never which. Everything it keeps is addressed by slot and position, so a rejected
proposal is undone by not counting it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from gapless.layers.batch import AttentionBatch

SampleAt = Callable[[Tensor, Tensor], Tensor]
"""`(logits [B, V], positions [B]) -> tokens [B]`, under each row's options and noise."""


@dataclass(frozen=True)
class PromptChunk:
    """A prefill chunk, T packed tokens, once its S sampled segments have their first token."""

    slots: Tensor  # [T]
    positions: Tensor  # [T]
    token_ids: Tensor  # [T]
    next_ids: Tensor  # [T]: the token after each, sampled ones included
    hidden: Tensor  # [T, D]: the target's post-final-norm hidden states
    shifted: AttentionBatch  # the same tokens one position later, over KV that begins at 1
    last_token: Tensor  # [S]: index of each sampled segment's last token


@dataclass(frozen=True)
class Outcome:
    """A decode step once accept has settled it, B rows of W tokens."""

    slots: Tensor  # [B]; padded rows name the null slot
    seq_lens: Tensor  # [B]: committed length before the step
    lens: Tensor  # [B]: tokens emitted, 0 for padded rows
    tokens: Tensor  # [B, W]: emitted ones first, then what was sampled after a rejected draft
    hidden: Tensor  # [B * W, D]: the target's post-final-norm hidden states
    kv_len: int  # bound of the positions that drafting reaches


@dataclass(frozen=True)
class Frontier:
    """Where rows stand when drafts are wanted; rows that have ended name the null slot."""

    slots: Tensor  # [B]
    seq_lens: Tensor  # [B]: position of the newest token
    newest: Tensor  # [B]: the newest token
    kv_len: int  # bound of the positions that drafting reaches


@dataclass(frozen=True)
class Drafts:
    """Proposals for the positions after the newest token."""

    tokens: Tensor  # [B, k], valid token ids all
    counts: Tensor  # [B]: how many of them are proposals


class Drafter(Protocol):
    """Proposes up to `num_drafts` tokens per row and step, with device operations only."""

    num_drafts: int

    def read_prompt(self, chunk: PromptChunk) -> Tensor:
        """Take in a prefill chunk; return what `draft` needs of its S sampled segments."""
        ...

    def read_window(self, outcome: Outcome) -> Tensor:
        """Take in a decode step; return what `draft` needs of its B rows."""
        ...

    def draft(self, frontier: Frontier, carry: Tensor, sample: SampleAt) -> Drafts:
        """Propose; `carry` is what a read returned."""
        ...
