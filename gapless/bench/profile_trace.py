"""A trace in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gapless.observe.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.observe.trace import Trace

# processes and threads are rows of the picture
HOST, DEVICE = 1, 2
MAIN_THREAD = 1


def chrome_trace(trace: Trace) -> str:
    """Return the trace as JSON; times are in microseconds from the first span."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(trace_events(trace))})


def trace_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield names of the rows, spans, blocking calls and device work.

    Arrows lead from the launch of a graph, or of a prefill chunk, to what of it ran first.
    """
    zero = trace.spans[0].start if trace.spans else 0.0

    def at(moment: float) -> float:
        return round(1e6 * (moment - zero), 3)

    yield _name("process_name", HOST, MAIN_THREAD, "host")
    yield _name("thread_name", HOST, MAIN_THREAD, "engine loop")
    yield _name("process_name", DEVICE, 0, "device" if trace.sees_kernels else "device (the host)")
    for lane in sorted({work.lane for work in trace.work}):
        name = f"stream {lane}" if trace.sees_kernels else "graphs and prefill"
        yield _name("thread_name", DEVICE, lane, name)
    for span in trace.spans:
        yield {
            "ph": "X", "name": span.name, "cat": span.kind.value, "pid": HOST,
            "tid": MAIN_THREAD, "ts": at(span.start), "dur": round(1e6 * span.seconds, 3),
        }  # fmt: skip
    for call in trace.calls:
        yield {
            "ph": "i", "s": "t", "name": call.name, "cat": "blocking", "pid": HOST,
            "tid": MAIN_THREAD, "ts": at(call.time), "args": {"site": call.site},
        }  # fmt: skip
    pointed: set[int] = set()
    for work in trace.work:
        yield {
            "ph": "X", "name": work.name, "cat": "device", "pid": DEVICE, "tid": work.lane,
            "ts": at(work.start), "dur": round(1e6 * (work.end - work.start), 3),
        }  # fmt: skip
        launcher = work.launcher
        if launcher is None or launcher in pointed or trace.spans[launcher].kind not in _ARROWS:
            continue
        pointed.add(launcher)
        arrow = {"name": "launch", "cat": "launch", "id": launcher}
        start = trace.spans[launcher].start
        yield {**arrow, "ph": "s", "pid": HOST, "tid": MAIN_THREAD, "ts": at(start)}
        yield {**arrow, "ph": "f", "bp": "e", "pid": DEVICE, "tid": work.lane, "ts": at(work.start)}


_ARROWS = (Kind.GRAPH, Kind.PART)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}
