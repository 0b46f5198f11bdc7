"""Fields of requests to the engine's sampling parameters."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gapless.server.errors import ApiError
from gapless.server.schemas import MAX_CONTINUATIONS
from gapless.server.structured import requested_grammar

if TYPE_CHECKING:
    from gapless.core.sampling_params import SamplingParams
    from gapless.server.schemas import GenerationRequest

# fields that mean the same here and there; where one is absent, the default stands
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def sampling_params(
    request: GenerationRequest, defaults: SamplingParams, **own: Any
) -> SamplingParams:
    """Return a request's parameters, `own` being those that its endpoint has decided on.

    Raises:
        InvalidRequest: see `SamplingParams`.
        ApiError: see `requested_grammar`.
    """
    values = {name: getattr(request, name) for name in _SAME}
    given = {name: value for name, value in values.items() if value is not None}
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    ids = tuple(request.stop_token_ids)
    grammar = requested_grammar(request)
    return replace(
        defaults, **given, n=request.n, stop=stop, stop_token_ids=ids, grammar=grammar, **own
    )


def check_request(request: GenerationRequest, num_prompts: int = 1) -> None:
    """Raise if fields contradict each other, or ask for too much together.

    Raises:
        ApiError: with status 400.
    """
    if request.stream_options is not None and not request.stream:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "stream_options is set and stream is not; set both or none",
            param="stream_options",
        )
    if num_prompts * request.n > MAX_CONTINUATIONS:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"{num_prompts} prompts with n={request.n} are {num_prompts * request.n} "
            f"continuations; want at most {MAX_CONTINUATIONS}: send several requests",
            param="n",
        )
