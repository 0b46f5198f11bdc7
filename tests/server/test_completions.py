"""Completions through the official client: kinds of prompts, echo, scores, streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from gapless import LLM, SamplingParams
from tests.server.conftest import MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = "Mia has 4 apples and é🙂 pears"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


def complete(client: openai.OpenAI, prompt: Any = TEXT, **fields: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def streamed(client: openai.OpenAI, count: int, prompt: Any = TEXT, **fields: Any) -> list[str]:
    """Return the text of each choice of a stream."""
    texts = [""] * count
    for chunk in complete(client, prompt, stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def close(values: Sequence[float]) -> Any:
    """Equal up to how prompts were cut, which cached prefixes change; in float64."""
    return pytest.approx(values, abs=1e-10)


def test_kinds_of_prompts(client: openai.OpenAI, llm: LLM) -> None:
    texts = [TEXT, "Two twos are"]
    ids = [llm.encode(text) for text in texts]
    expected = [result.text for result in llm.generate(texts, GREEDY)]
    for prompt, count in ((TEXT, 1), (ids[0], 1), ([TEXT], 1), (texts, 2), (ids, 2)):
        answer = complete(client, prompt)
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
        assert [choice.text for choice in answer.choices] == expected[:count]
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert answer.usage.prompt_tokens == sum(len(own) for own in ids[:count])
        assert answer.usage.completion_tokens == 16 * count
        assert streamed(client, count, prompt) == expected[:count]


def test_samples_of_prompts_stand_together(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, seed=3, n=3, max_tokens=8)
    results = llm.generate([TEXT, "Two"], params)
    expected = [c.text for result in results for c in result.completions]
    fields = {"temperature": 2.0, "seed": 3, "n": 3, "max_tokens": 8}
    answer = complete(client, [TEXT, "Two"], **fields)
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 6
    assert streamed(client, 6, [TEXT, "Two"], **fields) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_echo_comes_first(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    expected = TEXT + llm.generate(TEXT, GREEDY).text
    for prompt in (TEXT, llm.encode(TEXT)):
        if stream:
            assert streamed(client, 1, prompt, echo=True) == [expected]
        else:
            assert complete(client, prompt, echo=True).choices[0].text == expected


def scores(llm: LLM, text: str) -> list[float]:
    return llm.score([text])[0]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_with_logprobs_scores_the_prompt(
    client: openai.OpenAI, llm: LLM, as_ids: bool, max_tokens: int
) -> None:
    ids = llm.encode(TEXT)
    answer = complete(client, ids if as_ids else TEXT, echo=True, logprobs=1, max_tokens=max_tokens)
    (choice,) = answer.choices
    found = choice.logprobs
    assert len(found.tokens) == len(ids) + max_tokens
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == close(scores(llm, TEXT))
    for token, value, top in zip(
        found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True
    ):
        # the most likely token, and the one that stands there
        assert top[token] == value
        assert len(top) == 1 + (max(top, key=top.get) != token)
    assert answer.usage.completion_tokens == max_tokens
    assert answer.usage.total_tokens == len(ids) + max_tokens
    if max_tokens == 0:
        assert (choice.text, choice.finish_reason) == (TEXT, "length")


def test_offsets_are_places_in_the_text(client: openai.OpenAI) -> None:
    choice = complete(client, echo=True, logprobs=0, max_tokens=12).choices[0]
    found = choice.logprobs
    # a token that is a part of a character stands where the character does
    for token, start in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[start:].startswith(token)
    assert sum(token.startswith("bytes:") for token in found.tokens) >= 2
    assert found.text_offset == sorted(found.text_offset)


def test_samples_share_the_prompt_s_scores(client: openai.OpenAI) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 2, "temperature": 3.0, "n": 2}
    answer = complete(client, [TEXT, "Two twos"], **fields)
    values = [choice.logprobs.token_logprobs for choice in answer.choices]
    assert values[0][:-2] == values[1][:-2]
    assert values[2][:-2] == values[3][:-2]
    assert len(values[0]) != len(values[2])
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        complete(client, **fields, stream=True)


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_a_stream_s_logprobs_join_to_those_of_the_whole(
    client: openai.OpenAI, max_tokens: int
) -> None:
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
    whole = complete(client, **fields)
    options = {"include_usage": True}
    *chunks, last = complete(client, stream=True, stream_options=options, **fields)
    assert last.usage.completion_tokens == whole.usage.completion_tokens == max_tokens
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "text_offset"):
        joined = [entry for part in parts for entry in getattr(part, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)
    values = [value for part in parts for value in part.token_logprobs]
    assert values[1:] == close(whole.choices[0].logprobs.token_logprobs[1:])


def test_logprobs_without_echo_are_of_the_output(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=4)
    expected = llm.generate(TEXT, params).completions[0]
    found = complete(client, logprobs=4, max_tokens=9).choices[0].logprobs
    assert found.token_logprobs == close([entry.logprob for entry in expected.logprobs])
    assert [len(top) for top in found.top_logprobs] == [4] * 9
    assert found.text_offset[0] == 0


def test_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    for fields in ({}, {"max_tokens": None}):
        assert complete(client, **fields).usage.completion_tokens == 16
