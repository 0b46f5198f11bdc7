"""Captured steps: one graph per run of stages and key, replayed over static buffers.

On a CPU a graph is the same callable over the same buffers, so padding, null slots and replay
behave alike on every device.
"""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gapless.config.switches import Graphs
from gapless.core.counters import LaunchCounters
from gapless.observe.trace import Kind, Trace
from gapless.runner.stages import Stage, cut_at_seams

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

logger = logging.getLogger(__name__)


class StepGraph:
    """The stages of one step for one key."""

    def __init__(
        self, stages: Sequence[Stage], capture: Capture | None, kind: Graphs = Graphs.STEP
    ) -> None:
        is_whole = kind is not Graphs.STAGE
        self._runs = cut_at_seams(stages) if is_whole else [[stage] for stage in stages]
        self._names = ["+".join(stage.name for stage in run) for run in self._runs]
        self._trace: Trace | None = None
        self._graphs: list[torch.cuda.CUDAGraph] | None = None
        self._output: Any = None
        if capture is not None:
            self._graphs, self._output = capture.run(self._runs)

    @property
    def num_launches(self) -> int:
        """Graph launches per step."""
        return len(self._runs)

    def watch(self, trace: Trace | None) -> None:
        """Record seams and launches from now on; None ends it."""
        self._trace = trace

    def launch(self) -> Any:
        """Run the step and return what its last stage made, valid until the next launch."""
        trace, value = self._trace, self._output
        for index, run in enumerate(self._runs):
            _plan(run, trace)
            if trace is not None:
                trace.begin(Kind.GRAPH, self._names[index])
            if self._graphs is None:
                value = _run(run, value, trace)
            else:
                self._graphs[index].replay()
            if trace is not None:
                trace.end()
        return value


class Capture:
    """Captures steps on one stream and into one memory pool: only one graph runs at a time."""

    @classmethod
    def on(cls, device: torch.device) -> Capture | None:
        """What captures on a device, None if nothing can be captured there."""
        return cls() if device.type == "cuda" else None

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, runs: Sequence[Sequence[Stage]]) -> tuple[list[torch.cuda.CUDAGraph], Any]:
        """Capture over inputs that name the null slot only, so that warming up changes nothing."""
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []
        # a captured run has computed nothing yet: what it hands on is memory that holds anything,
        # indices among it, so warming up goes on from what was run
        value: Any = None
        warm: Any = None
        with torch.cuda.stream(self._stream):
            for run in runs:
                # a plan's copies are no part of the graph
                _plan(run)
                warm = _run(run, warm)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with (
                    _nothing_collected(),
                    torch.cuda.graph(
                        graph,
                        pool=self._pool,
                        stream=self._stream,
                        capture_error_mode="thread_local",
                    ),
                ):
                    value = _run(run, value)
                graphs.append(graph)
        torch.cuda.synchronize()
        return graphs, value


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the collector of cycles from running.

    It would run in the middle of a capture, and what it finds may be a graph or a kernel of an
    engine that is gone. Destroying one is not permitted while a stream captures: the capture
    becomes invalid, and then torch's allocator throws where it may not, which ends the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(stages: Sequence[Stage], trace: Trace | None = None) -> None:
    first = stages[0]
    if first.plan is None:
        return
    if trace is not None:
        trace.begin(Kind.SEAM, first.name)
    first.plan()
    if trace is not None:
        trace.end()


def _run(stages: Sequence[Stage], value: Any, trace: Trace | None = None) -> Any:
    for stage in stages:
        if trace is not None:
            trace.begin(Kind.STAGE, stage.name)
        value = stage.run(value)
        if trace is not None:
            trace.end()
    return value


class GraphRunner:
    """Keeps one `StepGraph` per key.

    On CUDA the keys that `capture` was called with are captured, and all others run as they are,
    launch by launch: nothing is captured once the engine is ready. Without graphs a step is set up
    each time.
    """

    def __init__(
        self,
        capture: Capture | None,
        kind: Graphs = Graphs.STEP,
        counters: LaunchCounters | None = None,
    ) -> None:
        """Args: capture: shared by all that never run at once; None where nothing is captured."""
        self._capture = capture
        self._kind = kind
        self._counters = counters or LaunchCounters()
        self._graphs: dict[Hashable, StepGraph] = {}
        self._trace: Trace | None = None

    def watch(self, trace: Trace | None) -> None:
        """Record what all graphs do from now on, those made later too; None ends it."""
        self._trace = trace
        for graph in self._graphs.values():
            graph.watch(trace)

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
            graph.watch(self._trace)
            if self._kind is not Graphs.NONE:
                self._graphs[key] = graph
                logger.debug("step %s runs uncaptured", key)
        return graph

    def find(self, key: Hashable) -> StepGraph | None:
        """Return the graph of `key` if it was captured."""
        return self._graphs.get(key)

    def _make(
        self, make_stages: Callable[[], Sequence[Stage]], capture: Capture | None
    ) -> StepGraph:
        self._counters.num_setups += 1
        return StepGraph(make_stages(), capture, self._kind)

    def clear(self) -> None:
        """Destroy all graphs; one that is asked for later runs uncaptured."""
        self._graphs.clear()
