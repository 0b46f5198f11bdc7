"""Whole engines whose operations run on Triton kernels, in the interpreter: layouts fit together.

Each kernel is tested beside its definition; what one hands to the next is not, on a CPU. Here
tensors say that they are on a GPU, so that operations take the way that they take there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.layers import recurrence
from gapless.layers.placement import Placement
from gapless.ops import chaining

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22]]
SLOW_MODELS = ("qwen3_5_moe", "deepseek_v3", "nemotron_h")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def slowly(name: str) -> Any:
    """A model whose kernels the interpreter takes a minute for."""
    return pytest.param(name, marks=[pytest.mark.slow, pytest.mark.timeout(600)])


def pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(chaining, "_can_chain", lambda _: False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there")
@pytest.mark.parametrize("name", ["qwen3_5", *map(slowly, SLOW_MODELS)])
def test_kernels_give_the_tokens_of_definitions(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # matrices lie as on a GPU
    monkeypatch.setattr(Placement, "is_input_major", property(lambda _: False))
    llm = LLM(str(tiny_model(name)), dtype="float32", max_running_requests=3, max_model_len=64)
    expected = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    llm.flush_cache()
    pretend_a_gpu(monkeypatch)
    assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there")
@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear"])
def test_prefill_of_delta_rules_copies_no_input(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels within chunks want inputs contiguous, and the layers have made them so."""
    honest, found = recurrence.chunk_prefill, []

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append([x.is_contiguous() for x in args[:5]])
        return honest(*args, **kwargs)

    monkeypatch.setattr(recurrence, "chunk_prefill", watched)
    monkeypatch.setattr(Placement, "is_input_major", property(lambda _: False))
    llm = LLM(str(tiny_model(name)), dtype="float32", max_running_requests=3, max_model_len=64)
    pretend_a_gpu(monkeypatch)
    found.clear()
    llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert found
    assert all(all(inputs) for inputs in found)
