"""Nemotron-H's MTP layer: its drafts are those of transformers' own layers, put together."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

from gapless import LLM, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.config.hf import read_hf_config
from gapless.core.footprint import num_mtp_parameters
from gapless.errors import UnsupportedModel
from gapless.models.registry import read_architecture
from tests.engine_fixtures import runner_of
from tests.models import tiny
from tests.models.reference import float32_means_float64, hidden_states

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.1, top_k=40, seed=5, ignore_eos=True)
PROMPT = [17, 5, 203, 99, 4, 61, 250]


class Layer(nn.Module):
    """Norms, merge, attention and experts, under the names that checkpoints have."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layers_block_type = ["full_attention", "moe"]
        config._attn_implementation = "sdpa"
        config._experts_implementation = "eager"
        size, eps = config.hidden_size, config.layer_norm_epsilon
        first, last = (NemotronHBlock(config, index) for index in range(2))
        first.enorm, first.hnorm = NemotronHRMSNorm(size, eps), NemotronHRMSNorm(size, eps)
        first.eh_proj = nn.Linear(2 * size, size, bias=False)
        last.final_layernorm = NemotronHRMSNorm(size, eps)
        self.layers = nn.ModuleList([first, last])

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Map embeddings [T, D] and the states before them to states."""
        first, last = self.layers
        x = first.eh_proj(torch.cat([first.enorm(embedded), first.hnorm(hidden)], -1))[None]
        return last.final_layernorm(last(first(x)))[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Layer]:
    """Return checkpoint, model and MTP layer."""
    _, model = tiny.build("nemotron_h", scaled=True, seed=tiny.VETTED_SEED)
    directory = tiny.save(model, tmp_path_factory.mktemp("nemotron"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        layer = Layer(model).eval()
    tiny.spread(layer, torch.Generator().manual_seed(7))
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    weights = tiny.stored_weights(directory)
    for name, tensor in layer.state_dict().items():
        stem, _, kind = name.partition(".experts.")
        if kind:
            for expert, weight in enumerate(tensor):
                weights[f"mtp.{stem}.experts.{expert}.{kind}.weight"] = weight.clone()
        else:
            weights[f"mtp.{name}"] = tensor.clone()
    (directory / "model.safetensors").unlink()
    tiny.save_sharded(weights, directory, 2)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_checkpoint() / file, directory / file)
    return directory, model, layer


def make_llm(directory: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "max_running_requests": 4, "max_model_len": 200}
    return LLM(str(directory), **{**defaults, **options})


def drafts(
    model: Any, layer: Layer, tokens: list[int], hidden: Tensor, count: int
) -> list[int]:  # fmt: skip
    """Draft after `tokens`, of which `hidden` [n - 1, D] are the trunk's states."""
    ids, states, found = tokens[1:], hidden, []
    with float32_means_float64(), torch.no_grad():
        for _ in range(count):
            out = layer(model.model.embeddings(torch.tensor(ids)), states)
            found.append(int(model.lm_head(out[-1]).argmax()))
            ids, states = [*ids, found[-1]], torch.cat([states, out[-1:]])
    return found


def test_drafts_of_every_step_are_those_of_the_reference(made: tuple[Path, Any, Layer]) -> None:
    directory, model, layer = made
    model, wide = copy.deepcopy(model), copy.deepcopy(layer).double()
    plain = make_llm(directory, speculative_algorithm="none").generate(PROMPT, PARAMS)
    tokens = [*PROMPT, *plain.token_ids]
    hidden = hidden_states(model, torch.tensor([tokens]), torch.float64)[0]
    llm = make_llm(directory, max_running_requests=1, chunked_prefill_size=4)
    assert (llm.engine.config.drafter, llm.engine.config.max_window) == ("mtp", 4)
    table = runner_of(llm).device.table
    stream = llm.stream(PROMPT, PARAMS)
    model = model.double()
    for _ in range(12):
        next(stream)
        committed = int(table.columns.seq_lens[0])
        found = table.window_tokens[0].tolist()
        assert found[0] == tokens[committed]
        assert found[1:] == drafts(model, wide, tokens[: committed + 1], hidden[:committed], 3)
    stream.close()


def test_drafts_change_no_output_and_survive_the_cache(made: tuple[Path, Any, Layer]) -> None:
    directory, _, _ = made
    plain = make_llm(directory, speculative_algorithm="none", disable_prefix_cache=True)
    llm = make_llm(directory, chunked_prefill_size=16)
    cold = make_llm(directory, chunked_prefill_size=16, disable_prefix_cache=True)
    base = [*range(30, 71)]
    prompts = [[9], base, [*base[:32], 7, 8], [*base[:17], 9], [*base, 11]]
    both = [prompt for prompt in prompts for _ in range(2)]
    params = [replace(own, max_tokens=16) for own in (PARAMS, SAMPLED)] * len(prompts)
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


def test_the_layers_weights_are_counted(made: tuple[Path, Any, Layer]) -> None:
    directory, _, layer = made
    spec = read_architecture(read_hf_config(directory))
    biases = sum(b.numel() for n, b in layer.named_buffers() if n.endswith(tiny.ROUTER_BIASES))
    expected = sum(weight.numel() for weight in layer.parameters()) + biases
    assert num_mtp_parameters(spec) == expected


@pytest.mark.parametrize("pattern", ["*", "E*", "M-", "*E-"])
def test_other_layers_are_refused(
    made: tuple[Path, Any, Layer], tmp_path: Path, pattern: str
) -> None:
    config = json.loads((made[0] / "config.json").read_text())
    del config["mtp_layers_block_type"]
    config["mtp_hybrid_override_pattern"] = pattern
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="want attention and a block behind it"):
        read_architecture(read_hf_config(tmp_path))
