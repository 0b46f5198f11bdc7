"""What warming up leaves behind is overwritten before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM, SamplingParams
from gapless.runner.warm_up import _plans
from tests.engine_fixtures import runner_of

if TYPE_CHECKING:
    from collections.abc import Callable

PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize("options", [
    {},
    {"speculative_algorithm": "ngram"},
    {"disable_prefix_cache": True},
    {"max_running_requests": 1, "chunked_prefill_size": 3},
    {"chunked_prefill_size": 20},
])  # fmt: skip
def test_requests_after_it_are_served_right(
    make_llm: Callable[..., LLM], options: dict[str, Any]
) -> None:
    fresh, warm = make_llm(**options), make_llm(**options)
    plans = list(_plans(warm.engine.config))
    for plan in plans:
        runner_of(warm).run(plan).wait()
    is_warmed = options.get("chunked_prefill_size") != 3 and "disable_prefix_cache" not in options
    assert any(plan.saves for plan in plans) == is_warmed
    prompts = [[5, 6, 7, 8], [9] * 40]
    assert [r.token_ids for r in warm.generate(prompts, PARAMS)] == [
        r.token_ids for r in fresh.generate(prompts, PARAMS)
    ]
    warm.engine.scheduler.check_conserved()
