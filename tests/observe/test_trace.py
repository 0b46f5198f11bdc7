"""Spans nest, and calls know where they were made."""

from __future__ import annotations

import threading

import pytest

from gapless.observe.trace import Kind, Trace


def test_spans_know_what_is_around_them() -> None:
    trace = Trace()
    with trace.span(Kind.PHASE, "launch"):
        with trace.span(Kind.PART, "decode"):
            trace.note("read", "file.py:3")
        with trace.span(Kind.PART, "prefill"):
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
    with pytest.raises(KeyError), trace.span(Kind.PHASE, "launch"):
        raise KeyError
    assert trace.innermost is None
    assert trace.spans[0].end >= trace.spans[0].start > 0


def test_calls_of_other_threads_are_not_of_the_step() -> None:
    trace = Trace()
    thread = threading.Thread(target=trace.note, args=("read", None))
    thread.start()
    thread.join()
    assert trace.calls == []
