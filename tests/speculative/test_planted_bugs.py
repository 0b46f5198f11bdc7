"""Breaking a rule of speculation must be noticed by the checks that guard it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gapless import LLM, SamplingParams
from gapless.ops.acceptance import reference as acceptance
from gapless.runner import choice, decode
from gapless.speculative import mtp
from tests.speculative import test_state

OPTIONS: dict[str, Any] = {"max_running_requests": 3, "max_model_len": 128, "dtype": "float64"}
QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in (
        "Ann has 4 boxes with 6 pens each. How many pens are there?",
        "What is the capital of France?",
        "Tom has 7 pens and buys 8 more. How many pens does he have now?",
    )
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(temperature=1.1, seed=5, max_tokens=40),
    SamplingParams(temperature=0.8, top_k=30, seed=6, max_tokens=40),
]


def _tokens(**options: Any) -> list[tuple[int, ...]]:
    llm = LLM(**{**OPTIONS, **options})
    return [result.token_ids for result in llm.generate(QUESTIONS, PARAMS)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    return _tokens(speculative_num_steps=0)


def test_control(plain: list[tuple[int, ...]]) -> None:
    assert _tokens() == plain


def test_noise_keyed_on_the_step(
    plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = choice.sample, []

    def by_step(logits: Tensor, positions: Tensor, rows: Any, **mode: Any) -> Tensor:
        calls.append(None)
        return honest(logits, torch.full_like(positions, len(calls)), rows, **mode)

    monkeypatch.setattr(choice, "sample", by_step)
    assert _tokens() != plain


def test_drafts_kept_without_comparing(
    plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = acceptance.accept_chain

    def trusting(sampled: Tensor, window: Tensor, *rest: Any) -> Any:
        return honest(sampled, torch.cat((window[:, :1], sampled[:, :-1]), 1), *rest)

    monkeypatch.setattr(acceptance, "accept_chain", trusting)
    assert _tokens() != plain


def test_index_0_of_mtp_kv_unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index 0 is never written: attending to it poisons the drafts, and acceptance falls."""
    llm = LLM(**OPTIONS)
    llm.generate(QUESTIONS, PARAMS)
    good = llm.engine.scheduler.counters.accepted_len
    monkeypatch.setattr(mtp, "FIRST_INDEX", 0)
    broken = LLM(**OPTIONS)
    broken.generate(QUESTIONS, PARAMS)
    assert good > 2.5
    assert broken.engine.scheduler.counters.accepted_len < good - 0.5


def test_double_fold_on_done_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint length that stays behind what was folded folds twice."""
    honest = decode.accept

    def forgets(device: Any, *rest: Any) -> Any:
        before = device.table.columns.checkpoint_len.clone()
        out = honest(device, *rest)
        device.table.columns.checkpoint_len.copy_(before)
        return out

    # cached for all tests, so of honest steps
    test_state.answer()
    monkeypatch.setattr(decode, "accept", forgets)
    with pytest.raises(AssertionError):
        test_state.test_state_is_that_of_a_fresh_prefill(3, 4, {})


def test_drafts_from_the_rejected_end_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on from the window's last token instead of the newest loses most drafts."""
    honest = mtp.MtpDrafter.read_window

    def at_the_end(self: mtp.MtpDrafter, outcome: Any) -> Tensor:
        full = torch.full_like(outcome.lens, outcome.tokens.shape[1])
        return honest(self, type(outcome)(**{**vars(outcome), "lens": full}))

    good, broken = LLM(**OPTIONS), LLM(**OPTIONS)
    good.generate(QUESTIONS, PARAMS[1])
    monkeypatch.setattr(mtp.MtpDrafter, "read_window", at_the_end)
    broken.generate(QUESTIONS, PARAMS[1])
    assert (
        broken.engine.scheduler.counters.accepted_len < good.engine.scheduler.counters.accepted_len
    )
