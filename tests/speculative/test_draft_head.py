"""Drafts read from a float8 copy of the vocabulary head: now and then others, same output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.assets import heldout
from gapless.ops.skinny_linear.tuning import MAX_ROWS
from tests.engine_fixtures import runner_of

if TYPE_CHECKING:
    from gapless.models.decoder import Decoder

SMALL: dict[str, Any] = {"max_running_requests": 4, "max_model_len": 300}
TREE = {"speculative_topk": 3, "speculative_num_draft_tokens": 9}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SEEDED = SamplingParams(temperature=1.1, top_p=0.95, seed=5, max_tokens=40)


def questions(count: int) -> list[list[dict[str, str]]]:
    lines = heldout("level1").read_text().splitlines()[:count]
    return [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]


def model_of(llm: LLM) -> Decoder:
    return runner_of(llm).device.model


@pytest.mark.parametrize("options", [{}, TREE], ids=["chain", "tree"])
def test_tokens_are_those_without_drafts(options: dict[str, Any]) -> None:
    params = [GREEDY, SEEDED, GREEDY, SEEDED]
    tokens, proposed = [], []
    for changes in ({"speculative_algorithm": "none"}, {"draft_head_dtype": "fp8", **options}):
        llm = LLM(**SMALL, dtype="float64", **changes)
        tokens.append([result.token_ids for result in llm.generate(questions(4), params)])
        proposed.append(llm.engine.scheduler.counters.num_accepted)
    assert tokens[0] == tokens[1]
    assert proposed[0] == 0 < proposed[1]


def test_drafts_read_the_copy_and_the_target_does_not() -> None:
    llm = LLM(**SMALL, dtype="float32", draft_head_dtype="fp8")
    expected = [result.token_ids for result in llm.generate(questions(2), GREEDY)]
    assert llm.engine.scheduler.counters.num_accepted > 0
    copy = model_of(llm)._draft_head
    assert copy is not None
    # of equal logits the first is drafted
    copy.scales.zero_()
    llm.flush_cache()
    before = llm.engine.scheduler.counters.num_accepted
    assert [result.token_ids for result in llm.generate(questions(2), GREEDY)] == expected
    gained = llm.engine.scheduler.counters.num_accepted - before
    assert gained <= sum(list(tokens).count(0) for tokens in expected)


def test_few_rows_read_the_copy_and_many_the_head() -> None:
    model = model_of(LLM(**SMALL, dtype="float32", draft_head_dtype="fp8"))
    most, size = MAX_ROWS[-1], model.architecture.hidden_size
    hidden = torch.randn(most + 1, size)
    with torch.inference_mode():
        exact, drafted = model.logits(hidden), model.draft_logit_shard(hidden).whole()
        few = model.draft_logit_shard(hidden[:most]).whole()
    assert torch.equal(drafted, exact)
    assert few.dtype is torch.float32
    error = float((few - exact[:most]).norm() / exact[:most].norm())
    # three bits behind the leading one, rounded evenly
    assert 0.005 < error < 0.04


def test_heads_of_models_without_a_copy_are_the_same() -> None:
    model = model_of(LLM(**SMALL, dtype="float64"))
    hidden = torch.randn(3, model.architecture.hidden_size, dtype=torch.float64)
    assert model._draft_head is None
    assert torch.equal(model.draft_logit_shard(hidden).whole(), model.logits(hidden))


def _accepted(count: int, **options: Any) -> float:
    """Mean accepted drafts per step on some held-out problems, greedy."""
    llm = LLM(max_running_requests=32, **options)
    llm.generate(questions(count), SamplingParams(temperature=0.0, max_tokens=256))
    return llm.engine.scheduler.counters.accepted_len - 1


@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_as_many_drafts_are_right(count: int) -> None:
    exact = _accepted(count, draft_head_dtype="model")
    copied = _accepted(count, draft_head_dtype="fp8")
    print(f"accepted per step: {exact:.4f} with the model's head, {copied:.4f} with its copy")
    assert copied > 0.99 * exact
