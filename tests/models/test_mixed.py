"""Kinds of layers that no published model has together, or that one has none of."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from gapless import LLM, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.config.hf import read_hf_config
from gapless.layers.placement import Placement
from gapless.models import registry
from gapless.models.loader import dummy_weights
from gapless.models.registry import read_architecture
from gapless.runner.syncs import forbid_syncs
from tests.engine_fixtures import runner_of
from tests.models import mixed, tiny
from tests.models.comparison import token_ids
from tests.models.driver import TeacherForced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIXES = {
    "all": ["delta", "mamba", "kimi", "attention", "conv", "block"],
    "parallel": ["mamba", "parallel", "block", "conv"],
    "fixed_decays": ["lightning", "attention", "lightning"],
    "fixed_and_found_decays": ["lightning", "delta", "conv"],
    "no_attention": ["block", "mamba", "conv", "delta"],
    "convolutions": ["conv", "block", "conv"],
    "no_linear": ["attention", "block", "attention"],
}
# between them they have all kinds of layers, and none of some
WIDE_MIXES = {"all", "fixed_decays", "no_attention", "no_linear"}
WIDEST = 5
PARAMS = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.1, top_k=50, seed=4, max_tokens=18, ignore_eos=True)
OFFSETS = (1, 3, 5, 15, 17, 40)
AT = pytest.mark.parametrize("name", MIXES)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.MODELS, "mixed", "tests.models.mixed")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a mix with made-up weights."""
    root = tmp_path_factory.mktemp("mixed")

    def written(name: str) -> Path:
        directory = root / name
        if not directory.exists():
            directory.mkdir()
            write(directory, kinds=MIXES[name])
        return directory

    return written


def write(directory: Path, weights: dict[str, torch.Tensor] | None = None, **config: Any) -> None:
    (directory / "config.json").write_text(
        json.dumps({"model_type": "mixed", "vocab_size": 256, **config})
    )
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_checkpoint() / file, directory / file)
    if weights is None:
        spec = mixed.architecture(read_hf_config(directory))
        place = Placement(torch.device("cpu"), torch.float64)
        targets = mixed.build(spec, place, num_positions=1).targets(())
        dummy_weights(targets, 11)
        weights = {name: target.contiguous() for name, target in targets.items()}
    save_file(weights, directory / "model.safetensors")


def serve(directory: Path) -> TeacherForced:
    # a model without attention has no use for the driver's pages
    no_pages = not read_architecture(read_hf_config(directory)).attention_layers
    return TeacherForced(directory, dtype="float64", **{"page_size": None} if no_pages else {})


def one_shot(directory: Path) -> torch.Tensor:
    forced = serve(directory)
    forced.prefill((0, token_ids()[0], 0))
    return forced.all_logits(0)


@AT
def test_every_path_gives_the_same(checkpoint: Callable[[str], Path], name: str) -> None:
    tokens, expected = token_ids()[0], one_shot(checkpoint(name))
    assert expected.std() > 0.1
    forced = serve(checkpoint(name))
    for start in range(0, 40, 3):
        forced.prefill((1, tokens[: min(start + 3, 40)], start))
    for token in tokens[40:]:
        forced.decode({1: token})
    assert (forced.all_logits(1) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("name", ["all", "parallel", "no_attention"])
def test_narrow_convolutions_are_wide_ones_with_zeros(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    weights = tiny.stored_weights(checkpoint(name))
    widths = {w.shape[2] for stored, w in weights.items() if w.ndim == 3 and "conv" in stored}
    assert len(widths) > 1
    assert max(widths) == WIDEST
    for stored, weight in weights.items():
        if weight.ndim == 3 and "conv" in stored:
            weights[stored] = torch.nn.functional.pad(weight, (WIDEST - weight.shape[2], 0))
    write(tmp_path, weights, kinds=MIXES[name], conv_width=WIDEST)
    assert (one_shot(checkpoint(name)) - one_shot(tmp_path)).abs().max() <= 1e-10


def make(directory: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float64", "max_running_requests": 3, "max_model_len": 200}
    return LLM(str(directory), **{**defaults, **options})


@contextmanager
def guarded(llm: LLM) -> Iterator[None]:
    """Launch steps where nothing may wait; reading results stays outside."""
    loop = llm.engine._loop
    launch = loop._run

    def run(plan: Any) -> Any:
        with forbid_syncs():
            return launch(plan)

    loop._run = run
    yield
    loop._run = launch


@pytest.mark.parametrize("name", [
    name if name in WIDE_MIXES else pytest.param(name, marks=pytest.mark.slow) for name in MIXES
])  # fmt: skip
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_prefixes_and_drafts_change_nothing(
    checkpoint: Callable[[str], Path], name: str, drafts: int
) -> None:
    options: dict[str, Any] = {"speculative_algorithm": "none"}
    if drafts:
        options = {"speculative_algorithm": "ngram", "speculative_num_steps": drafts}
    cold = make(checkpoint(name), speculative_algorithm="none", disable_prefix_cache=True)
    warm = make(checkpoint(name), chunked_prefill_size=24, host_cache_gb=0.01, **options)
    device = runner_of(warm).device
    for rows in device.row_blocks():
        rows[:, : device.geometry.num_state_rows] = float("nan")
    base = token_ids()[1][:50]
    with guarded(warm):
        turn = [*base, *warm.generate(base, PARAMS).token_ids]
    # the last one goes on from where a request ended, whose states are folded then
    prompts = [*([*base[:n], *token_ids()[2][:5]] for n in OFFSETS), [*turn, 9]]
    both = [prompt for prompt in prompts for _ in range(2)]
    expected = [r.token_ids for r in cold.generate(both, [PARAMS, SAMPLED] * len(prompts))]
    found = []
    for index, prompt in enumerate(prompts):
        with guarded(warm) if index == 0 else nullcontext():
            results = warm.generate([prompt] * 2, [PARAMS, SAMPLED])
        found += [result.token_ids for result in results]
    assert found == expected
    assert warm.cache_counters.num_hits >= len(OFFSETS) - 2
    assert warm.cache_counters.num_stores > 0
    warm.engine.scheduler.check_conserved()
