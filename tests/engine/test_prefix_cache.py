"""A cached prefix changes what is computed, never what comes of it (float64, reference path)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM, SamplingParams
from gapless.core.request import Status
from tests.engine_fixtures import runner_of
from tests.models import tiny

if TYPE_CHECKING:
    from pathlib import Path

    from gapless.core.messages import GenerationResult

MakeLLM = Callable[..., LLM]

OFFSETS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 47, 58)
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)
SAMPLED = replace(PARAMS, temperature=1.1, top_k=40, seed=5)


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 256) for _ in range(count)]


def poison(llm: LLM) -> None:
    """Fill every page and every row that may become a snapshot with NaN."""
    device = runner_of(llm).device
    for rows in device.row_blocks():
        rows[:, : device.geometry.num_state_rows] = float("nan")
    for pages in device.page_blocks():
        pages[:] = float("nan")


def same(warm: GenerationResult, cold: GenerationResult) -> bool:
    """Whether tokens are equal, and the log-probabilities of each and its rivals to 1e-9."""
    if warm.token_ids != cold.token_ids:
        return False
    pairs = zip(warm.completions[0].logprobs or (), cold.completions[0].logprobs or (), strict=True)
    return all(
        a.logprob == pytest.approx(b.logprob, abs=1e-9)
        and [i for i, _ in a.top] == [i for i, _ in b.top]
        for a, b in pairs
    )


def pair(path: Path, **options: Any) -> tuple[LLM, LLM]:
    """An engine with the cache, poisoned, and one without."""
    options = {"dtype": "float64", "max_running_requests": 4, "max_model_len": 320, **options}
    warm = LLM(str(path), **options)
    poison(warm)
    return warm, LLM(str(path), disable_prefix_cache=True, **options)


def branches_differ(warm: LLM, cold: LLM, offsets: tuple[int, ...], length: int) -> Iterator[int]:
    """Offsets at which a branch off a cached prompt does not come out as without the cache."""
    base = tokens(length)
    warm.generate(base, PARAMS)
    prompts = [base[:offset] + tokens(5, seed=offset) for offset in offsets]
    # the second time each prompt is in the cache itself
    for params in (PARAMS, SAMPLED):
        found, expected = warm.generate(prompts, params), cold.generate(prompts, params)
        for offset, *results in zip(offsets, found, expected, strict=True):
            if not same(*results):
                yield offset


DRAFTERS = [
    {"speculative_algorithm": "none"},
    {"speculative_algorithm": "ngram", "speculative_num_steps": 3},
]


# one model of each kind of layer; the others' layers are made of the same
OF_EACH_KIND = {
    "qwen3_5", "kimi_linear", "bamba", "falcon_h1", "lfm2", "deepseek_v3", "minimax", "qwen3",
}  # fmt: skip
BRANCHES = [
    pytest.param(
        name,
        options,
        id=f"{name}-k{options.get('speculative_num_steps', 0)}",
        marks=[] if name in OF_EACH_KIND and options is DRAFTERS[1] else [pytest.mark.slow],
    )
    for name in tiny.MODELS
    for options in DRAFTERS
]


@pytest.mark.parametrize(("name", "options"), BRANCHES)
def test_branches_equal_cold_runs(
    tiny_model: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    warm, cold = pair(tiny_model(name), chunked_prefill_size=24, **options)
    assert list(branches_differ(warm, cold, OFFSETS, 60)) == []
    assert warm.cache_counters.num_hits > len(OFFSETS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", DRAFTERS, ids=["k0", "k3"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_branch_equals_a_cold_run(
    tiny_model: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    warm, cold = pair(tiny_model(name), chunked_prefill_size=64, **options)
    assert list(branches_differ(warm, cold, tuple(range(1, 201)), 210)) == []


def bundled_pair(**options: Any) -> tuple[LLM, LLM]:
    """The same of the bundled model, with its MTP layer."""
    options = {"dtype": "float64", "max_running_requests": 4, "max_model_len": 512, **options}
    warm = LLM(**options)
    assert warm.engine.config.drafter == "mtp"
    poison(warm)
    return warm, LLM(disable_prefix_cache=True, **options)


def test_branches_with_mtp_equal_cold_runs_and_draft_as_well() -> None:
    warm, cold = bundled_pair(chunked_prefill_size=24)
    base = "Tom has 7 pens and buys 8 more. Ann has 4 boxes with 6 pens each. How many pens"
    warm.generate(base, PARAMS)
    cold.generate(base, PARAMS)
    ids = warm.encode(base)
    for offset in (3, 9, 15, 16, 17, 30, len(ids)):
        prompt = ids[:offset] + warm.encode(" are there now? Answer:")
        params = replace(PARAMS, max_tokens=12)
        found, expected = warm.generate(prompt, params), cold.generate(prompt, params)
        assert same(found, expected)
        # drafts read the MTP layer's KV: they are as good only if that is the same
        assert found.completions[0].counters.accepted_at == (
            expected.completions[0].counters.accepted_at
        )
    assert warm.cache_counters.num_hits >= 4


# each chunk and each offset twice
CUT_PREFIXES = [
    pytest.param(chunk, offset, marks=pytest.mark.slow if (i + j) % 2 else ())
    for i, chunk in enumerate((1, 3, 16, 64))
    for j, offset in enumerate((15, 16, 17, 40))
]


@pytest.mark.parametrize(("chunk", "offset"), CUT_PREFIXES)
def test_chunked_prefill_of_a_cached_prefix(make_llm: MakeLLM, chunk: int, offset: int) -> None:
    base, tail = tokens(50), tokens(9, seed=1)
    cold = make_llm(disable_prefix_cache=True).generate(base[:offset] + tail, PARAMS)
    warm = make_llm(chunked_prefill_size=chunk)
    poison(warm)
    for _ in range(2):
        warm.generate(base, PARAMS)
        assert same(warm.generate(base[:offset] + tail, PARAMS), cold)


@pytest.mark.parametrize("options", [{}, *DRAFTERS[1:]], ids=["k0", "k3"])
def test_retraction_at_every_position(make_llm: MakeLLM, options: dict[str, Any]) -> None:
    prompt, params = tokens(20), replace(SAMPLED, max_tokens=18)
    cold = make_llm(disable_prefix_cache=True).generate(prompt, params)
    warm = make_llm(**options)
    poison(warm)
    engine = warm.engine
    for step in range(1, 20):
        warm.flush_cache()
        engine.submit(f"r{step}", prompt, params)
        found: list[int] = []
        for count in range(100):
            (request,) = engine.scheduler._requests.values()
            if count == step and request.status is Status.DECODE:
                engine.scheduler._retract(request)
            found += [t for update in engine.step() for t in update.token_ids]
            if not engine.has_work:
                break
        assert tuple(found) == cold.token_ids, f"retracted after {step} steps"
    assert engine.scheduler.cache_counters.num_retractions > 5
    assert engine.scheduler.cache_counters.num_hits > 5


@pytest.mark.parametrize(
    "spans",
    [(62, 67), *(pytest.param(s, marks=pytest.mark.slow) for s in ((126, 131), (254, 259)))],
)
def test_a_state_is_that_of_its_key_at_every_length(spans: tuple[int, int]) -> None:
    """Report A5: what is cached while the next step is under way is of the length it says."""
    warm, cold = bundled_pair()
    prompt = tokens(12)
    whole = cold.generate(prompt, replace(PARAMS, max_tokens=spans[1])).token_ids
    for length in range(*spans):
        num_tokens = length - len(prompt)
        found = warm.generate(prompt, replace(PARAMS, max_tokens=num_tokens)).token_ids
        assert found == whole[:num_tokens]
        again = warm.generate(prompt + list(found), replace(PARAMS, max_tokens=8))
        assert again.token_ids == whole[num_tokens : num_tokens + 8]
        assert again.usage.cached_tokens >= length - 1


def test_turns_of_a_chat_stay_right_however_often_they_come() -> None:
    """Report A1: with drafts rejected on the way, and the first turn asked again at the end."""
    warm, cold = bundled_pair(page_size=8)
    asked = ["Ann has 4 pens.", "How many pens?", "And Tom has 5 more?", "Who has more?"]
    params = replace(PARAMS, max_tokens=20, temperature=0.8, seed=3)
    history: list[dict[str, object]] = []
    turns: list[tuple[list[dict[str, object]], tuple[int, ...]]] = []
    for text in asked:
        history = [*history, {"role": "user", "content": text}]
        answer = cold.generate(history, params)
        turns.append((history, answer.token_ids))
        history = [*history, {"role": "assistant", "content": answer.text}]
    for _ in range(2):
        assert [warm.generate(turn, params).token_ids for turn, _ in turns] == [
            tokens for _, tokens in turns
        ]
    counters = warm.engine.scheduler.counters
    assert counters.num_accepted < counters.num_proposed
    assert warm.cache_counters.num_hits >= 6


def test_a_chat_of_ten_turns_prefills_what_is_new() -> None:
    llm = LLM(max_running_requests=2, max_model_len=1024)
    history: list[dict[str, object]] = []
    known = 0
    for turn in range(10):
        history.append({"role": "user", "content": f"Ann has {turn} pens. How many pens?"})
        result = llm.generate(history, SamplingParams(temperature=0.0, max_tokens=30))
        prompt = result.prompt_token_ids
        assert result.usage.cached_tokens == known
        history.append({"role": "assistant", "content": result.text})
        # the next prompt repeats the reply as it was, but for what ends it
        repeated = llm.encode([*history, {"role": "user", "content": "x"}])
        reply = [*prompt, *result.token_ids]
        known = next(
            (i for i, (a, b) in enumerate(zip(repeated, reply, strict=False)) if a != b), len(reply)
        )
        known = min(known, len(reply) - 1)
        assert known == len(reply) - 1, "the bundled template repeats replies"


def test_every_request_of_a_mixed_load_equals_its_own_run(make_llm: MakeLLM) -> None:
    """40 requests that share prefixes, into too few pages and rows, aborts among them."""
    rng = random.Random(8)
    shared = tokens(70)
    prompts = [shared[: rng.randrange(71)] + tokens(rng.randrange(1, 30), i) for i in range(40)]
    params = [
        replace(SAMPLED if i % 2 else PARAMS, max_tokens=rng.randrange(1, 20), seed=i)
        for i in range(40)
    ]
    alone = make_llm(disable_prefix_cache=True, max_running_requests=1)
    expected = [
        alone.generate(prompt, own).token_ids for prompt, own in zip(prompts, params, strict=True)
    ]
    llm = make_llm(
        page_size=8, chunked_prefill_size=32,
        speculative_algorithm="ngram", speculative_num_steps=3,
    )  # fmt: skip
    poison(llm)
    cache = llm.engine.scheduler._cache
    assert cache._pages.allocate(cache._pages.num_free - 40) is not None
    while cache.num_free_rows > 10:
        cache._rows.allocate()
    found = [result.token_ids for result in llm.generate(prompts, params)]
    assert found == expected
    counters = llm.cache_counters
    assert min(counters.num_retractions, counters.num_rows_evicted) > 0
    assert min(counters.num_leaves_evicted, counters.num_hits) > 10


@pytest.mark.parametrize("drafter", [{"speculative_algorithm": "none"}, {}], ids=["k0", "mtp"])
def test_the_host_tier_gives_back_what_the_device_has_lost(drafter: dict[str, Any]) -> None:
    llm = LLM(
        dtype="float64", max_running_requests=1, max_model_len=256, host_cache_gb=0.05,
        page_size=8, **drafter,
    )  # fmt: skip
    cold = LLM(
        dtype="float64", max_running_requests=1, max_model_len=256, disable_prefix_cache=True,
        **drafter,
    )  # fmt: skip
    prompts = [tokens(90, seed=i) for i in range(4)]
    expected = [cold.generate([*prompt, 7], PARAMS) for prompt in prompts]
    poison(llm)
    cache = llm.engine.scheduler._cache
    # room on the device for one of them
    taken = cache._pages.allocate(cache._pages.num_free - 16)
    assert taken is not None
    for _ in range(2):
        for prompt, wanted in zip(prompts, expected, strict=True):
            llm.generate(prompt, PARAMS)
            assert same(llm.generate([*prompt, 7], PARAMS), wanted)
    counters = llm.cache_counters
    assert min(counters.num_stores, counters.num_loads) >= 4
    cache._pages.release(taken)
    llm.engine.scheduler.check_conserved()


def test_log_probabilities_of_a_prompt_are_those_of_all_its_tokens(make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(), tokens(60)
    (cold,) = llm.score([prompt])
    llm.generate(prompt, PARAMS)
    (warm,) = llm.score([prompt])
    assert warm == pytest.approx(cold, abs=1e-9)
    assert len(cold) == 59


def test_flush_forgets(make_llm: MakeLLM) -> None:
    llm, prompt = make_llm(), tokens(60)
    llm.generate(prompt, PARAMS)
    assert llm.generate(prompt, PARAMS).usage.cached_tokens == 48
    assert llm.flush_cache() > 0
    assert llm.generate(prompt, PARAMS).usage.cached_tokens == 0
