"""Whole engines whose prefill is padded as on a GPU: the tokens of engines that pad nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gapless import LLM, SamplingParams
from gapless.config import resolve
from tests.engine_fixtures import runner_of

MakeLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = SamplingParams(temperature=1.2, top_k=50, top_p=0.95, seed=11, max_tokens=14)
OPTIONS: dict[str, dict[str, Any]] = {
    "no drafts": {"speculative_algorithm": "none"},
    "few slots, short chunks": {"max_running_requests": 3, "chunked_prefill_size": 7},
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_steps": 2},
}


def _prompts() -> list[list[int]]:
    """Unrelated prompts, then ones that go on where others branch off."""
    rng = random.Random(5)
    found = [[rng.randrange(2, 256) for _ in range(length)] for length in (1, 40, 23, 57)]
    return found + [base[:cut] + found[2][:6] for base in found[1:] for cut in (16, 19)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_as_without_padding(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    params = [replace(DRAWN, seed=i) if i % 3 else GREEDY for i in range(len(_prompts()))]
    exact = make_llm(disable_prefix_cache=True, **options)
    monkeypatch.setattr(resolve, "prefill_buckets", lambda *_: (8, 64, 512))
    padded = make_llm(**options)
    prefill = runner_of(padded)._prefill
    honest, not_padded = prefill._run_exactly, []

    def exactly(segments: Any) -> Any:
        not_padded.append(segments)
        return honest(segments)

    prefill._run_exactly = exactly  # type: ignore[method-assign]
    wanted = [result.token_ids for result in exact.generate(_prompts(), params)]
    for _ in range(2):
        assert [r.token_ids for r in padded.generate(_prompts(), params)] == wanted
    assert padded.cache_counters.num_hits >= len(wanted)
    # a drafter that reads cached text asks for what varies in size
    is_ngram = options.get("speculative_algorithm") == "ngram"
    assert all(any(s.start and s.is_first for s in segments) for segments in not_padded)
    assert bool(not_padded) == is_ngram
