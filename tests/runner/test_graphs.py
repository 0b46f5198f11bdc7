"""Captures, of which a CPU does all but the capturing, and when graphs and their memory go."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.runner.graphs import Capture
from gapless.runner.stages import Stage
from tests.engine_fixtures import runner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class FakeCuda:
    """What `Capture` asks of torch, and whether it is capturing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        for name, stand_in in (
            ("Stream", object), ("graph_pool_handle", object), ("CUDAGraph", object),
            ("synchronize", lambda: None), ("stream", self._on_stream), ("graph", self._capturing),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def _on_stream(self, stream: object) -> Iterator[None]:
        del stream
        yield

    @contextmanager
    def _capturing(self, graph: object, **options: Any) -> Iterator[None]:
        del graph, options
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False


class Garbage:
    """Refers to itself, as an engine's graphs may, and notes whether it dies within a capture."""

    def __init__(self, cuda: FakeCuda, deaths: list[bool]) -> None:
        self.itself = self
        self._cuda = cuda
        self._deaths = deaths

    def __del__(self) -> None:
        self._deaths.append(self._cuda.is_capturing)


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """A collector that runs at nearly every allocation."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_within_a_capture(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    cuda = FakeCuda(monkeypatch)
    deaths: list[bool] = []

    def stage(_: Any) -> None:
        Garbage(cuda, deaths)
        # enough for a collector to come by
        _kept: list[list[int]] = [[] for _ in range(5000)]
        if fails and cuda.is_capturing:
            raise ValueError

    capture = Capture()
    if fails:
        with pytest.raises(ValueError, match=r"^$"):
            capture.run([[Stage("stage", stage)]])
    else:
        capture.run([[Stage("stage", stage)], [Stage("another", stage)]])
    assert gc.isenabled()
    gc.collect()
    assert deaths == [False] * (2 if fails else 4)


def test_warming_up_never_reads_what_was_only_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a seam too, whose stages get what those before it made."""
    cuda = FakeCuda(monkeypatch)
    made: list[tuple[str, bool]] = []

    def stage(name: str) -> Callable[[Any], tuple[str, bool]]:
        def run(before: tuple[str, bool] | None) -> tuple[str, bool]:
            assert before == (made[-2] if made[1:] else None)
            made.append((name, cuda.is_capturing))
            return made[-1]

        return run

    names = ("verify", "accept", "extend")
    stages = [[Stage(name, stage(name), plan=lambda: None)] for name in names]
    graphs, output = Capture().run(stages)
    assert len(graphs) == len(names)
    assert made == [(name, is_captured) for name in names for is_captured in (False, True)]
    assert output == ("extend", True)


def test_a_collector_that_was_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    gc.disable()
    try:
        Capture().run([[Stage("stage", lambda _: None)]])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "drafting",
    [
        {"speculative_num_steps": 0},
        {"speculative_algorithm": "ngram"},
        {"speculative_num_steps": 2, "speculative_topk": 2, "speculative_num_draft_tokens": 4},
    ],
)
def test_graphs_and_memory_go_with_their_engine(drafting: dict[str, Any]) -> None:
    llm = LLM(device="cpu", max_running_requests=2, max_model_len=64, **drafting)
    params = [SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(seed=1, max_tokens=6)]
    llm.generate([[5] * 9, [7] * 20], params)
    runner = runner_of(llm)
    graphs = list(runner._decode._graphs._graphs.values())
    assert graphs
    parts = [*graphs, runner._decode, runner._prefill, runner.device.table.columns.page_table]
    left = [weakref.ref(part) for part in parts]
    del runner, graphs, parts
    gc.collect()
    gc.disable()
    try:
        del llm
        assert [part() for part in left] == [None] * len(left)
    finally:
        gc.enable()
