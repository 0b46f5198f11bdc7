"""Chats through the official client equal those of `LLM`, with speculation and cached prefixes."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import openai
import pytest

from gapless import LLM, SamplingParams
from tests.server.conftest import MODEL, QUESTION, ServerProcess

if TYPE_CHECKING:
    from gapless.core.messages import Completion, GenerationResult

OTHER = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


def ask(client: openai.OpenAI, messages: Any = QUESTION, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def joined(stream: Any, n: int = 1) -> list[str]:
    """Return the text of each choice of a stream."""
    texts = [""] * n
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


def offline(llm: LLM, messages: Any = QUESTION, **params: Any) -> GenerationResult:
    return llm.generate(messages, SamplingParams(**{"max_tokens": None, **params}))


def test_an_answer_and_what_stands_around_it(client: openai.OpenAI, llm: LLM) -> None:
    answer = ask(client)
    expected = offline(llm, temperature=0.0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.logprobs) == (0, "assistant", None)
    assert choice.message.content == expected.text
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == expected.completions[0].stop_reason
    usage = answer.usage
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert usage.completion_tokens == len(expected.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("seed", [1, 2**40])
@pytest.mark.parametrize("n", [1, 3])
def test_seeds_give_what_they_give_offline(
    client: openai.OpenAI, llm: LLM, seed: int, n: int
) -> None:
    fields = {"temperature": 1.3, "seed": seed, "n": n, "max_tokens": 12}
    expected = [c.text for c in offline(llm, **fields).completions]
    extra = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1}
    assert [c.message.content for c in ask(client, **fields).choices] == expected
    assert joined(ask(client, **fields, stream=True), n) == expected
    with_extra = ask(client, **fields, top_p=0.9, frequency_penalty=0.5, extra_body=extra)
    filtered = offline(llm, **fields, **extra, top_p=0.9, frequency_penalty=0.5)
    assert [c.message.content for c in with_extra.choices] == [c.text for c in filtered.completions]


def test_a_stream_is_role_then_text_then_usage(client: openai.OpenAI, llm: LLM) -> None:
    expected = offline(llm, temperature=0.0)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first = chunks[0].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert [c.choices[0].finish_reason for c in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert joined(chunks) == [expected.text]
    plain = list(ask(client, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    counted = list(ask(client, stream=True, stream_options={"continuous_usage_stats": True}))
    totals = [chunk.usage.completion_tokens for chunk in counted]
    assert totals == sorted(totals)
    assert totals[-1] == len(expected.token_ids)


def test_cached_tokens_are_told_in_both_forms(client: openai.OpenAI) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    ask(client)
    whole, last = ask(client), list(ask(client, **fields))[-1]
    for usage in (whole.usage, last.usage):
        assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_turns_of_a_chat_equal_cold_ones(client: openai.OpenAI, llm: LLM) -> None:
    chat = list(QUESTION)
    for question in ("How many in 2 boxes?", "And in 3?", "Why?"):
        text = joined(ask(client, chat, stream=True))[0]
        llm.flush_cache()
        assert text == offline(llm, chat, temperature=0.0).text
        chat += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": question},
        ]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_engine(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    fields = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
    expected = offline(llm, **fields, logprobs=3).completions[0]
    found = ask(client, **fields, logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        content = [e for choice in choices if choice.logprobs for e in choice.logprobs.content]
    else:
        content = found.choices[0].logprobs.content
        assert found.usage.completion_tokens == len(content)
    check_logprobs(content, expected)


def close(value: Any) -> Any:
    """Equal up to how prompts were cut, which cached prefixes change; in float64."""
    return pytest.approx(value, abs=1e-10)


def check_logprobs(content: Any, expected: Completion) -> None:
    for entry, own in zip(content, expected.logprobs, strict=True):
        assert entry.logprob == close(own.logprob)
        assert [top.logprob for top in entry.top_logprobs] == close([v for _, v in own.top])
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text.removesuffix("<|im_end|>") == expected.text


@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_stop_string_cuts_text_logprobs_and_usage_alike(
    client: openai.OpenAI, llm: LLM, length: int
) -> None:
    plain = offline(llm, temperature=0.0).text
    stop = plain[6 : 6 + length]
    answer = ask(client, stop=["\x00", stop], logprobs=True)
    (choice,) = answer.choices
    assert choice.message.content == plain[: plain.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert answer.usage.completion_tokens == len(choice.logprobs.content)
    chunks = list(ask(client, stop=stop, stream=True))
    assert joined(chunks) == [choice.message.content]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_limit_is_exact_and_has_two_names(client: openai.OpenAI, limit: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        answer = ask(client, **{name: limit}, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"


def test_more_than_the_context_holds_is_cut_there(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=10_000, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_own_stop_ids_bias_and_minimum(client: openai.OpenAI, llm: LLM) -> None:
    ids = offline(llm, temperature=0.0).token_ids
    stopped = ask(client, extra_body={"stop_token_ids": [ids[3]]})
    assert stopped.usage.completion_tokens == ids.index(ids[3]) + 1
    assert stopped.choices[0].stop_reason == ids[3]
    biased = ask(client, logit_bias={str(ids[0]): -100}, max_tokens=1, logprobs=True)
    plain = ask(client, max_tokens=1, logprobs=True)
    assert biased.choices[0].message.content != plain.choices[0].message.content
    longer = ask(client, extra_body={"min_tokens": len(ids) + 5})
    assert longer.usage.completion_tokens >= len(ids) + 5


def test_special_tokens_are_kept_on_request(client: openai.OpenAI) -> None:
    fields = {"ignore_eos": True, "stop_token_ids": [], "min_tokens": 40}
    hidden = ask(client, max_tokens=60, extra_body=fields)
    shown = ask(client, max_tokens=60, extra_body={**fields, "skip_special_tokens": False})
    text = shown.choices[0].message.content
    assert "<|im_end|>" in text
    assert hidden.choices[0].message.content == re.sub(r"<\|\w+\|>", "", text)


def test_parts_of_content_and_newer_roles_are_plain_text(client: openai.OpenAI) -> None:
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "You are brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
    ]
    assert ask(client, parts).choices[0].message == ask(client, OTHER).choices[0].message


def test_many_at_once_are_each_as_alone(server: ServerProcess, llm: LLM) -> None:
    chats = [[{"role": "user", "content": f"Ann has {i} pens. How many?"}] for i in range(6)]

    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=chats[index], stream=True,
            temperature=1.0, seed=index, max_tokens=20,
        )  # fmt: skip
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everyone() -> list[str]:
        options = {"base_url": f"{server.url}/v1", "api_key": "-", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            return await asyncio.gather(*(one(client, i) for i in range(6)))

    found = asyncio.run(everyone())
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=20) for i in range(6)]
    assert found == [result.text for result in llm.generate(chats, params)]


def test_identical_requests_have_one_answer(server: ServerProcess) -> None:
    async def everyone() -> list[Any]:
        options = {"base_url": f"{server.url}/v1", "api_key": "-", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            create = client.chat.completions.create
            return await asyncio.gather(*(create(model=MODEL, messages=OTHER) for _ in range(9)))

    assert len({answer.choices[0].message.content for answer in asyncio.run(everyone())}) == 1
