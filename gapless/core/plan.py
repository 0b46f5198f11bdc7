"""What one step will do, decided on the host with integers; and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from gapless.core.request import FinishReason, Request

LogprobRow = Sequence[float]
"""A row of `StepResult`'s log-probabilities."""


@dataclass(frozen=True)
class PrefillSegment:
    """Tokens `[start, end)` of one request, run in this step's prefill chunk.

    The plan records slot, row and pages by value: the request may give them up before the
    step's result is read.
    """

    request: Request
    slot: int
    state_row: int
    pages: tuple[int, ...]
    """The slot's whole page-table row at this step; entries past it name the null page."""
    start: int
    end: int
    is_last: bool
    """Whether `end` is the request's newest token, so that the step samples the next one."""


@dataclass(frozen=True)
class DecodeRow:
    """One slot's window in this step's decode batch."""

    request: Request
    slot: int


@dataclass(frozen=True)
class PageEntry:
    """`page_table[slot, index] = page`, written before the decode step runs."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True)
class StepPlan:
    """One step: at most one prefill chunk, then at most one decode step.

    A request whose last segment is in `prefill` may also be a row of `decode`.
    """

    step_id: int
    prefill: tuple[PrefillSegment, ...]
    decode: tuple[DecodeRow, ...]
    page_entries: tuple[PageEntry, ...]
    max_seq_len: int
    """Upper bound of `seq_lens` over the decode rows when the decode step starts."""

    @property
    def sampled(self) -> tuple[PrefillSegment, ...]:
        """Prefill segments that emit a token."""
        return tuple(segment for segment in self.prefill if segment.is_last)


@dataclass(frozen=True)
class StepResult:
    """Tokens emitted by a step, in the order of its plan."""

    prefill_tokens: np.ndarray
    """[len(plan.sampled)] int32: the first token of each sampled segment."""
    decode_tokens: np.ndarray
    """[len(plan.decode), W] int32; row i is valid up to `decode_lens[i]`."""
    decode_lens: np.ndarray
    """[len(plan.decode)] int32; 0 for a row that was done when the step started."""
    decode_proposed: np.ndarray
    """[len(plan.decode)] int32: drafts that the row's window held."""
    prefill_logprobs: np.ndarray | None = None
    """[len(plan.sampled), 1 + 2n] float64, a row per first token, where a request wants it: the
    token's log-probability, ids of the n most likely tokens, their log-probabilities."""
    decode_logprobs: np.ndarray | None = None
    """[len(plan.decode), W, 1 + 2n] float64: the same for `decode_tokens`."""
    prompt_logprobs: tuple[np.ndarray | None, ...] = ()
    """Per prefill segment: [end - start, 1 + 2n] float64, row i for token `start + i + 1` given all
    before it (the last row of a last segment has no token: NaN)."""


@dataclass(frozen=True)
class Delta:
    """News of one request: tokens, and the reason if it has ended; then it is final."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[LogprobRow, ...] = ()
    """One per token, if the request wants them."""
    prompt_logprobs: tuple[LogprobRow, ...] = ()
    """One per prompt token after the first, with the first token of output."""
