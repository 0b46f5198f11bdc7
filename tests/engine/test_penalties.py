"""Bias and penalties: every token is what the plain formula chooses, given those before it."""

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
from gapless.ops.sampling import EditRows
from gapless.runner import slot_table
from gapless.runner.slot_table import SlotTable
from tests.engine.sampling_oracle import Oracle
from tests.models import tiny

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.core.messages import GenerationResult
    from gapless.core.plan import PrefillSegment
    from gapless.core.request import Request

MakeLLM = Callable[..., LLM]

NAN, INF = float("nan"), float("inf")
STOP_ID = 50
# few likely words: they come again and again, so that counts matter and drafts are accepted
WORDS = {50: 60.0, 60: 59.0, 70: 58.0, 80: 57.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
COUNTED = replace(GREEDY, logit_bias=WORDS, frequency_penalty=0.4)
PARAMS = [
    replace(COUNTED, presence_penalty=1.5),
    replace(COUNTED, frequency_penalty=-0.3, repetition_penalty=1.02),
    replace(COUNTED, temperature=0.8, top_p=0.95, seed=3, frequency_penalty=0.9),
    GREEDY,
    replace(GREEDY, repetition_penalty=1.5, presence_penalty=-0.5, frequency_penalty=2.0),
    replace(COUNTED, min_tokens=9, stop_token_ids=(STOP_ID,), repetition_penalty=1.1),
    replace(GREEDY, temperature=1.4, top_k=40, min_p=0.01, seed=8, repetition_penalty=0.7),
    replace(GREEDY, temperature=1.0, seed=9),
]  # fmt: skip

MTP = {"speculative_algorithm": "mtp", "speculative_num_steps": 3}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}


def _prompts() -> list[list[int]]:
    """Prompts that hold some of the words."""
    rng = random.Random(5)
    ids = [*WORDS, *range(2, 40)]
    return [[rng.choice(ids) for _ in range(1 + 6 * i)] for i in range(len(PARAMS))]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The model of `tiny_checkpoint`."""
    return Oracle(tiny.build("qwen3_5", scaled=True, seed=tiny.VETTED_SEED)[1])


def _run(llm: LLM) -> list[GenerationResult]:
    results: list[GenerationResult] = llm.generate(_prompts(), PARAMS)
    return results


def _check(results: list[GenerationResult], oracle: Oracle) -> None:
    for result, params in zip(results, PARAMS, strict=True):
        oracle.check_tokens(result, params, params.stop_token_ids)


def _retracting(llm: LLM, period: int) -> LLM:
    """Send requests back to waiting again and again."""
    scheduler = llm.engine.scheduler
    schedule, calls = scheduler.schedule, []

    def retract_and_schedule() -> object:
        calls.append(None)
        running: list[Request] = list(scheduler._running)
        if len(calls) % period == 0:
            for victim in reversed(running[1:]):
                scheduler._retract(victim)
        return schedule()

    scheduler.schedule = retract_and_schedule  # type: ignore[method-assign, assignment]
    return llm


@pytest.mark.parametrize("options", [
    {"max_running_requests": 1},
    {"max_running_requests": 3},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 3, **NGRAM},
    {"chunked_prefill_size": 7},
    NGRAM,
    {"speculative_algorithm": "ngram", "speculative_num_steps": 7},
], ids=str)  # fmt: skip
def test_every_token_is_the_formulas(
    make_llm: MakeLLM, oracle: Oracle, options: dict[str, Any]
) -> None:
    llm = make_llm(**options)
    _check(_run(llm), oracle)
    assert (llm.engine.scheduler.counters.num_accepted > 20) == ("speculative_algorithm" in options)


@pytest.mark.parametrize(("options", "period"), [({}, 1), (NGRAM, 2), (NGRAM, 5)], ids=str)
def test_after_forced_retraction(
    make_llm: MakeLLM, oracle: Oracle, options: dict[str, Any], period: int
) -> None:
    llm = _retracting(make_llm(chunked_prefill_size=16, **options), period)
    _check(_run(llm), oracle)
    assert llm.engine.scheduler.cache_counters.num_retractions > 10


def test_parameters_matter(make_llm: MakeLLM) -> None:
    """What the other tests compare would differ without each of them."""
    llm = make_llm()
    neutral = {
        "logit_bias": None, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "min_tokens": 0,
    }  # fmt: skip
    edited = [result.token_ids for result in _run(llm)]
    for name, value in neutral.items():
        without = [replace(params, **{name: value}) for params in PARAMS]
        changed = [result.token_ids for result in llm.generate(_prompts(), without)]
        differs = [a != b for a, b in zip(edited, changed, strict=True)]
        assert any(differs), name
        for params, own in zip(PARAMS, differs, strict=True):
            assert not own or vars(params)[name] != value, name


def test_speculation_changes_no_token_of_the_bundled_model() -> None:
    question = [{"role": "user", "content": "Count from one to twenty in words and digits."}]
    params = [
        replace(GREEDY, max_tokens=40, frequency_penalty=0.6, ignore_eos=True),
        replace(GREEDY, max_tokens=40, presence_penalty=2.0, repetition_penalty=1.2),
        replace(GREEDY, max_tokens=40, temperature=0.7, seed=2, frequency_penalty=-0.4),
        replace(GREEDY, max_tokens=40),
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_checkpoint()).eval()
    oracle, found = Oracle(model), []
    for options in ({"speculative_algorithm": "none"}, MTP, NGRAM):
        llm = LLM(dtype="float64", max_running_requests=4, max_model_len=160, **options)
        results = llm.generate([question] * 4, params)
        found.append([result.token_ids for result in results])
        accepted = llm.engine.scheduler.counters.num_accepted
        assert accepted > (10 if options is MTP else -1)
    assert found[1] == found[0]
    assert found[2] == found[0]
    for result, own in zip(results, params, strict=True):
        oracle.check_tokens(result, own)


def _planted_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the window's start only."""
    monkeypatch.setattr(EditRows, "after", lambda rows, tokens: rows)


