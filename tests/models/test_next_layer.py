"""The MTP layer behind the last: its drafts are transformers' own, and change no output."""

from __future__ import annotations

import copy
import logging
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.errors import WeightMismatch
from tests.engine_fixtures import runner_of
from tests.models import tiny
from tests.models.reference import float32_means_float64, hidden_states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

NAMES = ["deepseek_v3", "glm4_moe"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPT = [17, 5, 203, 99, 4, 61, 250]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any, Any]]:
    """Return checkpoint, model and MTP model of a tiny model, by name."""
    kept: dict[str, tuple[Path, Any, Any]] = {}

    def make(name: str) -> tuple[Path, Any, Any]:
        if name not in kept:
            _, model = tiny.build(name, scaled=True, seed=tiny.VETTED_SEED)
            directory = tiny.save(model, tmp_path_factory.mktemp(name))
            layer = tiny.next_layer(model, seed=4)
            tiny.add_next_layer(directory, layer)
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(demo_checkpoint() / file, directory / file)
            kept[name] = directory, model, layer
        return kept[name]

    return make


def make_llm(directory: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "max_running_requests": 4, "max_model_len": 200}
    return LLM(str(directory), **{**defaults, **options})


class Chain:
    """Transformers' MTP layer, over whole sequences without a cache, in float64."""

    def __init__(self, layer: Any) -> None:
        self._layer = copy.deepcopy(layer).double()
        rotary = self._layer.rotary_emb
        with float32_means_float64():
            rotary.inv_freq, _ = rotary.compute_default_rope_parameters(self._layer.config)

    def drafts(self, tokens: list[int], hidden: Tensor, count: int) -> list[int]:
        """Draft after `tokens`, of which `hidden` [n - 1, D] are the trunk's states."""
        ids, states, found = tokens[1:], hidden, []
        with float32_means_float64(), torch.no_grad():
            for _ in range(count):
                positions = torch.arange(1, len(ids) + 1)[None]
                out = self._layer.forward_layer(
                    0, states[None], positions, None, input_ids=torch.tensor([ids])
                )[0]
                found.append(int((self._layer.shared_head(out[-1:])).argmax()))
                ids, states = [*ids, found[-1]], torch.cat([states, out[-1:]])
        return found


@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_every_step_are_those_of_transformers(
    made: Callable[[str], tuple[Path, Any, Any]], name: str
) -> None:
    directory, model, layer = made(name)
    chain = Chain(layer)
    plain = make_llm(directory, speculative_algorithm="none").generate(PROMPT, PARAMS)
    tokens = [*PROMPT, *plain.token_ids]
    hidden = hidden_states(model, torch.tensor([tokens]), torch.float64)[0]
    llm = make_llm(directory, max_running_requests=1, chunked_prefill_size=4)
    assert (llm.engine.config.drafter, llm.engine.config.max_window) == ("mtp", 4)
    table = runner_of(llm).device.table
    stream, num_checked = llm.stream(PROMPT, PARAMS), 0
    for _ in range(12):
        next(stream)
        committed = int(table.columns.seq_lens[0])
        found = table.window_tokens[0].tolist()
        assert found[0] == tokens[committed]
        assert found[1:] == chain.drafts(tokens[: committed + 1], hidden[:committed], 3)
        num_checked += 1
    stream.close()
    assert num_checked == 12


@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_output_and_survive_the_cache(
    made: Callable[[str], tuple[Path, Any, Any]], name: str
) -> None:
    directory, _, _ = made(name)
    plain = make_llm(directory, speculative_algorithm="none", disable_prefix_cache=True)
    llm = make_llm(directory, chunked_prefill_size=16)
    cold = make_llm(directory, chunked_prefill_size=16, disable_prefix_cache=True)
    sampled = SamplingParams(temperature=1.1, top_k=40, seed=5, ignore_eos=True)
    base = [*range(30, 71)]
    prompts = [[9], base, [*base[:32], 7, 8], [*base[:17], 9], [*base, 11]]
    both = [prompt for prompt in prompts for _ in range(2)]
    params = [replace(own, max_tokens=16) for own in (PARAMS, sampled)] * len(prompts)
    expected, again = plain.generate(both, params), cold.generate(both, params)
    found = [r for prompt in prompts for r in llm.generate([prompt] * 2, params[:2])]
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [r.token_ids for r in again] == [r.token_ids for r in expected]
    # drafts are as good only if the layer's pages are the same
    for warm, fresh in zip(found, again, strict=True):
        counters = warm.completions[0].counters, fresh.completions[0].counters
        assert counters[0].accepted_at == counters[1].accepted_at
    assert llm.cache_counters.num_hits >= 4
    assert llm.engine.scheduler.counters.num_proposed > 100


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_is_skipped_without_speculation(
    made: Callable[[str], tuple[Path, Any, Any]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _, _ = made(name)
    with caplog.at_level(logging.INFO):
        make_llm(directory, speculative_algorithm="none")
    skipped = [r.message for r in caplog.records if r.message.startswith("skipped")]
    assert any("speculation is off" in line for line in skipped)
    assert any("skipped 2 tensors (model.layers.4.*): the MTP layer shares" in s for s in skipped)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        make_llm(directory)
    skipped = [r.message for r in caplog.records if r.message.startswith("skipped")]
    assert len(skipped) == 1


def test_a_layer_that_lacks_a_tensor_is_refused(
    made: Callable[[str], tuple[Path, Any, Any]], tmp_path: Path
) -> None:
    directory, _, _ = made("deepseek_v3")
    weights = tiny.stored_weights(directory)
    del weights["model.layers.4.hnorm.weight"]
    shutil.copytree(directory, tmp_path / "odd")
    tiny.save_sharded(weights, tmp_path / "odd", 2)
    with pytest.raises(WeightMismatch, match=r"1 missing: model\.layers\.4\.hnorm\.weight"):
        make_llm(tmp_path / "odd")
