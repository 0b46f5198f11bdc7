"""A continuation under way: tokens in, text and log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.core.messages import TokenLogprob, Update
from gapless.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.plan import Delta, LogprobRow
    from gapless.core.request import Request
    from gapless.text.detokenizer import Detokenizer


@dataclass
class Continuation:
    """One of the texts that a client's request is continued by."""

    request: Request
    request_id: str
    """The client's request, of which this is number `index`."""
    index: int
    detokenizer: Detokenizer
    submitted_at: float
    """`time.perf_counter` when it was queued."""
    queue_seconds: float = 0.0

    def read(self, delta: Delta) -> Update:
        """Turn the news of its tokens into those of its text.

        They may end it where the delta does not: by a stop string, which only the text shows.
        """
        request, reason, tokens = self.request, delta.finish_reason, delta.token_ids
        ended_by: str | int | None = None
        if reason is FinishReason.STOP:
            # the id that ends a text is no part of it
            ended_by = tokens[-1]
            found = self.detokenizer.push(tokens[:-1])
        else:
            found = self.detokenizer.push(tokens)
        text = found.text
        if found.stop is not None:
            reason, ended_by, tokens = FinishReason.STOP, found.stop, tokens[: found.num_tokens]
        logprobs = _logprobs(request, tokens, delta)
        if reason is None:
            return Update(
                self.request_id,
                self.index,
                text,
                tokens,
                logprobs=logprobs,
                prompt_logprobs=_prompt_logprobs(delta),
            )
        return Update(
            self.request_id,
            self.index,
            text + self.detokenizer.flush(),
            tokens,
            finish_reason=reason,
            stop_reason=ended_by,
            error=delta.error,
            counters=request.counters,
            cached_tokens=request.cached_len,
            queue_seconds=self.queue_seconds,
            logprobs=logprobs,
            prompt_logprobs=_prompt_logprobs(delta),
        )


def _logprobs(
    request: Request, tokens: Sequence[int], delta: Delta
) -> tuple[TokenLogprob, ...] | None:
    """Log-probabilities of the first of a delta's tokens, those that `tokens` keeps."""
    count = request.params.logprobs
    if count is None:
        return None
    return tuple(
        _token_logprob(token_id, row, count)
        for token_id, row in zip(tokens, delta.logprobs, strict=False)
    )


def _prompt_logprobs(delta: Delta) -> tuple[TokenLogprob, ...]:
    if not delta.prompt_logprobs:
        return ()
    count = delta.request.params.prompt_logprobs or 0
    prompt_ids = delta.request.prompt_ids[1:]
    return tuple(
        _token_logprob(token_id, row, count)
        for token_id, row in zip(prompt_ids, delta.prompt_logprobs, strict=False)
    )


def _token_logprob(token_id: int, row: LogprobRow, count: int) -> TokenLogprob:
    """Unpack a row and keep `count` of its most likely tokens."""
    num_top = len(row) // 2
    ids, values = row[1 : 1 + count], row[1 + num_top : 1 + num_top + count]
    top = tuple((int(top_id), value) for top_id, value in zip(ids, values, strict=True))
    return TokenLogprob(token_id, row[0], top)