def _planted_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave counts of tokens behind that were sampled after a rejected draft."""
    honest = SlotTable.count

    def count(table: SlotTable, slots: Tensor, tokens: Tensor, is_emitted: Tensor) -> None:
        honest(table, slots, tokens, torch.ones_like(is_emitted))

    monkeypatch.setattr(SlotTable, "count", count)


def _planted_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count nothing that is emitted."""
    monkeypatch.setattr(SlotTable, "count", lambda *args: None)


def _planted_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the counts of a slot's last request in place."""
    honest = SlotTable.recount

    def recount(table: SlotTable, inputs: dict[str, Tensor]) -> None:
        before = table.output_counts.clone()
        honest(table, inputs)
        slots = inputs["counted_slots"]
        table.output_counts.index_add_(0, slots, before.index_select(0, slots))

    monkeypatch.setattr(SlotTable, "recount", recount)


def _planted_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what a retracted request has generated for prompt."""
    monkeypatch.setattr(slot_table, "_generated", lambda segment: [])


def _planted_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget all chunks of a prompt but the last."""
    honest = slot_table.count_arrays

    def count_arrays(segments: Sequence[PrefillSegment], vocab_size: int) -> dict[str, Any]:
        found = honest(segments, vocab_size)
        (segment,) = segments
        return {**found, "prompt_entries": found["prompt_entries"][segment.start :]}

    monkeypatch.setattr("gapless.runner.prefill.count_arrays", count_arrays)


@pytest.mark.parametrize(
    ("plant", "options", "period"),
    [
        (_planted_no_drafts, NGRAM, None),
        (_planted_rejected, NGRAM, None),
        (_planted_uncounted, {}, None),
        (_planted_stale, {"max_running_requests": 2}, None),
        (_planted_roles, {}, 5),
        (_planted_chunk, {"chunked_prefill_size": 7, "max_running_requests": 1}, None),
    ],
)
def test_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    period: int | None,
    make_llm: MakeLLM,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    llm = make_llm(**options)
    if period is not None:
        llm = _retracting(llm, period)
    with pytest.raises(AssertionError, match=r"^token \d+ is"):
        _check(_run(llm), oracle)


