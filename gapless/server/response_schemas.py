"""Requests and responses of /v1/responses: OpenAI's fields, without what a server would have to
remember."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gapless.server.schemas import Count, JsonObjectFormat, Probability, TextFormat

_INPUT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
            },
        },
    ]
}
_TOOLS = {
    "items": {
        "type": "object",
        "required": ["type", "name"],
        "properties": {
            "type": {"const": "function"},
            "name": {"type": "string"},
            "description": {"type": ["string", "null"]},
            "parameters": {"type": ["object", "null"]},
        },
    },
}
_CHOICE = {"enum": ["auto", "none", None]}


class JsonSchemaText(Struct, tag="json_schema", forbid_unknown_fields=True, frozen=True):
    """JSON that is valid under a schema."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    """The schema is always enforced."""


class TextOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """What the words of an answer must be."""

    format: TextFormat | JsonObjectFormat | JsonSchemaText | None = None


class ResponsesRequest(Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[str | list[Any], Meta(extra_json_schema=_INPUT)]
    """Text, or messages, earlier calls of functions and their results."""
    model: str = ""
    instructions: str = ""
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Probability | None = None
    tools: Annotated[list[dict[str, Any]], Meta(extra_json_schema=_TOOLS)] = []
    tool_choice: Annotated[str | dict[str, Any], Meta(extra_json_schema=_CHOICE)] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()


class InputTokensDetails(Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: Count


class OutputTokensDetails(Struct, frozen=True):
    """Of the answer's tokens; thoughts are not counted apart."""

    reasoning_tokens: Count = 0


class ResponseUsage(Struct, frozen=True):
    """Tokens of a request."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(Struct, frozen=True):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseError(Struct, frozen=True):
    """What ended an answer early."""

    code: str
    message: str


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    """Words."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Thoughts."""

    text: str


ItemStatus = Literal["in_progress", "completed"]


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    """A message to the reader."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = []


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that the model wants made."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | FunctionCallItem


class ResponsesResponse(Struct, frozen=True, kw_only=True):
    """An answer."""

    id: str
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[Item]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    object: Literal["response"] = "response"
    store: Literal[False] = False
    previous_response_id: None = None
    metadata: dict[str, str] = {}
