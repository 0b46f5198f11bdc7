"""Requests and responses: OpenAI's fields, those that vLLM and SGLang add, and nothing else.

The types check what comes in, and the OpenAPI document is made of them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gapless.core.request import FinishReason

# continuations that one request may ask for: prompts times samples
MAX_CONTINUATIONS = 2048
MAX_STOPS = 32
MAX_STOP_CHARS = 256

Count = Annotated[int, Meta(ge=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TopCount = Annotated[int, Meta(ge=0, le=20)]


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """What a stream tells beside text."""

    include_usage: bool = False
    """Send one more chunk at the end, without choices, with the usage."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk; as vLLM."""


JsonSchema = Annotated[
    dict[str, Any] | str,
    Meta(extra_json_schema={"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
"""A JSON schema, as an object or as its text."""
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class TextFormat(Struct, tag="text", forbid_unknown_fields=True, frozen=True):
    """No grammar."""


class JsonObjectFormat(Struct, tag="json_object", forbid_unknown_fields=True, frozen=True):
    """Any JSON object."""


class JsonSchemaSpec(Struct, forbid_unknown_fields=True, frozen=True):
    """A schema that the answer is to be valid under."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    """The schema is always enforced."""


class JsonSchemaFormat(Struct, tag="json_schema", forbid_unknown_fields=True, frozen=True):
    """JSON that is valid under a schema."""

    json_schema: JsonSchemaSpec


class StructuredOutputs(Struct, forbid_unknown_fields=True, frozen=True):
    """What the answer must follow, one of these; as vLLM."""

    json: JsonSchema | None = None
    regex: str | None = None
    """A regular expression that matches the whole answer."""
    choice: Choices | None = None
    json_object: bool | None = None


class GenerationRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats and completions share; null is as good as absent.

    Where a field is absent, the checkpoint's generation_config.json decides.
    """

    model: str = ""
    """The model's name; may be left out."""
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Names the request: part of the response's id. Also the header X-Request-Id."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CONTINUATIONS)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = []
    logit_bias: dict[int, float] | None = None
    """Token ids, as strings, and what is added to their logits."""
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] = []
    skip_special_tokens: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    """Older names of structured_outputs' fields."""


MESSAGES = {
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
        },
    },
}
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema=MESSAGES)]


TOOLS = {
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                },
            },
        },
    },
}
CHOICE = {"enum": ["auto", "none", None]}  # `required` and objects need a tool


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    """Newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: TopCount | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, such as enable_thinking."""
    tools: Annotated[list[Any], Meta(extra_json_schema=TOOLS)] = []
    """Functions that the model may call."""
    tool_choice: Annotated[str | dict[str, Any] | None, Meta(extra_json_schema=CHOICE)] = None
    """`auto`; `required` or a function's name to force one call; `none` to keep the tools away."""
    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls; if not, it ends with the first."""
    separate_reasoning: bool = True
    """Give thoughts as reasoning_content; as SGLang."""


_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[str | int | list[int]], Meta(extra_json_schema=PROMPT)]
    """Text, texts, token ids, or lists of token ids."""
    max_tokens: Count | None = 16
    """Most tokens of each continuation; with echo, 0 gives the prompt alone."""
    logprobs: TopCount | None = None
    echo: bool = False


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /tokenize: a prompt or the messages of a chat."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    """Whether a prompt gets what the tokenizer puts around text."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /detokenize."""

    model: str = ""
    tokens: list[int]
    skip_special_tokens: bool = False


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /abort: a request's id, its own part of it, or all."""

    request_id: str | None = None
    abort_all: bool = False


class PromptTokensDetails(Struct, frozen=True):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, frozen=True):
    """A token with its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """Of a choice's, or a chunk's, tokens."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct, frozen=True):
    """Of a choice's, or a chunk's, tokens, in lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(Struct, frozen=True):
    """A function with its arguments."""

    name: str
    arguments: str
    """A JSON object."""


class CalledFunctionDelta(Struct, frozen=True, omit_defaults=True):
    """The next piece of the arguments; with the first, the name."""

    arguments: str
    name: str | None = None


class ToolCall(Struct, frozen=True):
    """A call that the model wants made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a call."""

    index: int
    function: CalledFunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(Struct, frozen=True):
    """An answer."""

    content: str | None
    """None where there are calls and no words."""
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatFinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"


class ChatChoice(Struct, frozen=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    """The stop string or token id that ended it; as vLLM."""


class ChatResponse(Struct, frozen=True):
    """Answers of a chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct, frozen=True):
    """News of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(Struct, frozen=True):
    """An event of a chat's stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(Struct, frozen=True):
    """One continuation, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class CompletionResponse(Struct, frozen=True):
    """Continuations, or in a stream an event."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"


class Model(Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "gapless"


class ModelList(Struct, frozen=True):
    """All models that are served."""

    data: list[Model]
    object: Literal["list"] = "list"


class TokenizeResponse(Struct, frozen=True):
    """Token ids of a prompt."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(Struct, frozen=True):
    """Text of token ids."""

    prompt: str


class AbortResponse(Struct, frozen=True):
    """How many requests were ended."""

    num_aborted: int


class FlushCacheResponse(Struct, frozen=True):
    """How many tokens were forgotten."""

    num_tokens: int


class Status(Struct, frozen=True):
    """How the server is."""

    status: Literal["loading", "ready", "draining"]
