"""The same request gives the same tokens whatever happens around it (float64, reference path)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gapless import LLM, SamplingParams

if TYPE_CHECKING:
    from gapless.core.request import Request

MakeLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=1.3, top_k=50, top_p=0.95, min_p=0.01, seed=11, max_tokens=40)


def _prompts(count: int = 7) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(2, 256) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


def _params(count: int = 7) -> list[SamplingParams]:
    """Greedy and seeded requests mixed, of different lengths."""
    return [
        replace(GREEDY, max_tokens=10 + 4 * i)
        if i % 2
        else replace(SEEDED, seed=i, max_tokens=30 - 3 * i)
        for i in range(count)
    ]


def _tokens(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[int, ...]]]:
    """Tokens of each request run alone, filled by the first test that needs them."""
    return {}


@pytest.fixture
def expected(make_llm: MakeLLM, alone: dict[str, list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    if not alone:
        llm = make_llm(max_running_requests=1)
        alone["tokens"] = [
            llm.generate(prompt, params).token_ids
            for prompt, params in zip(_prompts(), _params(), strict=True)
        ]
    return alone["tokens"]


def test_requests_differ_from_each_other(expected: list[tuple[int, ...]]) -> None:
    assert len({tokens[:5] for tokens in expected}) == len(expected)
    assert all(len(set(tokens)) > 3 for tokens in expected)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_any_batch_order(make_llm: MakeLLM, expected: list[tuple[int, ...]], order: int) -> None:
    places = random.Random(order).sample(range(7), 7)
    prompts, params = _prompts(), _params()
    found = _tokens(make_llm(), [prompts[i] for i in places], [params[i] for i in places])
    assert found == [expected[i] for i in places]


@pytest.mark.parametrize("options", [
    {"max_running_requests": 3},  # fewer slots than requests: slots change owner
    {"max_running_requests": 64},  # other padding buckets
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7},
    {"chunked_prefill_size": 64, "page_size": 1},
    {"linear_replayssm_cache_len": 1},
    {"linear_replayssm_cache_len": 5, "page_size": 7},
])  # fmt: skip
def test_any_options(
    make_llm: MakeLLM, expected: list[tuple[int, ...]], options: dict[str, int]
) -> None:
    assert _tokens(make_llm(**options), _prompts(), _params()) == expected


@pytest.mark.parametrize("period", [1, 2, 5])
def test_forced_retraction(make_llm: MakeLLM, expected: list[tuple[int, ...]], period: int) -> None:
    llm = make_llm(chunked_prefill_size=16)
    scheduler = llm.engine.scheduler
    schedule, rng, calls = scheduler.schedule, random.Random(period), []

    def retracting() -> object:
        calls.append(None)
        running: list[Request] = list(scheduler._running)
        # leave the oldest alone, so that something always gets on
        if len(calls) % period == 0 and len(running) > 1:
            for victim in reversed(running[rng.randrange(1, len(running)) :]):
                scheduler._retract(victim)
        return schedule()

    llm.engine.scheduler.schedule = retracting  # type: ignore[method-assign, assignment]
    assert _tokens(llm, _prompts(), _params()) == expected
    assert scheduler.cache_counters.num_retractions > 10


def test_too_few_pages_for_all(make_llm: MakeLLM, expected: list[tuple[int, ...]]) -> None:
    llm = make_llm(page_size=4)
    pool = llm.engine.scheduler._cache._pages
    taken = pool.allocate(pool.num_free - 40)
    assert taken is not None
    assert _tokens(llm, _prompts(), _params()) == expected
    assert llm.engine.scheduler.cache_counters.num_retractions > 0


def test_samples_of_one_prompt_differ_and_repeat(make_llm: MakeLLM) -> None:
    params = replace(SEEDED, n=3, max_tokens=20)
    llm = make_llm()
    first, second = llm.generate([_prompts()[0]] * 2, params)
    tokens = [completion.token_ids for completion in first.completions]
    assert len(set(tokens)) == 3
    assert tokens == [completion.token_ids for completion in second.completions]
    # the first sample is the one that n = 1 gives
    assert llm.generate(_prompts()[0], replace(params, n=1)).token_ids == tokens[0]


def test_unseeded_requests_differ(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=20)
    llm = make_llm(seed=5)
    tokens = [r.token_ids for r in llm.generate([_prompts()[0]] * 3, params)]
    assert len(set(tokens)) == 3
    assert [r.token_ids for r in make_llm(seed=5).generate([_prompts()[0]] * 3, params)] == tokens
