"""Records into a trace what code asks of the device: copies, blocking calls, launches, its work.

On CUDA, torch's profiler sees calls and kernels, and torch's warnings about synchronisation tell
where such a call was made. On a CPU the device is the host: calls that would block are met as
`forbid_syncs` meets them, and the device's work is the host's own.
"""

from __future__ import annotations

import time
import warnings
from bisect import bisect_right
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from gapless.observe.trace import Call, Command, Kind, Sent, Work
from gapless.runner.inputs import Download, Ticket, Upload
from gapless.runner.syncs import BLOCKING_CALLS, KERNEL_LAUNCHES, call_site, watch_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from gapless.observe.trace import Trace

# marks of known time in the profiler's own
_ANCHOR = "gapless: anchor"
_NUM_ANCHORS = 20
_WARNING = "called a synchronizing CUDA operation"
_GRAPH_LAUNCH = "cudaGraphLaunch"
# calls of the runtime that the device's work may come of
_CALLS = frozenset(
    (*KERNEL_LAUNCHES, *BLOCKING_CALLS, _GRAPH_LAUNCH, "cudaMemcpyAsync", "cudaMemsetAsync")
)
# in the names that the profiler gives to copies
_COPIES = {"HtoD": Command.COPY_UP, "DtoH": Command.COPY_DOWN}
_SENDING = {
    Kind.GRAPH: Command.GRAPH,
    Kind.UPLOAD: Command.COPY_UP,
    Kind.DOWNLOAD: Command.COPY_DOWN,
}
_TRAFFIC = (
    (Upload, "send", Kind.UPLOAD),
    (Download, "fetch", Kind.DOWNLOAD),
    (Ticket, "read", Kind.READ),
)
# of what would block on a CPU's tensors, that which does not bring data to the host
_NO_READS = ("Tensor.to", "aten.lift_fresh.default")


