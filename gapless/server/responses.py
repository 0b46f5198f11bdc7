"""POST /v1/responses: OpenAI's newer API, as far as it needs no memory of earlier answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from gapless.core.grammar import Grammar
from gapless.core.request import FinishReason
from gapless.server.answer import Blocks
from gapless.server.body import read_body
from gapless.server.errors import wrong
from gapless.server.identity import response_id
from gapless.server.response_schemas import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    ItemStatus,
    JsonSchemaText,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from gapless.server.schemas import JsonObjectFormat
from gapless.server.sse import EventStream, named_event
from gapless.server.talk import Chat, Talk, start, whole_answer
from gapless.server.toolbox import checked_function, chosen

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.requests import Request

    from gapless.core.messages import Update
    from gapless.core.sampling_params import SamplingParams
    from gapless.server.answer import Block, Step
    from gapless.server.errors import ApiError
    from gapless.server.site import Site
    from gapless.server.toolbox import Toolset

_TEXT_KINDS = ("input_text", "output_text", "reasoning_text", "text")


async def create(site: Site, request: Request) -> EventStream | ResponsesResponse:
    """Answer a chat in the form of OpenAI's responses."""
    body = await read_body(request, ResponsesRequest, site.options)
    site.check_model(body.model)
    params = _params(body, site.ready.default_params)
    chat = Chat(messages=_messages(body), tools=_tools(body))
    own_id = response_id("resp", None, request)
    talk = await start(site, request, own_id, chat, params)
    answer = _Answer(site.model_name, own_id, body, params, talk)
    if body.stream:
        events = answer.events()
        return EventStream(talk.running, events, last=b"", say_error=answer.error_event)
    blocks, ended = await whole_answer(talk)
    return answer.finished(blocks, ended.update)


def _params(body: ResponsesRequest, defaults: SamplingParams) -> SamplingParams:
    given = {
        name: value
        for name in ("temperature", "top_p")
        if (value := getattr(body, name)) is not None
    }
    grammar = None
    match body.text.format:
        case JsonObjectFormat():
            grammar = Grammar.json_object()
        case JsonSchemaText(schema=schema):
            grammar = Grammar.json_schema(schema)
    return replace(defaults, **given, max_tokens=body.max_output_tokens, grammar=grammar)


def _tools(body: ResponsesRequest) -> Toolset:
    functions = []
    for index, tool in enumerate(body.tools):
        if tool.get("type") != "function":
            kind = tool.get("type")
            raise wrong(f"tools[{index}].type", f"is {kind!r}; want 'function', the only one here")
        functions.append(checked_function(f"tools[{index}]", tool))
    choice: Any = body.tool_choice
    match choice:
        case {"type": "function", "name": str(name)}:
            choice = {"name": name}
    return chosen(functions, choice, is_single=not body.parallel_tool_calls)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as chat messages: what the model said between two others is one."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not body.input:
        raise wrong("input", "is empty; want text or items")
    turn: dict[str, Any] | None = None
    for index, item in enumerate(body.input):
        message = _message(f"input[{index}]", item)
        if message["role"] != "assistant":
            turn = None
        elif turn is not None and "content" not in turn.keys() & message.keys():
            calls = turn.get("tool_calls", []) + message.get("tool_calls", [])
            turn |= message
            if calls:
                turn["tool_calls"] = calls
            continue
        else:
            turn = message
        messages.append(message)
    for message in messages:
        if not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _message(where: str, item: Any) -> dict[str, Any]:
    match item:
        case {"type": "function_call", "call_id": str(call), "name": str(name),
              "arguments": str(arguments)}:  # fmt: skip
            function = {"name": name, "arguments": arguments}
            calls = [{"id": call, "type": "function", "function": function}]
            return {"role": "assistant", "tool_calls": calls}
        case {"type": "function_call_output", "call_id": str(call), "output": output}:
            content = _text(f"{where}.output", output)
            return {"role": "tool", "tool_call_id": call, "content": content}
        case {"type": "reasoning"}:
            thoughts = _text(f"{where}.content", item.get("content") or [])
            return {"role": "assistant", "reasoning_content": thoughts}
        case {"role": str(role), "content": content} if item.get("type", "message") == "message":
            return {"role": role, "content": _text(f"{where}.content", content)}
    raise wrong(where, "is no message, function_call, function_call_output or reasoning item")


