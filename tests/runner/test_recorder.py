"""What the recorder makes of a profiler's events, which a CPU can only imitate; and of warnings."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gapless.observe.trace import Command, Kind, Trace
from gapless.runner import recorder
from gapless.runner.recorder import take_events

MS = 1e-3
# the second is known best
ANCHORS = [(99.9, 100.0), (100 - 0.01 * MS, 100 + 0.01 * MS), (100.0, 100.1)]


@dataclass(frozen=True)
class Event:
    """As the profiler gives it: start and end in milliseconds of its own clock, 7 ms ahead."""

    name: str
    id: int
    start: float
    end: float
    on_gpu: bool = False
    device_resource_id: int = 0
    is_user_annotation: bool = False

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=1e3 * (self.start + 7), end=1e3 * (self.end + 7))

    @property
    def device_type(self) -> Any:
        return SimpleNamespace(name="CUDA" if self.on_gpu else "CPU")


def make_trace() -> Trace:
    """One step: an upload, prefill, a graph; times in milliseconds from 100 s."""
    trace = Trace()
    for kind, name, parent, start, end in (
        (Kind.ITERATION, "iteration", None, 0, 20),
        (Kind.PHASE, "launch", 0, 1, 12),
        (Kind.PART, "prefill", 1, 2, 6),
        (Kind.PART, "decode", 1, 7, 11),
        (Kind.GRAPH, "verify", 3, 8, 10),
    ):
        trace.begin(kind, name)
        trace.end()
        made = trace.spans[-1]
        made.parent, made.start, made.end = parent, 100 + start * MS, 100 + end * MS
    return trace


EVENTS = [
    Event(recorder._ANCHOR, 1, -9, -8),
    Event(recorder._ANCHOR, 2, 0, 0.1),
    Event(recorder._ANCHOR, 3, 0.5, 0.6),
    # numbers of torch's operators are not those of the runtime's calls
    Event("aten::mm", 30, 2.5, 3),
    Event("cudaMemcpyAsync", 20, 2.1, 2.2),
    Event("cudaLaunchKernel", 21, 3, 3.1),
    Event("cudaMalloc", 22, 4, 4.5),
    Event("cudaGraphLaunch", 30, 9, 9.1),
    Event("cudaMemcpyAsync", 31, 11.5, 11.6),
    Event("cudaStreamSynchronize", 32, 11.7, 11.8),
    Event("cudaDeviceSynchronize", 33, 25, 26),
    Event("kernel_b", 30, 14, 15, on_gpu=True, device_resource_id=9),
    Event("kernel_a", 30, 12, 13, on_gpu=True, device_resource_id=7),
    Event("matmul", 21, 5, 6, on_gpu=True, device_resource_id=7),
    Event("Memcpy HtoD (Pinned -> Device)", 20, 4, 4.1, on_gpu=True, device_resource_id=7),
    Event("Memcpy DtoH (Device -> Pinned)", 31, 16, 16.1, on_gpu=True, device_resource_id=7),
    Event("a range", 30, 12, 15, on_gpu=True, is_user_annotation=True),
]


def test_events_are_put_where_they_were_asked_for() -> None:
    trace = make_trace()
    take_events(trace, EVENTS, ANCHORS)
    assert sorted((s.command, s.parent) for s in trace.sent) == [
        (Command.COPY_DOWN, 1), (Command.COPY_UP, 2), (Command.GRAPH, 4), (Command.KERNEL, 2)
    ]  # fmt: skip
    work = [(w.name, w.launcher, w.lane) for w in trace.work if "Memcpy" not in w.name]
    assert work == [("matmul", 2, 7), ("kernel_a", 4, 7), ("kernel_b", 4, 9)]
    assert trace.work[0].start == pytest.approx(100 + 4 * MS)
    assert [(c.name, c.parent, c.site) for c in trace.calls] == [
        ("cudaMalloc", 2, None),
        ("cudaStreamSynchronize", 1, None),
        ("cudaDeviceSynchronize", None, None),
    ]


def test_a_warning_gives_the_call_before_it_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = make_trace()
    trace._open[:] = [1]
    monkeypatch.setattr(time, "perf_counter", lambda: 100 + 11.9 * MS)
    trace.note("a synchronising operation", "a.py:5")
    # there is one call to match; the other is still counted
    trace._open[:] = [4]
    trace.note("a synchronising operation", "b.py:6")
    take_events(trace, EVENTS, ANCHORS)
    assert [(c.name, c.parent, c.site) for c in trace.calls] == [
        ("cudaMalloc", 2, None),
        ("cudaStreamSynchronize", 1, "a.py:5"),
        ("a synchronising operation", 4, "b.py:6"),
        ("cudaDeviceSynchronize", None, None),
    ]


def test_warnings_of_torch_are_noted_with_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    trace = Trace()
    with recorder._noted_syncs(trace), trace.span(Kind.PHASE, "launch"):
        for _ in range(2):
            warnings.warn(f"{recorder._WARNING} (at a line in C++)", stacklevel=1)
        with pytest.raises(DeprecationWarning):
            # others stay what they were
            warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert [c.parent for c in trace.calls] == [0, 0]
    assert all(c.site.startswith("test_recorder.py:") for c in trace.calls)
    assert modes == ["warn", 0]


def test_the_profilers_clock_is_found_to_a_microsecond() -> None:
    """On the CPU's own events; a moment's pause of the machine spoils some of them."""
    called = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        anchors = recorder.record_anchors()
        for _ in range(100):
            before = time.perf_counter()
            torch.ones(3)
            called.append((before, time.perf_counter()))
    events = profile.events()
    zero = recorder.profiler_zero(events, anchors)
    spans = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == "aten::ones")
    early = [
        before - zero - 1e-6 * start for (before, _), (start, _) in zip(called, spans, strict=True)
    ]
    late = [zero + 1e-6 * end - after for (_, after), (_, end) in zip(called, spans, strict=True)]
    assert max(np.median(early), np.median(late)) < 2e-6
