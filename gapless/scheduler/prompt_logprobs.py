"""Log-probabilities of prompts, gathered over the segments of their prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.request import Request, Status

if TYPE_CHECKING:
    from gapless.core.plan import LogprobRow, StepPlan, StepResult


class PromptLogprobs:
    """What has been read of each prompt; a prefill that starts over adds nothing twice."""

    def __init__(self) -> None:
        # entry i belongs to prompt token i + 1
        self._read: dict[Request, list[LogprobRow]] = {}

    @property
    def requests(self) -> set[Request]:
        """Requests of which something was read and not handed over."""
        return set(self._read)

    def collect(self, plan: StepPlan, result: StepResult) -> None:
        """Keep what a step says of prompts whose first output token is unread.

        Call it before the step's tokens are appended.
        """
        if not result.prompt_logprobs:
            return
        for segment, logprobs in zip(plan.prefill, result.prompt_logprobs, strict=True):
            request = segment.request
            has_delivered = request.num_output > 0 or request.status is Status.FINISHED
            if logprobs is None or not request.wants_prompt_logprobs or has_delivered:
                continue
            read = self._read.setdefault(request, [])
            assert segment.start <= len(read), (
                f"{request.request_id}: logprobs from {segment.start}, {len(read)} are read"
            )
            values = logprobs.tolist()[len(read) - segment.start :]
            read += values[: len(request.prompt_ids) - 1 - len(read)]

    def take(self, request: Request) -> tuple[LogprobRow, ...]:
        """Hand over what was read of a prompt, and forget it."""
        return tuple(self._read.pop(request, ()))