@contextmanager
def record_traffic(trace: Trace) -> Iterator[None]:
    """Record uploads, downloads and waits for these, on any device."""
    patches = [
        mock.patch.object(owner, name, _recorded(trace, kind, getattr(owner, name)))
        for owner, name, kind in _TRAFFIC
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def record_host_calls(trace: Trace) -> Iterator[None]:
    """Record what would block, were the CPU a device; every operation takes longer meanwhile."""
    with watch_host(lambda what: trace.note(what, call_site(), reads=what not in _NO_READS)):
        yield


@contextmanager
def record_cuda(trace: Trace) -> Iterator[None]:
    """Record blocking calls, launches and device work; complete once the block has ended."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with (
        torch.profiler.profile(activities=activities, acc_events=True) as profile,
        _noted_syncs(trace),
    ):
        anchors = record_anchors()
        yield
        torch.cuda.synchronize()
    take_events(trace, profile.events() or (), anchors)


def record_anchors() -> list[tuple[float, float]]:
    """Leave marks in the profile under way; return moments before and after each began."""
    anchors = []
    for _ in range(_NUM_ANCHORS):
        before = time.perf_counter()
        with torch.profiler.record_function(_ANCHOR):
            anchors.append((before, time.perf_counter()))
    return anchors


def profiler_zero(events: Iterable[Any], anchors: Sequence[tuple[float, float]]) -> float:
    """When the profiler's clock was zero, by the anchor known best: to less than a microsecond."""
    starts: list[float] = sorted(
        event.time_range.start for event in events if event.name == _ANCHOR
    )
    windows = zip(starts, anchors, strict=True)
    start, (before, after) = min(windows, key=lambda window: window[1][1] - window[1][0])
    return (before + after) / 2 - 1e-6 * start


def take_events(
    trace: Trace, events: Iterable[Any], anchors: Sequence[tuple[float, float]]
) -> None:
    """Add a profile's events to the trace that was recorded beside it.

    Args: events: of `torch.autograd.profiler_util.FunctionEvent`, times in microseconds.
        anchors: as `record_anchors` returned them.
    """
    events = list(events)
    zero = profiler_zero(events, anchors)
    finder = _Finder(trace)
    # the device's work has the number of the call that asked for it
    callers: dict[int, int | None] = {}
    blocking: list[tuple[float, str, int | None]] = []
    for event in events:
        if event.device_type.name == "CUDA" or event.name not in _CALLS:
            continue
        start, end = (zero + 1e-6 * t for t in (event.time_range.start, event.time_range.end))
        # the middle lies within the right span also where the clocks are a little apart
        callers[event.id] = caller = finder.innermost((start + end) / 2)
        if event.name in BLOCKING_CALLS:
            blocking.append((start, event.name, caller))
        elif event.name == _GRAPH_LAUNCH or event.name in KERNEL_LAUNCHES:
            command = Command.GRAPH if event.name == _GRAPH_LAUNCH else Command.KERNEL
            trace.sent.append(Sent(command, caller))
    for event in events:
        if event.device_type.name != "CUDA" or event.is_user_annotation:
            continue
        start, end = (zero + 1e-6 * t for t in (event.time_range.start, event.time_range.end))
        caller = callers.get(event.id)
        trace.work.append(Work(event.name, start, end, caller, event.device_resource_id))
        for mark, command in _COPIES.items():
            if mark in event.name:
                trace.sent.append(Sent(command, caller))
    trace.work.sort(key=lambda work: work.start)
    trace.sees_kernels = True
    trace.calls[:] = _with_sites(sorted(blocking), trace.calls)


def take_host(trace: Trace) -> None:
    """Add what a device would have been asked for and run, where the host is the device."""
    for index, span in enumerate(trace.spans):
        if span.kind is Kind.GRAPH:
            trace.work.append(Work(span.name, span.start, span.end, index))
        elif span.kind is Kind.PART and span.name == "prefill":
            # until its inputs are up, the host lays them out
            within = (s for s in trace.spans[index:] if s.parent == index)
            start = next(s.end for s in within if s.kind is Kind.UPLOAD)
            trace.work.append(Work(span.name, start, span.end, index))
        if span.kind in _SENDING:
            trace.sent.append(Sent(_SENDING[span.kind], index))
    trace.sent += [Sent(Command.COPY_DOWN, call.parent) for call in trace.calls if call.reads]


def _with_sites(blocking: list[tuple[float, str, int | None]], warned: list[Call]) -> list[Call]:
    """Give each blocking call the site of the warning that came of it, once it had returned."""
    sites: dict[int, Call] = {}
    unmatched: list[Call] = []
    for call in warned:
        index = bisect_right(blocking, call.time, key=lambda seen: seen[0]) - 1
        # an operation that blocks twice warns twice, at its end
        while index in sites:
            index -= 1
        if index < 0 or blocking[index][2] != call.parent:
            unmatched.append(call)
        else:
            sites[index] = call
    found = [
        Call(start, name, sites[i].site if i in sites else None, parent)
        for i, (start, name, parent) in enumerate(blocking)
    ]
    return sorted(found + unmatched, key=lambda call: call.time)


@contextmanager
def _noted_syncs(trace: Trace) -> Iterator[None]:
    """Note torch's warnings about synchronising calls, each with the line that it came from."""
    before = torch.cuda.get_sync_debug_mode()

    show_others = warnings.showwarning

    def show(message: Warning | str, *place: Any) -> None:
        if _WARNING in str(message):
            trace.note("a synchronising operation", call_site())
        else:
            show_others(message, *place)

    with warnings.catch_warnings():
        # torch says once that it does not see every synchronising call
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WARNING)
        warnings.showwarning = show  # type: ignore[assignment]  # takes what it passes on
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Finder:
    """Finds the innermost span at a moment."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._starts = [span.start for span in trace.spans]

    def innermost(self, moment: float) -> int | None:
        """Index of the innermost span that `moment` lies in."""
        index: int | None = bisect_right(self._starts, moment) - 1
        index = None if index == -1 else index
        while index is not None and self._trace.spans[index].end < moment:
            index = self._trace.spans[index].parent
        return index


def _recorded(trace: Trace, kind: Kind, original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__qualname__

    def call(*args: Any, **kwargs: Any) -> Any:
        with trace.span(kind, name):
            return original(*args, **kwargs)

    return call
