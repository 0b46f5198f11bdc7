"""What bounds requests: the sizes that they share, and the lengths at which each is over."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.cache.limits import CacheLimits
from gapless.core.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits(CacheLimits):
    """Sizes that the device's pools and tables were built for."""

    max_running_requests: int
    """Slots, the null slot apart."""
    max_model_len: int
    """Most tokens of a request, prompt and output together."""
    chunked_prefill_size: int
    """Most prompt tokens in one step."""
    replay_len: int
    """L: checkpoints stand at its multiples."""

    def __post_init__(self) -> None:
        for name in (
            "max_running_requests", "max_model_len", "num_pages", "page_size", "num_state_rows",
            "chunked_prefill_size", "max_window", "replay_len",
        ):  # fmt: skip
            value = vars(self)[name]
            assert value >= 1, f"{name}={value}: want at least 1"


def reason_to_refuse(request: Request, limits: SchedulerLimits, num_pages: int) -> str | None:
    """Why a request could never run, to be told its user; `num_pages` is the most it may need."""
    limit_len, prompt_len = request.limit_len, len(request.prompt_ids)
    if prompt_len == 0:
        return "the prompt has 0 tokens; at least 1 is needed: send a begin-of-text token"
    if prompt_len >= limit_len:
        return (
            f"the prompt has {prompt_len} tokens and the request ends at {limit_len}; "
            "at least 1 must be left to generate: shorten the prompt"
        )
    if limit_len > limits.max_model_len:
        return (
            f"prompt and output may reach {limit_len} tokens, the context holds "
            f"{limits.max_model_len}; shorten the prompt or lower max_tokens"
        )
    if num_pages > limits.num_pages:
        return (
            f"prompt and output may reach {limit_len} tokens and need {num_pages} pages, "
            f"{limits.num_pages} exist; lower max_tokens or give the cache more memory"
        )
    return None


def reason_to_end(request: Request) -> FinishReason | None:
    """Why the newest token of a request ends it, by the rule that the device follows too."""
    total_len = len(request.token_ids)
    if total_len > request.min_len and request.token_ids[-1] in request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if total_len >= request.limit_len else None
