"""Engines of every kind of mixer: drafts change nothing, nothing waits, prompts may be cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM, SamplingParams
from gapless.runner.syncs import forbid_syncs
from tests.engine_fixtures import tiny_model
from tests.speculative.oracle import SCRIPTS, with_oracle

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

__all__ = ["tiny_model"]

TinyModel = Callable[[str], Path]
Tokens = list[tuple[int, ...]]

NAMES = [
    "kimi_linear", "deepseek_v2", "deepseek_v3", "glm4_moe", "bamba", "granitemoehybrid",
    "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe",
]  # fmt: skip
# one delta rule and attention side by side with a recurrence: each script and each way to cut;
# the other models differ in their layers, not in what drafts do
THOROUGH = {"kimi_linear", "falcon_h1"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.2, top_k=60, seed=3)


def swept(values: Iterable[Any], kept: Any) -> list[ParameterSet]:
    """Pair values with models: one value for each model, the others of most are slow."""
    return [
        pytest.param(
            value, name, marks=() if value == kept or name in THOROUGH else pytest.mark.slow
        )
        for value in values
        for name in NAMES
    ]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    found = [[rng.randrange(2, 256) for _ in range(n)] for n in (1, 33, 18, 5)]
    return [*found, [7, 8, 9] * 11]


def params() -> list[SamplingParams]:
    return [replace(SAMPLED, seed=i) if i % 2 else replace(GREEDY, seed=i) for i in range(5)]


def make(path: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "max_running_requests": 3, "max_model_len": 200}
    return LLM(str(path), **{**defaults, **options})


def tokens(llm: LLM) -> Tokens:
    found = [result.token_ids for result in llm.generate(prompts(), params())]
    llm.engine.scheduler.check_conserved()
    return found


@pytest.fixture(scope="module")
def plain(tiny_model: TinyModel) -> Callable[[str], Tokens]:
    """Tokens without speculation, each request alone, by model."""
    kept: dict[str, Tokens] = {}

    def run(name: str) -> Tokens:
        if name not in kept:
            llm = make(tiny_model(name), max_running_requests=1, disable_prefix_cache=True)
            kept[name] = tokens(llm)
        return kept[name]

    return run


@pytest.mark.parametrize(("script", "name"), swept(SCRIPTS, "random"))
def test_scripted_drafts_equal_plain(
    tiny_model: TinyModel, plain: Callable[[str], Tokens], name: str, script: str
) -> None:
    truth = {
        (*prompt, own.seed or 0): found
        for prompt, own, found in zip(prompts(), params(), plain(name), strict=True)
    }
    drafting = {"speculative_algorithm": "ngram", "speculative_num_steps": 3}
    llm = with_oracle(make(tiny_model(name), **drafting), truth, script)
    assert tokens(llm) == plain(name)
    counters = llm.engine.scheduler.counters
    assert counters.num_proposed > 0
    assert (counters.num_accepted > 0) is (script != "none")


@pytest.mark.parametrize(("chunk", "name"), swept([3, 64], 3))
def test_ngram_drafts_and_cut_prompts_equal_plain(
    tiny_model: TinyModel, plain: Callable[[str], Tokens], name: str, chunk: int
) -> None:
    llm = make(
        tiny_model(name), speculative_algorithm="ngram", speculative_num_steps=4,
        chunked_prefill_size=chunk, page_size=8,
    )  # fmt: skip
    assert tokens(llm) == plain(name)
    assert llm.engine.scheduler.counters.num_proposed > 0


@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_for_the_device(tiny_model: TinyModel, name: str) -> None:
    llm = make(tiny_model(name), speculative_algorithm="ngram", speculative_num_steps=2)
    launch = llm.engine._loop._run
    num_steps = 0

    def guarded(plan: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        with forbid_syncs():
            return launch(plan)

    llm.engine._loop._run = guarded
    llm.generate(prompts(), [replace(own, max_tokens=5) for own in params()])
    assert num_steps > 5
