"""What the engine and its callers tell each other about requests.

The types travel between processes too, so their annotations can be resolved at run time.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

# ruff: noqa: TC001 (annotations are read at run time)
from gapless.core.counters import CacheCounters, DecodeCounters, LoopCounters, WaitReason
from gapless.core.request import FinishReason
from gapless.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class Submission:
    """A prompt to continue."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    message_end: int | None = None
    """That of `text.chat.EncodedPrompt`: a state is kept there for the chat's next turn."""


@dataclass(frozen=True)
class Usage:
    """Tokens that a request cost; completion tokens are those of all its completions."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache had, so that they were not computed again; of several
    completions, those of the first."""

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class TokenLogprob:
    """A token's natural log-probability under the model, given all tokens before it.

    Of the model's own logits: before bias, penalties, temperature and filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and theirs, as many as asked for, largest first, ties lowest id
    first; the token itself may be one of them."""


@dataclass(frozen=True)
class Completion:
    """One finished continuation of a prompt."""

    index: int
    """Which of the request's `n`."""
    text: str
    token_ids: tuple[int, ...]
    """Tokens generated, the one that ended them included."""
    finish_reason: FinishReason
    counters: DecodeCounters
    """What decoding and speculation did for it."""
    stop_reason: str | int | None = None
    """The stop string or token id that ended the text, if one did."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per token of `token_ids`; None where they were not asked for."""


@dataclass(frozen=True)
class GenerationResult:
    """Everything that came of one prompt. The properties speak of the first completion."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One per prompt token, None for the first; None where they were not asked for."""

    @property
    def text(self) -> str:
        """Generated text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation ended."""
        return self.completions[0].finish_reason


class Update(Struct, frozen=True, omit_defaults=True):
    """News of one continuation; the one with a finish reason is its last."""

    request_id: str
    index: int
    text: str
    """Text that became final with these tokens."""
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    counters: DecodeCounters | None = None
    """What decoding and speculation did for the continuation; with its last update."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared the continuation; with its last update."""
    queue_seconds: float = 0.0
    """Time that the continuation waited before it first ran; with its last update."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One per token of `token_ids`; None where they were not asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One per prompt token after the first: with the first token of a prompt's first continuation,
    if asked for."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine holds at one moment, and has done since its start."""

    num_running: int
    num_waiting: int
    wait_reason: WaitReason | None
    """Why the first in the queue was not admitted at the last step."""
    num_pages: int
    num_free_pages: int
    """Pages that neither requests nor the prefix cache hold."""
    num_state_rows: int
    num_free_rows: int
    decode: DecodeCounters
    cache: CacheCounters
    loop: LoopCounters
