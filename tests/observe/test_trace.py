"""Spans nest, calls know where they were made, and no trace costs no memory."""

from __future__ import annotations

import threading
import tracemalloc

import pytest

from gapless.observe.trace import Kind, Trace, span


def test_spans_know_what_is_around_them() -> None:
    trace = Trace()
    with span(trace, Kind.PHASE, "launch"):
        with span(trace, Kind.PART, "decode"):
            trace.note("read", "file.py:3")
        with span(trace, Kind.PART, "prefill"):
            pass
    trace.note("read", None)
    assert [(s.name, s.parent) for s in trace.spans] == [
        ("launch", None), ("decode", 0), ("prefill", 0)
    ]  # fmt: skip
    launch, decode, prefill = trace.spans
    assert launch.start <= decode.start <= decode.end <= prefill.start <= prefill.end <= launch.end
    assert [(c.site, c.parent) for c in trace.calls] == [("file.py:3", 1), (None, None)]
    assert [s.name for _, s in trace.around(1)] == ["decode", "launch"]
    assert decode.start <= trace.calls[0].time <= decode.end


def test_a_span_ends_with_an_error() -> None:
    trace = Trace()
    with pytest.raises(KeyError), span(trace, Kind.PHASE, "launch"):
        raise KeyError
    assert trace.innermost is None
    assert trace.spans[0].end >= trace.spans[0].start > 0


def test_calls_of_other_threads_are_not_of_the_step() -> None:
    trace = Trace()
    thread = threading.Thread(target=trace.note, args=("read", None))
    thread.start()
    thread.join()
    assert trace.calls == []


def test_without_a_trace_nothing_is_allocated() -> None:
    def spans(count: int) -> None:
        for _ in range(count):
            with span(None, Kind.PHASE, "launch"):
                pass

    spans(10)
    tracemalloc.start()
    try:
        spans(1000)
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # the loop's own integers
    assert max(held, most) < 1000
