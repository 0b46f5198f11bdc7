"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from msgspec import UNSET

from gapless.core.request import FinishReason
from gapless.server.answer import Blocks
from gapless.server.body import read_body
from gapless.server.collected import Collected, collect
from gapless.server.errors import ApiError
from gapless.server.identity import response_id
from gapless.server.logprobs import chat_logprobs
from gapless.server.sampling import check_request, sampling_params
from gapless.server.schemas import (
    CalledFunction,
    CalledFunctionDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    ToolCall,
    ToolCallDelta,
)
from gapless.server.sse import EventStream, event, usage_of_chunk
from gapless.server.talk import Chat, Talk, start
from gapless.server.toolbox import chat_tools
from gapless.text.reasoning import Reasoning
from gapless.text.tools import CallArguments, CallBegin, CallBroken, Text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from gapless.core.messages import Update
    from gapless.core.sampling_params import SamplingParams
    from gapless.server.answer import AnswerReader, Block, Event
    from gapless.server.running import Running
    from gapless.server.site import Site
    from gapless.text.tokenizer import Tokenizer


async def create(site: Site, request: Request) -> EventStream | ChatResponse:
    """Answer a chat."""
    body = await read_body(request, ChatRequest, site.options)
    site.check_model(body.model)
    check_request(body)
    params = _params(body, site.ready.default_params)
    chat = Chat(
        messages=body.messages,
        tools=chat_tools(body.tools, body.tool_choice, is_single=not body.parallel_tool_calls),
        variables=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        splits_reasoning=body.separate_reasoning,
    )
    own_id = response_id("chatcmpl", body.request_id, request)
    talk = await start(site, request, own_id, chat, params)
    answer = _Answer(site, body, own_id, talk)
    if body.stream:
        return EventStream(talk.running, answer.events())
    return await answer.whole()


def _params(body: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "top_logprobs is set and logprobs is not; set both or none",
            param="top_logprobs",
        )
    limit = body.max_completion_tokens
    return sampling_params(
        body,
        defaults,
        max_tokens=body.max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


@dataclass(frozen=True)
class _Answer:
    """The two forms of an answer."""

    site: Site
    body: ChatRequest
    own_id: str
    talk: Talk

    @property
    def running(self) -> Running:
        """The work."""
        return self.talk.running

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.site.reader.tokenizer

    async def whole(self) -> ChatResponse:
        """Wait for the end, and return everything at once."""
        choices = await collect(self.running, self.body.n)
        return ChatResponse(
            id=self.own_id,
            created=int(time.time()),
            model=self.site.model_name,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=self.running.usage,
        )

    def _choice(self, index: int, choice: Collected) -> ChatChoice:
        asked = self.body.logprobs
        reader, blocks = self.talk.readers[index], Blocks()
        blocks.add(reader.read(choice.text, is_last=True))
        return ChatChoice(
            index=index,
            message=_message(blocks.whole),
            logprobs=chat_logprobs(self._tokenizer, choice.logprobs) if asked else None,
            finish_reason=_finish_reason(choice.finish_reason, reader),
            stop_reason=choice.stop_reason,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield chunks as they come."""
        created, options = int(time.time()), self.body.stream_options
        silent = set(range(self.body.n))

        def chunk(*choices: ChatChunkChoice) -> bytes:
            usage = usage_of_chunk(options, self.running.usage, is_last=not choices)
            model = self.site.model_name
            return event(ChatChunk(self.own_id, created, model, list(choices), usage))

        writers = [_DeltaWriter() for _ in range(self.body.n)]
        while updates := await self.running.take():
            events = []
            for update in updates:
                index = self.running.choice(update)
                news = self._news(index, update, writers[index])
                if not news:
                    continue
                if index in silent:
                    silent.remove(index)
                    events.append(chunk(ChatChunkChoice(index, ChatDelta("assistant", ""))))
                events += [chunk(choice) for choice in news]
            if events:
                yield b"".join(events)
        if options is not None and options.include_usage:
            yield chunk()

    def _news(self, index: int, update: Update, writer: _DeltaWriter) -> list[ChatChunkChoice]:
        """Return what an update has to send; text may be held back."""
        deltas = [
            delta for event in self.talk.read(update) if (delta := writer.delta(event)) is not None
        ]
        logprobs, finish = None, None
        if self.body.logprobs and update.logprobs:
            logprobs = chat_logprobs(self._tokenizer, update.logprobs)
        if update.finish_reason is not None:
            finish = _finish_reason(update.finish_reason, self.talk.readers[index])
        if not deltas:
            if logprobs is None and finish is None:
                return []
            deltas = [ChatDelta(content="")]
        last = len(deltas) - 1
        return [
            ChatChunkChoice(
                index,
                delta,
                # once, though the tokens may be those of several deltas
                logprobs if place == 0 else None,
                finish if place == last else None,
                update.stop_reason if place == last else None,
            )
            for place, delta in enumerate(deltas)
        ]


class _DeltaWriter:
    """Events of one choice to what chunks carry."""

    def __init__(self) -> None:
        self._num_calls = 0

    def delta(self, event: Event) -> ChatDelta | None:
        """Return what an event adds; None for nothing."""
        match event:
            case Text(text) | CallBroken(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning_content=text)
            case CallBegin(name):
                self._num_calls += 1
                function = CalledFunctionDelta("", name)
                call = ToolCallDelta(self._num_calls - 1, function, _call_id(), "function")
                return ChatDelta(tool_calls=[call])
            case CallArguments(text):
                call = ToolCallDelta(self._num_calls - 1, CalledFunctionDelta(text))
                return ChatDelta(tool_calls=[call])
        return None


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _message(blocks: list[Block]) -> ChatMessage:
    texts = [block.text for block in blocks if block.kind == "text"]
    thoughts = [block.text for block in blocks if block.kind == "reasoning"]
    calls = [
        ToolCall(f"call_{block.id}", CalledFunction(block.name, block.text))
        for block in blocks
        if block.kind == "call"
    ]
    return ChatMessage(
        content=None if calls and not texts else "".join(texts),
        reasoning_content="".join(thoughts) if thoughts else UNSET,
        tool_calls=calls or UNSET,
    )


def _finish_reason(reason: FinishReason, reader: AnswerReader) -> ChatFinishReason:
    if reader.has_calls and reason is FinishReason.STOP:
        return ChatFinishReason.TOOL_CALLS
    return ChatFinishReason(reason.value)
