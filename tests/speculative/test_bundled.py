"""How many drafts the bundled model's MTP layer gets right."""

from __future__ import annotations

import json

import pytest

from gapless import LLM, SamplingParams
from gapless.assets import heldout

GREEDY = SamplingParams(temperature=0.0, max_tokens=256)


def _accepted(name: str, count: int) -> float:
    """Mean accepted drafts per step on some held-out problems, greedy."""
    llm = LLM(max_running_requests=32)
    lines = heldout(name).read_text().splitlines()[:count]  # type: ignore[arg-type]
    llm.generate([[{"role": "user", "content": json.loads(x)["question"]}] for x in lines], GREEDY)
    return llm.engine.scheduler.counters.accepted_len - 1


def _accepted_prose(count: int, num_tokens: int) -> float:
    llm = LLM(max_running_requests=32)
    lines = heldout("text").read_text().splitlines()[:count]
    prompts = [llm.encode(json.loads(line)["text"])[:256] for line in lines]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    llm.generate(prompts, params)
    return llm.engine.scheduler.counters.accepted_len - 1


def test_word_problems() -> None:
    assert _accepted("level1", 12) >= 2.7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["level1", "level2"])
def test_all_word_problems(name: str) -> None:
    assert _accepted(name, 500) >= 2.7


def test_prose() -> None:
    assert _accepted_prose(10, 128) >= 1.4


@pytest.mark.slow
def test_all_prose() -> None:
    assert _accepted_prose(35, 256) >= 1.4
