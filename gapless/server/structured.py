"""The grammar that a request's fields ask for: OpenAI's response_format, and vLLM's fields."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from gapless.core.grammar import Grammar
from gapless.server.errors import ApiError
from gapless.server.schemas import JsonObjectFormat, JsonSchemaFormat

if TYPE_CHECKING:
    from gapless.server.schemas import GenerationRequest


def requested_grammar(request: GenerationRequest) -> Grammar | None:
    """Return what the output must follow, None if nothing.

    Raises:
        ApiError: more than one thing is asked for.
        InvalidRequest: see `Grammar`.
    """
    asked: dict[str, Grammar] = {}
    match request.response_format:
        case JsonObjectFormat():
            asked["response_format"] = Grammar.json_object()
        case JsonSchemaFormat(json_schema=spec):
            asked["response_format"] = Grammar.json_schema(spec.schema)
    own = request.structured_outputs
    if own is not None:
        if own.json is not None:
            asked["structured_outputs.json"] = Grammar.json_schema(own.json)
        if own.regex is not None:
            asked["structured_outputs.regex"] = Grammar.regex(own.regex)
        if own.choice is not None:
            asked["structured_outputs.choice"] = Grammar.choice(own.choice)
        if own.json_object:
            asked["structured_outputs.json_object"] = Grammar.json_object()
    if request.guided_json is not None:
        asked["guided_json"] = Grammar.json_schema(request.guided_json)
    if request.guided_regex is not None:
        asked["guided_regex"] = Grammar.regex(request.guided_regex)
    if request.guided_choice is not None:
        asked["guided_choice"] = Grammar.choice(request.guided_choice)
    if len(asked) > 1:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"{' and '.join(asked)} are set; an output follows one grammar: set one of them",
            param=list(asked)[1],
        )
    return next(iter(asked.values()), None)
