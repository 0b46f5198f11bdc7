"""What one step will do, decided on the host with integers; and what came of it.

What is made for each row of each step is a `Struct`: a frozen dataclass takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from gapless.core.request import FinishReason, Request

if TYPE_CHECKING:
    import numpy as np

LogprobRow = Sequence[float]
"""A row of `StepResult`'s log-probabilities."""


@dataclass(frozen=True)
class Snapshot:
    """A row of the state pool that is to hold a sequence's state at one position.

    Recurrent state, convolution tail and last hidden state are all those of `position`.
    """

    position: int
    row: int


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
    resumed_row: int | None = None
    """The snapshot that the segment starts from, which is then the first of a request that found
    its prefix cached; None: the slot's own state."""
    snapshots: tuple[Snapshot, ...] = ()
    """States to store on the way, `start < position <= end`, ascending."""
    is_first: bool = True
    """Whether the request was admitted with this segment; tokens before `start` were cached."""


@dataclass(frozen=True)
class SlotSave:
    """What a slot holds at `position`, stored in a row: its own, or another.

    The position is one that the slot can still give: from its checkpoint to its committed length.
    """

    slot: int
    position: int
    row: int


@dataclass(frozen=True)
class PageCopy:
    """A page copied whole, in every layer: the new owner overwrites what it does not share."""

    source: int
    target: int


class DecodeRow(Struct, frozen=True):
    """One slot's window in this step's decode batch."""

    request: Request
    slot: int


class PageEntry(Struct, frozen=True):
    """`page_table[slot, index] = page`, written before the decode step runs."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True)
class Transfer:
    """A cached key between the device's pools and the host's: pages in pairs, and its snapshot."""

    device_pages: tuple[int, ...]
    host_pages: tuple[int, ...]
    device_row: int | None = None
    host_row: int | None = None
    """Both rows or neither."""


@dataclass(frozen=True)
class StepPlan:
    """One step: saves, loads, page copies, at most one prefill chunk, at most one decode step.

    A request whose last segment is in `prefill` may also be a row of `decode`. Rows and pages that
    one part gives up may belong to another owner in the next: the order is the ownership.
    """

    step_id: int
    prefill: tuple[PrefillSegment, ...]
    decode: tuple[DecodeRow, ...]
    page_entries: tuple[PageEntry, ...]
    max_seq_len: int
    """Upper bound of `seq_lens` over the decode rows when the decode step starts."""
    saves: tuple[SlotSave, ...] = ()
    loads: tuple[Transfer, ...] = ()
    """From the host."""
    stores: tuple[Transfer, ...] = ()
    """To the host, begun after saves and loads and running beside this step and later ones; their
    pages and rows stay as they are until `StepResult.num_stored` says that they have arrived."""
    awaits_stores: bool = False
    """Whether the result is to wait for all stores under way: they lock what a request needs."""
    page_copies: tuple[PageCopy, ...] = ()
    """Read all, then write all."""

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
    num_stored: int = 0
    """Transfers to the host that have arrived since the start, in the order of the plans."""
    prefill_logprobs: np.ndarray | None = None
    """[len(plan.sampled), 1 + 2n] float64, a row per first token, where a request wants it: the
    token's log-probability, ids of the n most likely tokens, their log-probabilities."""
    decode_logprobs: np.ndarray | None = None
    """[len(plan.decode), W, 1 + 2n] float64: the same for `decode_tokens`."""
    prompt_logprobs: tuple[np.ndarray | None, ...] = ()
    """Per prefill segment: [end - start, 1 + 2n] float64, row i for token `start + i + 1` given all
    before it (the last row of a last segment has no token: NaN)."""


class Delta(Struct, frozen=True):
    """News of one request: tokens, and the reason if it has ended; then it is final."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[LogprobRow, ...] = ()
    """One per token, if the request wants them."""
    prompt_logprobs: tuple[LogprobRow, ...] = ()
    """One per prompt token after the first, with the first token of output."""