def _text(where: str, content: Any) -> str:
    """Return content as text; nothing is ever fetched for it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, f"is a {type(content).__name__}; want text")
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in _TEXT_KINDS:
                texts.append(text)
            case _:
                raise wrong(f"{where}[{index}]", "is no text, which is all that this model reads")
    return "\n".join(texts)


def _item(block: Block, status: ItemStatus) -> Item:
    """Return a block as an item; one in progress is empty."""
    has_text = status == "completed"
    match block.kind:
        case "text":
            words = [OutputText(block.text)] if has_text else []
            return MessageItem(f"msg_{block.id}", status, words)
        case "reasoning":
            thoughts = [ReasoningText(block.text)] if has_text else []
            return ReasoningItem(f"rs_{block.id}", status, thoughts)
    text = block.text if has_text else ""
    return FunctionCallItem(f"fc_{block.id}", status, f"call_{block.id}", block.name, text)


@dataclass(frozen=True)
class _Answer:
    """The two forms of an answer."""

    model_name: str
    own_id: str
    body: ResponsesRequest
    params: SamplingParams
    talk: Talk
    created: int = field(default_factory=lambda: int(time.time()))
    numbers: count[int] = field(default_factory=count)
    """Of the events."""

    def finished(self, blocks: Blocks, last: Update) -> ResponsesResponse:
        """Return the answer as it is at its end."""
        usage, reason = self.talk.running.usage, last.finish_reason
        whole = _with(
            self._begun(),
            status="completed",
            output=[_item(block, "completed") for block in blocks.whole],
            usage=ResponseUsage(
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.total_tokens,
                InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            ),
        )
        if reason is FinishReason.LENGTH:
            details = IncompleteDetails("max_output_tokens")
            return _with(whole, status="incomplete", incomplete_details=details)
        return _with(whole, status="cancelled") if reason is FinishReason.ABORT else whole

    def _begun(self) -> ResponsesResponse:
        body = self.body
        return ResponsesResponse(
            id=self.own_id,
            created_at=self.created,
            status="in_progress",
            model=self.model_name,
            output=[],
            instructions=body.instructions or None,
            max_output_tokens=body.max_output_tokens,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            tools=[{"parameters": None, "strict": False, **tool} for tool in body.tools],
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events as they come."""
        begun = {"response": self._begun()}
        yield self._event("response.created", begun) + self._event("response.in_progress", begun)
        blocks, last = Blocks(), None
        while updates := await self.talk.running.take():
            steps = [step for update in updates for step in blocks.add(self.talk.read(update))]
            last = updates[-1]
            if steps:
                yield b"".join(data for step in steps for data in self._step_events(step))
        for step in blocks.finish():
            yield b"".join(self._step_events(step))
        assert last is not None, "every continuation ends with an update"
        whole = self.finished(blocks, last)
        name = "completed" if whole.status == "completed" else "incomplete"
        yield self._event(f"response.{name}", {"response": whole})

    def error_event(self, error: ApiError) -> bytes:
        """Return the event with which a stream ends early."""
        found = ResponseError(error.code or "server_error", str(error))
        failed = _with(self._begun(), status="failed", error=found)
        return self._event("response.failed", {"response": failed})

    def _event(self, name: str, value: dict[str, Any]) -> bytes:
        return named_event(name, {"sequence_number": next(self.numbers), **value})

    def _step_events(self, step: Step) -> Iterator[bytes]:
        block = step.block
        item = _item(block, "completed" if step.what == "end" else "in_progress")
        outer = {"output_index": step.index}
        inner: dict[str, Any] = {**outer, "item_id": item.id}
        kind = block.kind
        if kind != "call":
            inner["content_index"] = 0
        # what OpenAI's clients insist on
        more: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        match step.what:
            case "begin":
                yield self._event("response.output_item.added", {**outer, "item": item})
                if kind != "call":
                    part = _PARTS[kind]("")
                    yield self._event("response.content_part.added", {**inner, "part": part})
            case "grow":
                delta = {**inner, "delta": step.piece, **more}
                yield self._event(f"response.{_NAMES[kind]}.delta", delta)
            case _ if block.is_broken:
                return
            case _ if kind == "call":
                done = {**inner, "name": block.name, "arguments": block.text}
                yield self._event(f"response.{_NAMES[kind]}.done", done)
                yield self._event("response.output_item.done", {**outer, "item": item})
            case _:
                done = {**inner, "text": block.text, **more}
                yield self._event(f"response.{_NAMES[kind]}.done", done)
                part = _PARTS[kind](block.text)
                yield self._event("response.content_part.done", {**inner, "part": part})
                yield self._event("response.output_item.done", {**outer, "item": item})


_NAMES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
_PARTS = {"text": OutputText, "reasoning": ReasoningText}


def _with(response: ResponsesResponse, **changes: Any) -> ResponsesResponse:
    return msgspec.structs.replace(response, **changes)
