"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from gapless.core.messages import Submission
from gapless.server.body import read_body
from gapless.server.collected import Collected, collect
from gapless.server.errors import ApiError
from gapless.server.identity import response_id
from gapless.server.logprobs import chat_logprobs
from gapless.server.running import Running
from gapless.server.sampling import check_request, sampling_params
from gapless.server.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatRequest,
    ChatResponse,
)
from gapless.server.sse import EventStream, event, usage_of_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from gapless.core.messages import Update
    from gapless.core.sampling_params import SamplingParams
    from gapless.server.site import Site
    from gapless.text.chat import EncodedPrompt
    from gapless.text.tokenizer import Tokenizer


async def create(site: Site, request: Request) -> EventStream | ChatResponse:
    """Answer a chat."""
    body = await read_body(request, ChatRequest, site.options)
    site.check_model(body.model)
    check_request(body)
    params = _params(body, site.ready.default_params)
    prompt = await asyncio.to_thread(_encode, site, body, params)
    own_id = response_id("chatcmpl", body.request_id, request)
    submission = Submission(own_id, tuple(prompt.token_ids), params, prompt.message_end)
    running = await Running.start(site, request, own_id, [submission])
    answer = _Answer(site, body, own_id, running)
    if body.stream:
        return EventStream(running, answer.events())
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


def _encode(site: Site, body: ChatRequest, params: SamplingParams) -> EncodedPrompt:
    reader = site.reader
    prompt = reader.chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    reader.limits.check(prompt.token_ids, params)
    return prompt


@dataclass(frozen=True)
class _Answer:
    """The two forms of an answer."""

    site: Site
    body: ChatRequest
    own_id: str
    running: Running

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
        return ChatChoice(
            index=index,
            message=ChatMessage(choice.text),
            logprobs=chat_logprobs(self._tokenizer, choice.logprobs) if asked else None,
            finish_reason=choice.finish_reason,
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

        while updates := await self.running.take():
            events = []
            for update in updates:
                if not self._has_news(update):
                    continue
                index = self.running.choice(update)
                if index in silent:
                    silent.remove(index)
                    events.append(chunk(ChatChunkChoice(index, ChatDelta("assistant", ""))))
                events.append(chunk(self._news(index, update)))
            if events:
                yield b"".join(events)
        if options is not None and options.include_usage:
            yield chunk()

    def _has_news(self, update: Update) -> bool:
        """Whether an update has anything to send; text may be held back."""
        return bool(update.text or update.finish_reason or (self.body.logprobs and update.logprobs))

    def _news(self, index: int, update: Update) -> ChatChunkChoice:
        logprobs = None
        if self.body.logprobs and update.logprobs:
            logprobs = chat_logprobs(self._tokenizer, update.logprobs)
        return ChatChunkChoice(
            index,
            ChatDelta(content=update.text),
            logprobs,
            update.finish_reason,
            update.stop_reason,
        )
