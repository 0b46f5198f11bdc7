"""No hidden host-device synchronisation: the guard sees each kind, and the hot loop has none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless import LLM, SamplingParams
from gapless.runner.syncs import HiddenSync, count_calls, forbid_syncs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VIOLATIONS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.flatten()[0].item(),
    "float": lambda x: float(x.flatten()[0]),
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if (x > 0).all() else 2,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "np.asarray": np.asarray,
    "to device": lambda x: x.to("cpu"),
    "to device by keyword": lambda x: x.to(device=torch.device("cpu")),
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 0)[0],
    "boolean index": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "list index": lambda x: x[[0]],
    "tensor from list": lambda x: torch.tensor([1, 2]),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().abs().flatten().bincount(),
    "repeat_interleave by tensor": lambda x: x.repeat_interleave(torch.ones(x.shape[0]).long(), 0),
    "equal": lambda x: torch.equal(x, x),
}  # fmt: skip

HARMLESS: dict[str, Callable[[Tensor], Any]] = {
    "change of type": lambda x: x.to(torch.float64),
    "like another's type": lambda x: x.to(dtype=torch.bfloat16),
    "index by tensor": lambda x: x[torch.zeros(1, dtype=torch.int64)],
    "where of three": lambda x: torch.where(x > 0, x, 0.0),
    "repeat_interleave by number": lambda x: x.repeat_interleave(2, 0),
    "copy": lambda x: torch.empty_like(x).copy_(x, non_blocking=True),
}


def test_waits_are_counted_by_call_site() -> None:
    x = torch.arange(6.0)
    with count_calls() as counts:
        for _ in range(2):
            x.sum().item()
        x + 1
        x.tolist()
    assert sorted(counts.blocking.values()) == [1, 2]
    assert all("test_syncs.py:" in site for site in counts.blocking)


def test_a_served_request_waits_for_nothing_but_results() -> None:
    llm = LLM(max_running_requests=2, max_model_len=128)
    llm.generate("warm", SamplingParams(max_tokens=3))
    launch = llm.engine._loop._run
    blocking = []

    def counted(plan: Any) -> Any:
        with count_calls() as counts:
            handle = launch(plan)
        blocking.extend(counts.blocking)
        return handle

    llm.engine._loop._run = counted
    llm.generate("Ann has 4 boxes", SamplingParams(temperature=0.0, max_tokens=8))
    assert blocking == []


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_guard_sees(kind: str) -> None:
    x = torch.arange(6.0).view(2, 3) - 2
    VIOLATIONS[kind](x)
    with pytest.raises(HiddenSync), forbid_syncs():
        VIOLATIONS[kind](x)
    VIOLATIONS[kind](x)


@pytest.mark.parametrize("kind", HARMLESS)
def test_guard_lets_pass(kind: str) -> None:
    with forbid_syncs():
        HARMLESS[kind](torch.arange(6.0).view(2, 3) - 2)


def guarded(llm: LLM) -> LLM:
    """Launch every step of an engine under the guard; reading results stays outside."""
    launch = llm.engine._loop._run

    def run(plan: Any) -> Any:
        with forbid_syncs():
            return launch(plan)

    llm.engine._loop._run = run
    return llm


def _run_mixed(llm: LLM) -> None:
    """Requests come, end and pad: more of them than slots, of many lengths, with every option."""
    params = [
        SamplingParams(
            temperature=float(i % 2), top_k=5 * (i % 3), top_p=0.9, min_p=0.01, seed=i,
            max_tokens=2 + 3 * i, min_tokens=i % 3, n=1 + i % 2, stop_token_ids=(i,),
        )
        for i in range(6)
    ]  # fmt: skip
    edited = [
        replace(
            p, repetition_penalty=1 + i / 9, frequency_penalty=i / 7, presence_penalty=-i / 8,
            logit_bias={i: 2.0, 40 + i: -1.0}, logprobs=(None, 0, 5)[i % 3],
            prompt_logprobs=(2, None, 0)[i % 3],
        )
        for i, p in enumerate(params)
    ]  # fmt: skip
    prompts = [[3 + i] * (1 + 9 * i) for i in range(6)]
    for own in (params, edited, params[:3] + edited[3:]):
        llm.generate(prompts, own)
    llm.score([list(range(2, 40)), [9, 8, 7]])


def test_hot_loop_has_no_sync(tiny_checkpoint: Path) -> None:
    _run_mixed(
        guarded(
            LLM(str(tiny_checkpoint), max_running_requests=3, max_model_len=100,
                chunked_prefill_size=16)
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", sorted(set(VIOLATIONS) - {"tensor from list"}))
def test_planted_sync_is_caught(
    kind: str, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = guarded(LLM(str(tiny_checkpoint), max_running_requests=2, max_model_len=50))
    silu = F.silu

    def planted(x: Tensor) -> Tensor:
        VIOLATIONS[kind](x)
        return silu(x)

    monkeypatch.setattr(F, "silu", planted)
    with pytest.raises(HiddenSync):
        llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3))
