"""A request as the scheduler sees it: its tokens, what it holds, and how far it has come."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from gapless.core.counters import DecodeCounters

if TYPE_CHECKING:
    from gapless.core.grammar import GrammarState
    from gapless.core.sampling_params import SamplingParams


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # holds nothing; in the waiting queue (new, or retracted)
    PREFILL = "prefill"  # holds slot, row and pages; not all of its tokens are launched
    DECODE = "decode"  # every token up to its newest is launched; a row of each decode step
    FINISHED = "finished"  # holds nothing; its final delta has been made


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence to continue. Identity is the object: results are matched to it, never to a slot.

    `token_ids` is prompt and output together; the scheduler alone appends to it.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """64-bit noise seed, drawn by the engine where the user gave none."""
    stop_ids: tuple[int, ...]
    """Ids that end the request: its own and, unless ignored, the model's; at most MAX_STOP_IDS."""
    limit_len: int
    """Total tokens (prompt and output) at which the request ends."""
    wants_prompt_logprobs: bool = False
    """Whether prefill returns the log-probability of each prompt token after the first, and of
    `params.prompt_logprobs` most likely ones beside it."""
    message_end: int | None = None
    """Prompt tokens before the generation prompt of a chat: where its next turn may branch off."""
    grammar: GrammarState | None = None
    """How far the output has come in `params.grammar`; only the engine's own rank has it."""

    token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1
    state_row: int = -1
    pages: list[int] = field(default_factory=list)
    covered_len: int = -1
    """Committed length up to which `pages` are enough for the next decode step."""
    committed_len: int = 0
    """Of a request that runs: tokens whose KV and state are final, as far as the host has read, and
    those of prefill that is launched. The newest token of one that decodes is never among them."""
    finish_reason: FinishReason | None = None
    checkpoint_len: int = 0
    """The device's checkpoint length after the last step that was read."""
    windows: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Decode rows that were read, by tokens emitted and drafts proposed."""
    num_flushes: int = 0
    ring_entries: int = 0
    """As in `DecodeCounters`, of those rows."""
    cached_len: int = 0
    """Prompt tokens that the prefix cache spared the request when it was first admitted."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_ids)

    @property
    def counters(self) -> DecodeCounters:
        """What decoding and speculation did for the request so far."""
        counters = DecodeCounters(num_flushes=self.num_flushes, ring_entries=self.ring_entries)
        for (emitted, proposed), num_rows in self.windows.items():
            counters.record(emitted, proposed, num_rows)
        return counters

    @property
    def has_private_prefix(self) -> bool:
        """Whether every token must be run, so that nothing cached can stand for it."""
        return self.wants_prompt_logprobs

    @property
    def is_constrained(self) -> bool:
        """Whether each step must know the tokens of all before it, since a grammar does."""
        return self.params.grammar is not None

    @property
    def num_output(self) -> int:
        """Tokens generated and read so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated and read so far, in order."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def min_len(self) -> int:
        """Total length below which stop ids are masked."""
        return len(self.prompt_ids) + self.params.min_tokens
