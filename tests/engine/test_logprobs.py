"""Log-probabilities are the model's own, one per token, however tokens come about."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from gapless import LLM, InvalidRequest, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.core.request import FinishReason
from tests.engine.sampling_oracle import Oracle
from tests.models import tiny

if TYPE_CHECKING:
    from pathlib import Path

    from gapless.core.messages import GenerationResult, Update
    from gapless.core.request import Request

MakeLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
# two words only, so that a look-up in its own text drafts well
REPEATING = replace(GREEDY, logit_bias={50: 80.0, 60: 77.0}, prompt_logprobs=0)
SEEDED = SamplingParams(
    temperature=1.2, top_k=30, top_p=0.9, seed=5, max_tokens=20, logprobs=0, prompt_logprobs=3
)
EDITED = replace(SEEDED, repetition_penalty=1.4, logit_bias={7: 4.0, 9: -3.0}, logprobs=20)
SILENT = SamplingParams(temperature=0.0, max_tokens=15)
PARAMS = [GREEDY, REPEATING, SEEDED, EDITED, SILENT, replace(EDITED, n=2, prompt_logprobs=20)]

MTP = {"speculative_algorithm": "mtp", "speculative_num_steps": 3}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}
QUESTION = [{"role": "user", "content": "Ann has 4 boxes with 6 pens each. How many pens?"}]


def _prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(2, 256) for _ in range(1 + 7 * i)] for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The model of `tiny_checkpoint`."""
    return Oracle(tiny.build("qwen3_5", scaled=True, seed=tiny.VETTED_SEED)[1])


@pytest.fixture(scope="module")
def bundled_oracle() -> Oracle:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint())
    return Oracle(model.eval())


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(dtype="float64", max_running_requests=4, max_model_len=160, **MTP)


@pytest.mark.parametrize("options", [
    {"max_running_requests": 1},
    {},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 3, **NGRAM},
    {"chunked_prefill_size": 7},
    NGRAM,
], ids=str)  # fmt: skip
def test_equal_to_transformers(make_llm: MakeLLM, oracle: Oracle, options: dict[str, Any]) -> None:
    llm = make_llm(**options)
    for result, params in zip(llm.generate(_prompts(), PARAMS), PARAMS, strict=True):
        oracle.check_logprobs(result, params, 1e-9)
    assert (llm.engine.scheduler.counters.num_accepted > 10) == ("speculative_algorithm" in options)


def test_equal_to_transformers_in_float32(tmp_path: Path, tiny_checkpoint: Path) -> None:
    _, model = tiny.build("qwen3_5", scaled=False, seed=tiny.VETTED_SEED)
    tiny.save(model, tmp_path)
    for file in tiny_checkpoint.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    llm = LLM(str(tmp_path), dtype="float32", max_running_requests=4, max_model_len=200, **NGRAM)
    oracle = Oracle(model, torch.float32)
    for result, params in zip(llm.generate(_prompts(), PARAMS), PARAMS, strict=True):
        oracle.check_logprobs(result, params, 1e-5)


@pytest.mark.parametrize("options", [MTP, NGRAM], ids=["mtp", "ngram"])
def test_bundled_model(options: dict[str, Any], bundled_oracle: Oracle) -> None:
    llm = LLM(
        dtype="float64", max_running_requests=4, max_model_len=160, chunked_prefill_size=9,
        **options,
    )  # fmt: skip
    params = [replace(GREEDY, prompt_logprobs=2), EDITED, SILENT, REPEATING]
    for result, own in zip(llm.generate([QUESTION] * 4, params), params, strict=True):
        bundled_oracle.check_logprobs(result, own, 1e-9)
    assert llm.engine.scheduler.counters.num_accepted > 10


def _assert_begins(result: GenerationResult, plain: GenerationResult) -> None:
    """The result is cut short, and its entries are the first of the plain one's."""
    entries, count = result.completions[0].logprobs, len(result.token_ids)
    assert entries is not None
    assert len(entries) == count == result.usage.completion_tokens
    assert result.token_ids == plain.token_ids[:count]
    wanted = plain.completions[0].logprobs or ()
    assert [e.token_id for e in entries] == list(result.token_ids)
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in wanted[:count]])


