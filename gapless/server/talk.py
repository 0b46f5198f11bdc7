"""A chat's way from messages to the events of its answers, whatever API it came by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gapless.core.messages import Submission
from gapless.server.answer import AnswerReader, Blocks
from gapless.server.errors import ApiError, wrong
from gapless.server.running import Running
from gapless.server.toolbox import Toolset
from gapless.text.reasoning import ReasoningSplitter, thinks_at_end
from gapless.text.tools import ToolParser

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from gapless.core.messages import Update
    from gapless.core.sampling_params import SamplingParams
    from gapless.server.answer import Event
    from gapless.server.site import Site
    from gapless.text.chat import EncodedPrompt

# more tokens than a tag and the white space after it may take
_TAIL = 16


@dataclass(frozen=True, kw_only=True)
class Chat:
    """What a model is asked."""

    messages: Sequence[Mapping[str, Any]]
    tools: Toolset = field(default_factory=Toolset)
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template."""
    add_generation_prompt: bool = True
    splits_reasoning: bool = True


@dataclass(frozen=True)
class Talk:
    """A chat that is being answered; its `running` has to be closed."""

    running: Running
    readers: Sequence[AnswerReader]
    """By choice."""

    def read(self, update: Update) -> list[Event]:
        """Return what an update brings."""
        reader = self.readers[self.running.choice(update)]
        return reader.read(update.text, is_last=update.finish_reason is not None)


def encode(site: Site, chat: Chat) -> EncodedPrompt:
    """Return the token ids of a chat's prompt; may take long.

    Raises:
        ApiError: the messages are malformed, or the model knows no tools.
        InvalidRequest: the template refuses them.
    """
    tools = chat.tools.for_template()
    if tools is not None and site.reader.tool_style is None:
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            "tools are not supported with this model's chat template; leave them out, or start the "
            "server with --chat-template and --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    return site.reader.chat(
        chat.messages,
        add_generation_prompt=chat.add_generation_prompt,
        variables=chat.variables,
        tools=tools,
    )


async def start(
    site: Site, request: Request, own_id: str, chat: Chat, params: SamplingParams
) -> Talk:
    """Have the engine queue a chat.

    Raises:
        ApiError, RequestError: it is refused.
    """
    grammar = chat.tools.grammar
    if grammar is not None:
        if params.grammar is not None:
            raise wrong("tool_choice", "forces a call, which leaves no other form: send 'auto'")
        params = replace(params, grammar=grammar)
    prompt, is_open = await asyncio.to_thread(_prepare, site, chat, params)
    submission = Submission(own_id, tuple(prompt.token_ids), params, prompt.message_end)
    running = await Running.start(site, request, own_id, [submission])
    # a grammar is that of the answer, and leaves no room for thoughts
    splits = chat.splits_reasoning and site.reader.has_reasoning and params.grammar is None
    readers = [
        AnswerReader(
            ReasoningSplitter(is_open=is_open) if splits else None,
            _parser(site, chat.tools),
            is_single=chat.tools.is_single,
        )
        for _ in range(params.n)
    ]
    return Talk(running, readers)


def _parser(site: Site, tools: Toolset) -> ToolParser | None:
    if tools.grammar is not None:
        return ToolParser("hermes", tools.functions, begins_in_call=True)
    style = site.reader.tool_style
    return ToolParser(style, tools.functions) if tools.functions and style else None


def _prepare(site: Site, chat: Chat, params: SamplingParams) -> tuple[EncodedPrompt, bool]:
    """Return the prompt, and whether it ends within thoughts."""
    prompt = encode(site, chat)
    site.reader.limits.check(prompt.token_ids, params)
    tail = site.reader.tokenizer.decode(prompt.token_ids[-_TAIL:], skip_special_tokens=False)
    return prompt, thinks_at_end(tail)


@dataclass(frozen=True)
class Ended:
    """The last update of an answer with one choice, and whether it calls functions."""

    update: Update
    has_calls: bool


async def whole_answer(talk: Talk) -> tuple[Blocks, Ended]:
    """Wait for the end of an answer with one choice, and let go of the work.

    Raises:
        ApiError, EngineGone: the work has been ended.
    """
    blocks, last = Blocks(), None
    try:
        while updates := await talk.running.take():
            for update in updates:
                blocks.add(talk.read(update))
                last = update
    finally:
        talk.running.close()
    blocks.finish()
    assert last is not None, "every continuation ends with an update"
    return blocks, Ended(last, talk.readers[0].has_calls)
