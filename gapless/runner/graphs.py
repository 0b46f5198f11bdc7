"""Captured steps: one graph per run of stages and key, replayed over static buffers.

On a CPU a graph is the same callable over the same buffers, so padding, null slots and replay
behave alike on every device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from gapless.config.switches import Graphs
from gapless.runner.stages import Stage, cut_at_seams

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from gapless.core.counters import LaunchCounters

logger = logging.getLogger(__name__)


class StepGraph:
    """The stages of one step for one key."""

    def __init__(
        self, stages: Sequence[Stage], capture: Capture | None, kind: Graphs = Graphs.STEP
    ) -> None:
        is_whole = kind is not Graphs.STAGE
        self._runs = cut_at_seams(stages) if is_whole else [[stage] for stage in stages]
        self._graphs: list[torch.cuda.CUDAGraph] | None = None
        self._output: Any = None
        if capture is not None:
            self._graphs, self._output = capture.run(self._runs)

    @property
    def num_launches(self) -> int:
        """Graph launches per step."""
        return len(self._runs)

    def launch(self) -> Any:
        """Run the step and return what its last stage made, valid until the next launch."""
        if self._graphs is None:
            value: Any = None
            for run in self._runs:
                _plan(run)
                value = _run(run, value)
            return value
        for run, graph in zip(self._runs, self._graphs, strict=True):
            _plan(run)
            graph.replay()
        return self._output


class Capture:
    """Captures steps on one stream and into one memory pool: only one graph runs at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, runs: Sequence[Sequence[Stage]]) -> tuple[list[torch.cuda.CUDAGraph], Any]:
        """Capture over inputs that name the null slot only, so that warming up changes nothing."""
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []
        value: Any = None
        with torch.cuda.stream(self._stream):
            for run in runs:
                before = value
                # a plan's copies are no part of the graph
                _plan(run)
                _run(run, before)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    value = _run(run, before)
                graphs.append(graph)
        torch.cuda.synchronize()
        return graphs, value


def _plan(stages: Sequence[Stage]) -> None:
    if stages[0].plan is not None:
        stages[0].plan()


def _run(stages: Sequence[Stage], value: Any) -> Any:
    for stage in stages:
        value = stage.run(value)
    return value


class GraphRunner:
    """Keeps one `StepGraph` per key.

    On CUDA the keys that `capture` was called with are captured, and all others run as they are,
    launch by launch: nothing is captured once the engine is ready. Without graphs a step is set up
    each time.
    """

    def __init__(
        self, device: torch.device, kind: Graphs = Graphs.STEP, *, counters: LaunchCounters
    ) -> None:
        is_captured = device.type == "cuda" and kind is not Graphs.NONE
        self._capture = Capture() if is_captured else None
        self._kind = kind
        self._counters = counters
        self._graphs: dict[Hashable, StepGraph] = {}

    def capture(self, key: Hashable, make_stages: Callable[[], Sequence[Stage]]) -> None:
        """Make the graph of `key`; `make_stages` must leave null inputs in the buffers."""
        assert self._kind is not Graphs.NONE, "a step without a graph is not captured"
        graph = self._graphs[key] = self._make(make_stages, self._capture)
        logger.debug("step graph %s: %d launch(es)", key, graph.num_launches)

    def get(self, key: Hashable, make_stages: Callable[[], Sequence[Stage]]) -> StepGraph:
        """Return the graph of `key`, uncaptured if it is not among those that were."""
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._make(make_stages, None)
            if self._kind is not Graphs.NONE:
                self._graphs[key] = graph
                logger.debug("step %s runs uncaptured", key)
        return graph

    def _make(
        self, make_stages: Callable[[], Sequence[Stage]], capture: Capture | None
    ) -> StepGraph:
        self._counters.num_setups += 1
        return StepGraph(make_stages(), capture, self._kind)

    def clear(self) -> None:
        """Destroy all graphs; one that is asked for later runs uncaptured."""
        self._graphs.clear()
