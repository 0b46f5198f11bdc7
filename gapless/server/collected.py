"""Updates of a request's choices, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gapless.core.request import FinishReason

if TYPE_CHECKING:
    from gapless.core.messages import TokenLogprob
    from gapless.server.running import Running


@dataclass
class Collected:
    """A choice that has ended."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: str | int | None = None


async def collect(running: Running, count: int) -> list[Collected]:
    """Wait until all `count` choices have ended, and let go of the work.

    Raises:
        ApiError, EngineGone: the work has been ended.
    """
    choices = [Collected() for _ in range(count)]
    pieces: list[list[str]] = [[] for _ in range(count)]
    try:
        while updates := await running.take():
            for update in updates:
                index = running.choice(update)
                choice = choices[index]
                pieces[index].append(update.text)
                choice.logprobs += update.logprobs or ()
                choice.prompt_logprobs += update.prompt_logprobs
                if update.finish_reason is not None:
                    choice.finish_reason = update.finish_reason
                    choice.stop_reason = update.stop_reason
    finally:
        running.close()
    for choice, texts in zip(choices, pieces, strict=True):
        choice.text = "".join(texts)
    return choices
