"""Speculation changes how many tokens a step emits, never which (float64, reference path)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gapless import LLM, SamplingParams
from tests.speculative.oracle import SCRIPTS, with_oracle

MakeLLM = Callable[..., LLM]
Truth = dict[tuple[int, ...], tuple[int, ...]]

NUM_REQUESTS = 6


def _prompts() -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, 2, 17, 33, 5, 48]  # one-token prompts too
    return [[rng.randrange(2, 256) for _ in range(n)] for n in lengths]


def _params() -> list[SamplingParams]:
    greedy = SamplingParams(temperature=0.0, max_tokens=36, seed=1)
    sampled = SamplingParams(temperature=1.2, top_k=60, top_p=0.97, min_p=0.002, max_tokens=36)
    return [
        replace(greedy, max_tokens=1),
        replace(sampled, seed=2),
        replace(greedy, stop_token_ids=(7, 50, 91), min_tokens=5),
        replace(sampled, seed=3, max_tokens=23, stop_token_ids=(3, 70, 200), min_tokens=2),
        replace(greedy, max_tokens=20),
        replace(sampled, seed=4, temperature=0.7),
    ]


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    return {}


@pytest.fixture
def plain(make_llm: MakeLLM, cache: dict[str, Any]) -> list[tuple[int, ...]]:
    """Tokens without speculation, each request alone."""
    if not cache:
        llm = make_llm(max_running_requests=1)
        assert llm.engine.config.max_window == 1
        cache["plain"] = [
            llm.generate(prompt, params).token_ids
            for prompt, params in zip(_prompts(), _params(), strict=True)
        ]
    return cache["plain"]


def _truth(plain: list[tuple[int, ...]]) -> Truth:
    return {
        (*prompt, params.seed or 0): tokens
        for prompt, params, tokens in zip(_prompts(), _params(), plain, strict=True)
    }


def _oracle(make_llm: MakeLLM, plain: list[tuple[int, ...]], script: str, **options: Any) -> LLM:
    gaps = options.pop("gaps", 0)
    defaults = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}
    return with_oracle(make_llm(**{**defaults, **options}), _truth(plain), script, gaps=gaps)


def _tokens(llm: LLM, order: list[int] | None = None) -> list[tuple[int, ...]]:
    places = order or list(range(NUM_REQUESTS))
    prompts, params = _prompts(), _params()
    results = llm.generate([prompts[i] for i in places], [params[i] for i in places])
    llm.engine.scheduler.check_conserved()
    found: list[tuple[int, ...]] = [()] * NUM_REQUESTS
    for place, result in zip(places, results, strict=True):
        found[place] = result.token_ids
    return found


def test_stops_happen_inside_windows(plain: list[tuple[int, ...]]) -> None:
    limits = [params.max_tokens or 0 for params in _params()]
    lengths = [len(tokens) for tokens in plain]
    assert lengths[0] == 1
    assert any(length < limit for length, limit in zip(lengths, limits, strict=True))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_any_acceptance(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], script: str, num_steps: int
) -> None:
    llm = _oracle(make_llm, plain, script, speculative_num_steps=num_steps)
    assert _tokens(llm) == plain
    counters = llm.engine.scheduler.counters
    if script == "none":
        assert counters.num_accepted == 0
    if script == "all":
        assert counters.accepted_len > 1 + 0.6 * num_steps
    assert counters.num_proposed > 0


@pytest.mark.parametrize("options", [
    {"linear_replayssm_cache_len": 1},
    {"linear_replayssm_cache_len": 3, "speculative_num_steps": 5},
    {"linear_replayssm_cache_len": 8, "page_size": 1},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7, "page_size": 5},
    {"max_running_requests": 2},  # joins and leaves while others run
    {"gaps": 3},  # steps without a proposal between steps with one
    {"speculative_num_steps": 15},
])  # fmt: skip
def test_any_options(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    assert _tokens(_oracle(make_llm, plain, "random", **options)) == plain


@pytest.mark.parametrize("offset", range(8))
def test_flush_boundary_at_every_offset(
    make_llm: MakeLLM, cache: dict[str, Any], offset: int
) -> None:
    prompt = [9 + i for i in range(offset + 1)]
    params = SamplingParams(temperature=0.0, max_tokens=24, seed=1)
    if "engines" not in cache:
        truth: Truth = {}
        spec = make_llm(
            max_running_requests=1, speculative_algorithm="ngram", linear_replayssm_cache_len=8
        )
        cache["engines"] = (make_llm(max_running_requests=1), with_oracle(spec, truth, "random"))
        cache["truth"] = truth
    single, spec = cache["engines"]
    expected = single.generate(prompt, params).token_ids
    cache["truth"][(*prompt, 1)] = expected
    assert spec.generate(prompt, params).token_ids == expected


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order(make_llm: MakeLLM, plain: list[tuple[int, ...]], seed: int) -> None:
    order = random.Random(seed).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    assert _tokens(_oracle(make_llm, plain, "alternating", max_running_requests=3), order) == plain


@pytest.mark.parametrize("period", [1, 3])
def test_forced_retraction(make_llm: MakeLLM, plain: list[tuple[int, ...]], period: int) -> None:
    llm = _oracle(make_llm, plain, "random", chunked_prefill_size=16)
    scheduler = llm.engine.scheduler
    schedule, calls = scheduler.schedule, []

    def retracting() -> object:
        calls.append(None)
        running = list(scheduler._running)
        if len(calls) % period == 0 and len(running) > 1:
            scheduler._retract(running[-1])
        return schedule()

    scheduler.schedule = retracting  # type: ignore[method-assign, assignment]
    assert _tokens(llm) == plain
    assert scheduler.cache_counters.num_retractions > 2


def test_aborts_in_flight_leave_the_others_alone(
    make_llm: MakeLLM, plain: list[tuple[int, ...]]
) -> None:
    llm = _oracle(make_llm, plain, "random", max_running_requests=4)
    prompts, params = _prompts(), _params()
    doomed = llm.stream(prompts[4], replace(params[4]), request_id="doomed")
    kept = llm.stream(prompts[1], params[1])
    tokens = [t for _ in range(3) for t in next(kept).token_ids]
    next(doomed)
    llm.abort("doomed")
    tokens += [t for update in kept for t in update.token_ids]
    assert tuple(tokens) == plain[1]


def test_ngram_drafts_equal_plain(make_llm: MakeLLM, plain: list[tuple[int, ...]]) -> None:
    assert _tokens(make_llm(speculative_algorithm="ngram", speculative_num_steps=4)) == plain


def test_stop_string_completed_inside_a_window(make_llm: MakeLLM) -> None:
    question = [{"role": "user", "content": "Tom has 7 pens and buys 8 more. How many pens now?"}]
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    options: dict[str, Any] = {"max_running_requests": 8, "max_model_len": 256, "dtype": "float64"}
    llm, off = LLM(**options), LLM(**options, speculative_num_steps=0)
    text = off.generate(question, greedy).text
    params = [
        replace(greedy, stop=(text[start : start + 3],)) for start in range(0, len(text) - 4, 5)
    ]
    questions = [question] * len(params)
    for with_drafts, without in zip(
        llm.generate(questions, params), off.generate(questions, params), strict=True
    ):
        assert with_drafts.text == without.text
        assert with_drafts.token_ids == without.token_ids
        assert with_drafts.finish_reason == without.finish_reason
        assert with_drafts.usage.completion_tokens == without.usage.completion_tokens


def test_token_limit_is_exact(bundled: tuple[LLM, LLM]) -> None:
    spec, off = bundled
    limits = range(1, 13)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in limits]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    whole = off.generate(question, params[-1]).token_ids
    for limit, result in zip(limits, spec.generate([question] * 12, params), strict=True):
        assert len(result.token_ids) == result.usage.completion_tokens == limit
        assert result.token_ids == whole[:limit]


@pytest.fixture(scope="module")
def bundled() -> tuple[LLM, LLM]:
    options: dict[str, Any] = {"max_running_requests": 4, "max_model_len": 256, "dtype": "float64"}
    return LLM(**options), LLM(speculative_num_steps=0, **options)


def test_bundled_model_greedy_seeded_and_several_samples(bundled: tuple[LLM, LLM]) -> None:
    spec, off = bundled
    assert (spec.engine.config.drafter, spec.engine.config.max_window) == ("mtp", 4)
    questions = [
        [{"role": "user", "content": text}]
        for text in ("Ann has 4 boxes with 6 pens each. How many pens are there?", "Who wrote it?")
    ]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=32),
        SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=24),
        SamplingParams(temperature=1.5, top_p=0.9, top_k=20, min_p=0.05, seed=8, max_tokens=24),
    ):
        for with_drafts, without in zip(
            spec.generate(questions, params), off.generate(questions, params), strict=True
        ):
            assert [c.token_ids for c in with_drafts.completions] == [
                c.token_ids for c in without.completions
            ]
    # the context's very end: drafts must not reach past it
    long = list(range(200, 440))
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    at_the_end = spec.generate(long, params)
    assert len(at_the_end.token_ids) == 16
    assert at_the_end.token_ids == off.generate(long, params).token_ids