LONG = replace(GREEDY, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(bundled: LLM) -> GenerationResult:
    result: GenerationResult = bundled.generate(QUESTION, LONG)
    assert bundled.engine.scheduler.counters.accepted_len > 1.5
    return result


def test_one_entry_per_token_up_to_any_limit(bundled: LLM, plain: GenerationResult) -> None:
    for limit in (1, 2, 3, 5, 8):
        result = bundled.generate(QUESTION, replace(LONG, max_tokens=limit))
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.token_ids) == limit
        _assert_begins(result, plain)


def test_one_entry_per_token_up_to_any_stop(bundled: LLM, plain: GenerationResult) -> None:
    for place in (0, 1, 3, 6):
        by_id = bundled.generate(QUESTION, replace(LONG, stop_token_ids=(plain.token_ids[place],)))
        by_text = bundled.generate(QUESTION, replace(LONG, stop=(plain.text[place : place + 6],)))
        for result in (by_id, by_text):
            assert result.finish_reason is FinishReason.STOP
            _assert_begins(result, plain)
    ended = bundled.generate(QUESTION, replace(LONG, ignore_eos=False))
    assert ended.finish_reason is FinishReason.STOP
    _assert_begins(ended, plain)


def test_one_entry_per_token_up_to_the_context_limit(bundled: LLM) -> None:
    prompt = list(range(300, 450))
    result = bundled.generate(prompt, replace(LONG, max_tokens=None))
    assert len(result.token_ids) == len(result.completions[0].logprobs) == 10


def test_updates_of_a_stream_join_to_the_result(bundled: LLM) -> None:
    params = replace(EDITED, prompt_logprobs=1)
    result = bundled.generate(QUESTION, params)
    updates: list[Update] = list(bundled.stream(QUESTION, params))
    assert all(len(u.logprobs or ()) == len(u.token_ids) for u in updates)
    entries = [entry for u in updates for entry in u.logprobs or ()]
    assert [e.token_id for e in entries] == list(result.token_ids)
    assert tuple(entries) == result.completions[0].logprobs
    assert [bool(u.prompt_logprobs) for u in updates] == [True] + [False] * (len(updates) - 1)
    assert (None, *updates[0].prompt_logprobs) == result.prompt_logprobs


@pytest.mark.parametrize("options", [{}, NGRAM], ids=["plain", "ngram"])
def test_forced_retraction(make_llm: MakeLLM, oracle: Oracle, options: dict[str, Any]) -> None:
    llm = make_llm(chunked_prefill_size=16, **options)
    scheduler = llm.engine.scheduler
    schedule, calls = scheduler.schedule, []

    def retracting() -> object:
        calls.append(None)
        running: list[Request] = list(scheduler._running)
        if len(calls) % 2 == 0:
            for victim in reversed(running[1:]):
                scheduler._retract(victim)
        return schedule()

    scheduler.schedule = retracting  # type: ignore[method-assign, assignment]
    for result, params in zip(llm.generate(_prompts(), PARAMS), PARAMS, strict=True):
        oracle.check_logprobs(result, params, 1e-9)
    assert scheduler.cache_counters.num_retractions > 10


def test_asking_changes_no_token(make_llm: MakeLLM) -> None:
    silent = [replace(params, logprobs=None, prompt_logprobs=None) for params in PARAMS]
    llm = make_llm(**NGRAM)
    wanted = [[c.token_ids for c in r.completions] for r in llm.generate(_prompts(), silent)]
    found = [[c.token_ids for c in r.completions] for r in llm.generate(_prompts(), PARAMS)]
    assert found == wanted


def test_score_is_the_prompts_logprobs(make_llm: MakeLLM, oracle: Oracle) -> None:
    prompts = _prompts()[1:3]
    for prompt, found in zip(prompts, make_llm().score(prompts), strict=True):
        rows = oracle.logprobs(prompt)
        assert found == pytest.approx([rows[i, t] for i, t in enumerate(prompt[1:])], abs=1e-9)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 1.0, True, "2", float("nan")])
def test_bad_counts_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}=.*: want an integer from 0 to 20"):
        SamplingParams(**{field: value})
