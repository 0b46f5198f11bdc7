"""POST /v1/messages: Anthropic's API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gapless.core.request import FinishReason
from gapless.server.answer import Blocks
from gapless.server.body import read_body
from gapless.server.errors import wrong
from gapless.server.identity import response_id
from gapless.server.message_schemas import (
    CountTokensRequest,
    CountTokensResponse,
    MessagesRequest,
    MessagesResponse,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from gapless.server.prompts import part_text, text_of
from gapless.server.sse import EventStream, named_event
from gapless.server.talk import Chat, Ended, Talk, encode, start, whole_answer
from gapless.server.toolbox import Toolset, checked_function, chosen

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.requests import Request

    from gapless.core.sampling_params import SamplingParams
    from gapless.server.answer import Block, Step
    from gapless.server.errors import ApiError
    from gapless.server.site import Site

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


async def create(site: Site, request: Request) -> EventStream | MessagesResponse:
    """Answer a chat in Anthropic's form."""
    body = await read_body(request, MessagesRequest, site.options)
    site.check_model(body.model)
    params = _params(body, site.ready.default_params)
    own_id = response_id("msg", None, request)
    talk = await start(site, request, own_id, _chat(body), params)
    if body.stream:
        events = _Stream(site, own_id, talk).events()
        return EventStream(talk.running, events, last=b"", say_error=_error_event)
    blocks, ended = await whole_answer(talk)
    return MessagesResponse(
        own_id,
        site.model_name,
        [_content(block) for block in blocks.whole],
        *_stop(ended),
        _usage(talk),
    )


async def count_tokens(site: Site, request: Request) -> CountTokensResponse:
    """Count the tokens of a chat's prompt."""
    body = await read_body(request, CountTokensRequest, site.options)
    site.check_model(body.model)
    prompt = await asyncio.to_thread(encode, site, _chat(body))
    return CountTokensResponse(len(prompt.token_ids))


def _params(body: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(body, name)) is not None
    }
    return replace(defaults, **given, max_tokens=body.max_tokens, stop=tuple(body.stop_sequences))


def _chat(body: CountTokensRequest) -> Chat:
    system = text_of("system", body.system)
    messages = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(body.messages):
        messages += _turn(f"messages[{index}]", turn)
    variables = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    return Chat(messages=messages, tools=_tools(body), variables=variables)


def _tools(body: CountTokensRequest) -> Toolset:
    functions = []
    for index, tool in enumerate(body.tools):
        where = f"tools[{index}]"
        if tool.get("type", "custom") != "custom":
            raise wrong(f"{where}.type", f"is {tool['type']!r}; want functions of your own only")
        if not isinstance(tool.get("input_schema"), dict):
            raise wrong(f"{where}.input_schema", "is no object; want a JSON schema")
        function = {**tool, "parameters": tool["input_schema"]}
        functions.append(checked_function(where, function))
    choice: Any = {"type": "auto"} if body.tool_choice is None else body.tool_choice
    # what other APIs call these
    match choice.get("type"):
        case "tool":
            wanted: Any = {"name": choice.get("name")}
        case "any":
            wanted = "required"
        case kind:
            wanted = str(kind)
    return chosen(functions, wanted, is_single=choice.get("disable_parallel_tool_use") is True)


def _turn(where: str, turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a turn as chat messages: results of calls are messages of their own."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant"):
        raise wrong(f"{where}.role", f"is {role!r}; want 'user' or 'assistant'")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(f"{where}.content", content)}]
    if role == "assistant":
        return [_assistant_turn(f"{where}.content", content)]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(content):
        match block:
            case {"type": "tool_result"}:
                if texts:
                    messages.append({"role": "user", "content": "\n".join(texts)})
                    texts = []
                messages.append(_result(f"{where}.content[{index}]", block))
            case _:
                texts.append(part_text(f"{where}.content[{index}]", block))
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _assistant_turn(where: str, content: list[Any]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case {"type": "tool_use"}:
                raise wrong(f"{where}[{index}]", "is malformed; want `id`, `name` and `input`")
            case _:
                texts.append(part_text(f"{where}[{index}]", block))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result(where: str, block: dict[str, Any]) -> dict[str, Any]:
    call, content = block.get("tool_use_id"), block.get("content") or ""
    if not isinstance(call, str):
        raise wrong(f"{where}.tool_use_id", "is missing; want the id of a tool_use block")
    return {"role": "tool", "tool_call_id": call, "content": text_of(f"{where}.content", content)}


def _content(block: Block) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match block.kind:
        case "text":
            return TextBlock(block.text)
        case "reasoning":
            return ThinkingBlock(block.text)
    return ToolUseBlock(f"toolu_{block.id}", block.name, msgspec.Raw(block.text.encode()))


def _stop(ended: Ended) -> tuple[StopReason, str | None]:
    """Return why an answer ended, and the stop string that did it."""
    update = ended.update
    if update.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if isinstance(update.stop_reason, str):
        return "stop_sequence", update.stop_reason
    return "tool_use" if ended.has_calls else "end_turn", None


def _usage(talk: Talk) -> MessageUsage:
    usage = talk.running.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error.messages_body + b"\n\n"


@dataclass(frozen=True)
class _Stream:
    """An answer as events."""

    site: Site
    own_id: str
    talk: Talk

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events as they come."""
        empty = MessagesResponse(
            self.own_id, self.site.model_name, [], None, None, _usage(self.talk)
        )
        yield named_event("message_start", {"message": empty})
        blocks, last = Blocks(), None
        while updates := await self.talk.running.take():
            steps = [step for update in updates for step in blocks.add(self.talk.read(update))]
            last = updates[-1]
            if steps:
                yield b"".join(data for step in steps for data in _step_events(step))
        for step in blocks.finish():
            yield b"".join(_step_events(step))
        assert last is not None, "every continuation ends with an update"
        reason, sequence = _stop(Ended(last, self.talk.readers[0].has_calls))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield named_event("message_delta", {"delta": delta, "usage": _usage(self.talk)})
        yield named_event("message_stop", {})


def _step_events(step: Step) -> Iterator[bytes]:
    place = {"index": step.index}
    match step.what, step.block.kind:
        case "begin", "call":
            empty = ToolUseBlock(f"toolu_{step.block.id}", step.block.name, msgspec.Raw(b"{}"))
            yield named_event("content_block_start", {**place, "content_block": empty})
        case "begin", "text":
            yield named_event("content_block_start", {**place, "content_block": TextBlock("")})
        case "begin", _:
            yield named_event("content_block_start", {**place, "content_block": ThinkingBlock("")})
        case "grow", kind:
            name, field = _DELTAS[kind]
            delta = {"type": name, field: step.piece}
            yield named_event("content_block_delta", {**place, "delta": delta})
        case _:
            yield named_event("content_block_stop", place)


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
