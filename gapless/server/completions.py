"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from gapless.core.messages import Submission
from gapless.core.request import FinishReason
from gapless.server.body import read_body
from gapless.server.collected import collect
from gapless.server.errors import ApiError
from gapless.server.identity import response_id
from gapless.server.logprobs import CompletionLogprobWriter
from gapless.server.running import Running
from gapless.server.sampling import check_request, sampling_params
from gapless.server.schemas import (
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Usage,
)
from gapless.server.sse import EventStream, event, usage_of_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.requests import Request

    from gapless.core.messages import TokenLogprob
    from gapless.core.sampling_params import SamplingParams
    from gapless.server.site import Site
    from gapless.text.chat import EncodedPrompt


async def create(site: Site, request: Request) -> EventStream | CompletionResponse:
    """Continue prompts."""
    body = await read_body(request, CompletionRequest, site.options)
    site.check_model(body.model)
    check_request(body, 1 if isinstance(body.prompt, str) else len(body.prompt))
    params = _params(body, site.ready.default_params)
    prompts = await asyncio.to_thread(_encode, site, body, params)
    own_id = response_id("cmpl", body.request_id, request)
    submissions = [
        Submission(f"{own_id}/{index}", tuple(prompt.token_ids), params)
        for index, prompt in enumerate(prompts)
    ]
    texts = await asyncio.to_thread(_echoes, site, body, prompts)
    running = await Running.start(site, request, own_id, submissions)
    answer = _Answer(site, body, own_id, running, prompts, texts, int(time.time()))
    if body.stream:
        return EventStream(running, answer.events())
    return await answer.whole()


def _params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "max_tokens=0 asks for nothing; want at least 1, or 0 with echo",
            param="max_tokens",
        )
    if body.stream and body.echo and body.logprobs is not None and body.n > 1:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"n={body.n} with echo and logprobs is not streamed; leave out one of the four",
            param="n",
        )
    return sampling_params(
        body,
        defaults,
        # the engine always samples; a token that was not asked for is not told
        max_tokens=body.max_tokens or 1,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def _encode(site: Site, body: CompletionRequest, params: SamplingParams) -> list[EncodedPrompt]:
    prompts = site.reader.texts(body.prompt)
    for prompt in prompts:
        site.reader.limits.check(prompt.token_ids, params)
    return prompts


def _echoes(site: Site, body: CompletionRequest, prompts: Sequence[EncodedPrompt]) -> list[str]:
    """Return the text to begin each prompt's continuations with."""
    if not body.echo:
        return [""] * len(prompts)
    if isinstance(body.prompt, str):
        return [body.prompt]
    texts = [item for item in body.prompt if isinstance(item, str)]
    decode, skips = site.reader.tokenizer.decode, body.skip_special_tokens is not False
    return texts or [decode(p.token_ids, skip_special_tokens=skips) for p in prompts]


@dataclass(frozen=True)
class _Answer:
    """The two forms of an answer."""

    site: Site
    body: CompletionRequest
    own_id: str
    running: Running
    prompts: Sequence[EncodedPrompt]
    echoes: Sequence[str]
    created: int

    async def whole(self) -> CompletionResponse:
        """Wait for the end, and return everything at once."""
        found = await collect(self.running, len(self.prompts) * self.body.n)
        choices = []
        for index, choice in enumerate(found):
            # samples of a prompt share its log-probabilities, which come with the first
            prompt_logprobs = found[index - index % self.body.n].prompt_logprobs
            piece = self._begin(index, prompt_logprobs)
            self._continue(piece, choice.text, choice.logprobs)
            choices.append(self._choice(index, piece, choice.finish_reason, choice.stop_reason))
        return self._response(choices, self._usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield chunks as they come."""
        options = self.body.stream_options
        writers: dict[int, CompletionLogprobWriter | None] = {}
        while updates := await self.running.take():
            events = []
            for update in updates:
                index = self.running.choice(update)
                if index in writers:
                    piece = _Piece(writers[index])
                else:
                    piece = self._begin(index, update.prompt_logprobs)
                    writers[index] = piece.writer
                self._continue(piece, update.text, update.logprobs or ())
                if piece.text or piece.entries or update.finish_reason:
                    choice = self._choice(index, piece, update.finish_reason, update.stop_reason)
                    usage = usage_of_chunk(options, self._usage, is_last=False)
                    events.append(event(self._response([choice], usage)))
            if events:
                yield b"".join(events)
        if options is not None and options.include_usage:
            yield event(self._response([], self._usage))

    @property
    def _usage(self) -> Usage:
        usage = self.running.usage
        if self.body.max_tokens != 0:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def _begin(self, index: int, prompt_logprobs: Sequence[TokenLogprob]) -> _Piece:
        """Return a choice's beginning: the prompt with `echo`, else nothing."""
        writer = None
        if self.body.logprobs is not None:
            writer = CompletionLogprobWriter(
                self.site.reader.tokenizer,
                skips_special_tokens=self.body.skip_special_tokens is not False,
            )
        piece = _Piece(writer)
        if self.body.echo:
            prompt = index // self.body.n
            piece.text = self.echoes[prompt]
            if writer is not None:
                piece.entries = [self.prompts[prompt].token_ids[0], *prompt_logprobs]
        return piece

    def _continue(self, piece: _Piece, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        if self.body.max_tokens != 0:
            piece.text += text
            piece.entries += logprobs

    def _choice(
        self,
        index: int,
        piece: _Piece,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> CompletionChoice:
        if self.body.max_tokens == 0 and finish_reason is not None:
            finish_reason, stop_reason = FinishReason.LENGTH, None
        logprobs = None
        if piece.writer is not None:
            logprobs = piece.writer.write(piece.entries)
        return CompletionChoice(index, piece.text, logprobs, finish_reason, stop_reason)

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(self.own_id, self.created, self.site.model_name, choices, usage)


@dataclass
class _Piece:
    """What is to be told of a choice: all of it, or in a stream what is new."""

    writer: CompletionLogprobWriter | None
    text: str = ""
    entries: list[TokenLogprob | int] = field(default_factory=list)
