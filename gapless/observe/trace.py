"""What one thread did and when, as nested spans, and what it asked of a device.

A trace is put into an engine by `Engine.watch`. The code that it watches begins and ends spans,
which costs one test where there is no trace; `runner/recorder.py` adds what the device did.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType


class Kind(StrEnum):
    """What a span is a span of."""

    ITERATION = "iteration"  # of the engine
    PHASE = "phase"  # schedule, launch, wait, commit
    PART = "part"  # of a launch: prefill, decode and what surrounds them
    UPLOAD = "upload"  # packed copy to the device
    DOWNLOAD = "download"  # asynchronous copy to the host
    READ = "read"  # waiting for such a copy
    SEAM = "seam"  # host work between two runs of stages
    GRAPH = "graph"  # launch of a run of stages
    STAGE = "stage"  # one of a run that is not captured


@dataclass(slots=True)
class Span:
    """Time between two moments of the host, in seconds of `time.perf_counter`."""

    kind: Kind
    name: str
    start: float
    parent: int | None
    """Index in `Trace.spans` of the span around it."""
    end: float = 0.0

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Call:
    """A call by which the host waited, or would have waited, for the device."""

    time: float
    name: str
    site: str | None
    """File and line; None where the recorder does not see it."""
    parent: int | None
    """Index in `Trace.spans` of the innermost span around it."""
    reads: bool = False
    """Whether it brought data to the host."""


@dataclass(frozen=True)
class Work:
    """Something that ran on the device."""

    name: str
    start: float
    end: float
    launcher: int | None
    """Index in `Trace.spans` of the innermost span that launched it."""
    lane: int = 0
    """Work in one lane runs one after another: a stream."""


class Command(StrEnum):
    """What the host sends to the device."""

    KERNEL = "kernel"
    GRAPH = "graph"
    COPY_UP = "copy up"
    COPY_DOWN = "copy down"


@dataclass(frozen=True)
class Sent:
    """Something that the host sent to the device."""

    command: Command
    parent: int | None
    """Index in `Trace.spans` of the innermost span around it."""


@dataclass
class Trace:
    """Spans in the order in which they began, and what the device was asked for meanwhile.

    Spans and calls are those of the thread that made it.
    """

    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    sees_kernels: bool = False
    """Whether work and commands are a GPU's own."""
    _open: list[int] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)

    def span(self, kind: Kind, name: str) -> AbstractContextManager[None]:
        """Record a span around a block."""
        return _Recording(self, kind, name)

    def note(self, name: str, site: str | None, *, reads: bool = False) -> None:
        """Record a blocking call; those of other threads keep no step waiting."""
        if threading.get_ident() == self._thread:
            self.calls.append(Call(time.perf_counter(), name, site, self.innermost, reads))

    @property
    def innermost(self) -> int | None:
        """Index of the span under way."""
        return self._open[-1] if self._open else None

    def around(self, index: int | None) -> Iterator[tuple[int, Span]]:
        """Yield a span and all around it with their indices, from the inside out."""
        while index is not None:
            yield index, self.spans[index]
            index = self.spans[index].parent

    def begin(self, kind: Kind, name: str) -> None:
        """Open a span inside the one under way."""
        self.spans.append(Span(kind, name, time.perf_counter(), self.innermost))
        self._open.append(len(self.spans) - 1)

    def end(self) -> None:
        """Close the span under way."""
        self.spans[self._open.pop()].end = time.perf_counter()


class _Recording:
    def __init__(self, trace: Trace, kind: Kind, name: str) -> None:
        self._trace, self._kind, self._name = trace, kind, name

    def __enter__(self) -> None:
        self._trace.begin(self._kind, self._name)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._trace.end()
