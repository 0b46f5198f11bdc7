"""Requests and responses of /v1/messages: Anthropic's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gapless.server.schemas import MAX_STOPS, StopString

_TEXTS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    },
}
_TEXT = {"anyOf": [{"type": "string"}, _TEXTS]}
_TURNS = {
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT},
    },
}
_TOOLS = {
    "items": {
        "type": "object",
        "required": ["name", "input_schema"],
        "properties": {
            "name": {"type": "string"},
            "description": {"type": "string"},
            "input_schema": {"type": "object"},
        },
    },
}


class Thinking(Struct, frozen=True):
    """Whether the model thinks first; the budget is the model's own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: str = ""
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema=_TURNS)]
    system: Annotated[str | list[Any], Meta(extra_json_schema=_TEXT)] = ""
    tools: Annotated[list[dict[str, Any]], Meta(extra_json_schema=_TOOLS)] = []
    tool_choice: dict[str, Any] | None = None
    """`type` is `auto`, `any`, `tool` with a `name`, or `none`; `disable_parallel_tool_use`."""
    thinking: Thinking | None = None
    """Sets the chat template's `enable_thinking`; by default the template decides."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool = False
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = []
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None


class CountTokensResponse(Struct, frozen=True):
    """Tokens of a prompt."""

    input_tokens: int


class MessageUsage(Struct, frozen=True):
    """Tokens of a request."""

    input_tokens: int
    """Those that had to be computed."""
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    """Words."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """Thoughts."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model wants made."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class MessagesResponse(Struct, frozen=True):
    """An answer."""

    id: str
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