@pytest.mark.parametrize("options", [{}, NGRAM], ids=["plain", "ngram"])
def test_neighbours_are_unchanged(make_llm: MakeLLM, options: dict[str, Any]) -> None:
    plain = [replace(GREEDY, logprobs=1), replace(GREEDY, temperature=1.3, seed=4, logprobs=0)]
    beside = [PARAMS[0], PARAMS[2], PARAMS[4]]
    llm = make_llm(**options)
    alone = llm.generate(_prompts()[:2], plain)
    mixed = llm.generate(_prompts()[:2] + _prompts()[3:6], plain + beside)
    for one, other in zip(alone, mixed, strict=False):
        assert one.token_ids == other.token_ids
        found = [entry.logprob for entry in other.completions[0].logprobs]
        wanted = [entry.logprob for entry in one.completions[0].logprobs]
        assert found == pytest.approx(wanted, abs=1e-12)


def test_slots_forget_bias_and_penalties(make_llm: MakeLLM) -> None:
    """A slot's next request starts clean, in batches that edit logits too."""
    llm = make_llm(max_running_requests=1)
    later = replace(GREEDY, min_tokens=3, stop_token_ids=(3,), max_tokens=12)
    wanted = make_llm(max_running_requests=1).generate(_prompts()[2], later).token_ids
    for params in (PARAMS[1], PARAMS[4]):
        llm.generate(_prompts()[1], params)
        assert llm.generate(_prompts()[2], later).token_ids == wanted


def test_bias_forces_and_forbids(make_llm: MakeLLM) -> None:
    llm = make_llm()
    forced = llm.generate([5, 6], replace(GREEDY, logit_bias={255: 100.0}, max_tokens=6))
    assert forced.token_ids == (255,) * 6
    plain = llm.generate([5, 6], replace(GREEDY, temperature=1.0, seed=1))
    forbidden = set(plain.token_ids)
    params = replace(GREEDY, temperature=1.0, seed=1, logit_bias=dict.fromkeys(forbidden, -100.0))
    assert forbidden.isdisjoint(llm.generate([5, 6], params).token_ids)
    most = {i: 100.0 if i == 63 else -100.0 for i in range(64)}
    assert (
        llm.generate([5, 6], replace(GREEDY, logit_bias=most, max_tokens=2)).token_ids == (63,) * 2
    )


BAD = [
    ("repetition_penalty", [0.0, -1.0, 2e6, NAN, INF, None, True, "1"], "above 0.0"),
    ("frequency_penalty", [-2.1, 2.1, NAN, INF, None, True], "of at least -2.0 and at most 2.0"),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, None, True], "of at least -2.0 and at most 2.0"),
    ("logit_bias", [[(1, 2.0)], "5", 5], "want a mapping of token ids to numbers"),
    ("logit_bias", [{-1: 1.0}, {1.5: 1.0}, {True: 1.0}, {"5": 1.0}], "want an integer from 0"),
    ("logit_bias", [{5: 100.5}, {5: NAN}, {5: -INF}, {5: None}], "of at least -100.0 and at most"),
    ("logit_bias", [dict.fromkeys(range(65), 1.0)], "has 65 ids, at most 64 are held"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "values", "message"), BAD)
def test_bad_values_are_refused(field: str, values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=message) as caught:
            SamplingParams(**{field: value})
        assert str(caught.value).startswith(field)


def test_bias_of_an_id_outside_the_vocabulary_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest, match="logit_bias holds token id 256; want 0 to 255"):
        llm.generate([5], replace(GREEDY, logit_bias={256: 1.0}))
    assert len(llm.generate([5], replace(GREEDY, logit_bias={255: 1.0})).token_ids) == 24


def test_parameters_are_hashed_and_keep_a_copy_of_the_bias() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[6] = 1e9
    assert params.logit_bias == {5: 1.0}
    assert params != SamplingParams()
    assert len({params, SamplingParams(logit_bias={5: 1.0})}) == 1
