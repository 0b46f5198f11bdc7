"""The engine over host-made plans of FlashInfer's kind, with and without the plan stream."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, ConfigError, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.attention.reference import ReferenceAttention
from gapless.runner.plan_stream import PlanStream
from tests.attention.fake_flashinfer import FakeModule, fake_backend
from tests.engine_fixtures import runner_of
from tests.models import tiny
from tests.runner.late import make_late

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PARAMS = [GREEDY, SamplingParams(temperature=0.9, seed=4, max_tokens=9), GREEDY]
PROMPTS = [[5 + 3 * i for i in range(n)] for n in (9, 21, 1)]
COMMON: dict[str, Any] = {"dtype": "float64", "max_running_requests": 2, "max_model_len": 100}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 with its MTP layer."""
    _, model = tiny.build("deepseek_v3", scaled=True, seed=tiny.VETTED_SEED)
    directory = tiny.save(model, tmp_path_factory.mktemp("deepseek"))
    tiny.add_next_layer(directory, tiny.next_layer(model, seed=4))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo_checkpoint() / file, directory / file)
    return directory


def serve(checkpoint: Path, **options: Any) -> tuple[LLM, list[tuple[int, ...]], dict[str, Any]]:
    llm = LLM(str(checkpoint), **COMMON, **options)
    tokens = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    return llm, tokens, vars(llm.engine.scheduler.counters)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    return serve(checkpoint)[1:]


def _over_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, *, layers: Any, dtype: str, **sizes: Any) -> Any:
        wanted = {key: sizes[key] for key in ("page_size", "max_len", "max_rows")}
        return fake_backend(monkeypatch, spec=layers[0], dtype=vars(torch)[dtype], **wanted)

    monkeypatch.setattr("gapless.runner.device.make_backend", make)
    make_late(monkeypatch)


@pytest.mark.parametrize("options", [{}, {"plan_stream": True}, {"stage_graphs": True}])
def test_tokens_and_counts_are_those_of_plans_on_the_device(
    options: dict[str, Any],
    checkpoint: Path,
    plain: tuple[list[tuple[int, ...]], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _over_fake(monkeypatch)
    before = FakeModule.num_plans
    llm, *found = serve(checkpoint, **options)
    assert tuple(found) == plain
    launches = llm.engine.launch_counters
    # verify, extend and two passes of the drafter
    assert launches.num_plans == 4 * launches.num_steps
    assert FakeModule.num_plans - before == launches.num_plans
    beside = launches.num_steps if "plan_stream" in options else 0
    assert launches.num_planned_beside == beside
    per_step = 4 if "stage_graphs" in options else 3
    assert launches.num_launches == per_step * launches.num_steps
    assert launches.num_refills == 0


def test_plain_decoding(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = serve(checkpoint, speculative_algorithm="none")[1:]
    _over_fake(monkeypatch)
    llm, *found = serve(checkpoint, speculative_algorithm="none")
    assert tuple(found) == wanted
    launches = llm.engine.launch_counters
    assert launches.num_plans == launches.num_launches == launches.num_steps


class TreeCopies(ReferenceAttention):
    """Plans trees on the host: their links are copied then, and the step reads the copy.

    Beside drafting the slot table does not yet hold them. Here drafting has ended by the time that
    a plan is made, so such a plan finds nodes without links.
    """

    needs_cpu_seq_lens = True
    is_refilled = True

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.is_beside = False
        self._is_stale = False

    def plan_host(self, name: str, ends: np.ndarray, **rest: Any) -> None:
        if name == "verify":
            self._is_stale = self.is_beside

    def update_verify_buffers_to_fill_after_draft(self, name: str) -> None:
        assert name == "verify"
        self._is_stale &= not self.is_refilled

    def plan_window(self, slots: Any, positions: Any, table: Any, **rest: Any) -> Any:
        tree = rest.pop("tree", None)
        if rest.get("host_plan") == "verify" and self._is_stale:
            alone = 1 << torch.arange(positions.shape[1])
            tree = replace(tree, bits=alone.expand_as(tree.bits))
        return super().plan_window(slots, positions, table, tree=tree, **rest)


def _with_tree_copies(monkeypatch: pytest.MonkeyPatch) -> list[TreeCopies]:
    made: list[TreeCopies] = []

    def make(name: str, *, max_rows: int, has_tree: bool, **sizes: Any) -> TreeCopies:
        assert has_tree
        made.append(TreeCopies(**sizes))
        return made[-1]

    honest = PlanStream.run

    def beside(self: PlanStream, plan: Callable[[], None]) -> None:
        made[-1].is_beside = True
        honest(self, plan)
        made[-1].is_beside = False

    monkeypatch.setattr("gapless.runner.device.make_backend", make)
    monkeypatch.setattr(PlanStream, "run", beside)
    return made


TREE: dict[str, Any] = {"speculative_topk": 2, "speculative_num_draft_tokens": 6}


def test_trees_are_filled_again_after_drafting(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = serve(checkpoint, **TREE)[1:]
    _with_tree_copies(monkeypatch)
    for plan_stream in (False, True):
        llm, *found = serve(checkpoint, plan_stream=plan_stream, **TREE)
        assert tuple(found) == wanted
        launches = llm.engine.launch_counters
        assert launches.num_refills == plan_stream * launches.num_steps


def test_planted_without_the_second_fill_trees_are_wrong(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = serve(checkpoint, **TREE)[1:]
    _with_tree_copies(monkeypatch)
    monkeypatch.setattr(TreeCopies, "is_refilled", False)
    assert tuple(serve(checkpoint, plan_stream=True, **TREE)[1:]) != wanted


def test_a_backend_that_must_fill_again_and_does_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str, *, layers: Any, dtype: str, **sizes: Any) -> Any:
        wanted = {key: sizes[key] for key in ("page_size", "max_len", "max_rows")}
        return fake_backend(monkeypatch, spec=layers[0], dtype=vars(torch)[dtype], **wanted)

    monkeypatch.setattr("gapless.runner.device.make_backend", make)
    with pytest.raises(NotImplementedError, match="chains only"):
        serve(checkpoint, plan_stream=True, **TREE)


def test_a_plan_stream_needs_plans(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="attention backend plans on the device"):
        LLM(str(checkpoint), plan_stream=True, **COMMON)
    with pytest.raises(ConfigError, match="plan_stream has no effect with disable_cuda_graph"):
        LLM(str(checkpoint), plan_stream=True, disable_cuda_graph=True, **COMMON)


def test_the_fake_is_what_ran(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _over_fake(monkeypatch)
    llm = LLM(str(checkpoint), **COMMON)
    device = runner_of(llm).device
    assert device.needs_cpu_seq_lens
    assert device.backend is device.draft_backend
