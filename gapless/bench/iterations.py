"""An engine's iterations, read from a trace: time, seams, and what was asked of the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gapless.bench.idle import busy_time
from gapless.errors import InternalError
from gapless.observe.trace import Command, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gapless.bench.idle import Interval
    from gapless.observe.trace import Span, Trace, Work

PHASES = ("schedule", "launch", "wait", "commit")
UNSEEN = "a line that was not seen"


@dataclass(frozen=True)
class Counts:
    """What a part of an iteration asked of the device."""

    blocking: Counter[str] = field(default_factory=Counter)
    """Calls by which the host waits for the device, by name and call site."""
    commands: Counter[Command] = field(default_factory=Counter)
    host_seconds: float = 0.0
    """What it took the host to launch it; on a CPU, without what the device ran meanwhile."""
    device_seconds: float = 0.0
    """In which the device ran something of it."""

    def __add__(self, other: Counts) -> Counts:
        """Return what two parts asked for together."""
        return Counts(
            self.blocking + other.blocking,
            self.commands + other.commands,
            self.host_seconds + other.host_seconds,
            self.device_seconds + other.device_seconds,
        )


@dataclass(frozen=True)
class Seam:
    """Host work between two runs of stages."""

    stage: str
    """The stage that it plans."""
    start: float
    seconds: float


@dataclass(frozen=True)
class Iteration:
    """One iteration of the engine; times are in seconds, moments as in the trace."""

    start: float
    seconds: float
    phases: dict[str, float]
    """Of `PHASES`, those that it had."""
    upload_seconds: float
    """Of the launch, what copies to the device took the host."""
    run_ahead: int
    """Steps that were launched and unread when it began."""
    queued_seconds: float | None
    """From the launch of its first graph until that ran; None: there is none, or no GPU."""
    has_prefill: bool
    has_decode: bool
    prefill: Counts
    """Of the prefill chunk."""
    moves: Counts
    """Of the cache: saves, loads and page copies, which requests that came and went leave."""
    rest: Counts
    """Of all else, the decode step above all."""
    seams: tuple[Seam, ...]
    runs: tuple[tuple[Interval, ...], ...]
    """What each of its graphs ran."""

    @property
    def step(self) -> Counts:
        """What its decode step asked for, and what surrounds it."""
        return self.rest if self.has_decode else Counts()

    @property
    def chunk(self) -> Counts:
        """What its prefill chunk asked for, and what surrounds it where there is no decode step."""
        return self.prefill if self.has_decode else self.prefill + self.rest

    @property
    def host_seconds(self) -> float:
        """In which the host did not wait for a result."""
        return self.seconds - self.phases.get("wait", 0.0)


def read_iterations(trace: Trace) -> list[Iteration]:
    """Sort what a trace holds by iteration; what lies outside of them is left out."""
    found = {i: _Gathered() for i, s in enumerate(trace.spans) if s.kind is Kind.ITERATION}
    for index, span in enumerate(trace.spans):
        for gathered, _ in _places(trace, index, found):
            gathered.add_span(index, span)
    for call in trace.calls:
        for _, share in _places(trace, call.parent, found):
            share.blocking[f"{call.name} at {call.site or UNSEEN}"] += 1
    for sent in trace.sent:
        for _, share in _places(trace, sent.parent, found):
            share.commands[sent.command] += 1
    for work in trace.work:
        for gathered, share in _places(trace, work.launcher, found):
            share.work.append((work.start, work.end))
            gathered.add_work(trace, work)
    unread, iterations = 0, []
    for root, gathered in found.items():
        iterations.append(gathered.finish(trace, trace.spans[root], unread))
        unread += ("launch" in gathered.phases) - ("wait" in gathered.phases)
    return iterations


def merged(timed: Sequence[Iteration], counted: Sequence[Iteration]) -> list[Iteration]:
    """Return the first run's iterations with the second run's counts.

    Raises:
        InternalError: the two did not take the same steps.
    """
    shapes = [[(i.has_prefill, i.has_decode) for i in run] for run in (timed, counted)]
    if shapes[0] != shapes[1]:
        raise InternalError(
            f"two runs of the same requests took {len(timed)} and {len(counted)} iterations, or "
            "other ones: their figures cannot be put together"
        )
    return [
        replace(
            own,
            prefill=_counted(own.prefill, other.prefill),
            moves=_counted(own.moves, other.moves),
            rest=_counted(own.rest, other.rest),
        )
        for own, other in zip(timed, counted, strict=True)
    ]


def _counted(timed: Counts, counted: Counts) -> Counts:
    return replace(counted, host_seconds=timed.host_seconds, device_seconds=timed.device_seconds)


@dataclass
class _Share:
    """What is found of a part of an iteration."""

    blocking: Counter[str] = field(default_factory=Counter)
    commands: Counter[Command] = field(default_factory=Counter)
    work: list[Interval] = field(default_factory=list)

    def counts(self, launch_seconds: float, *, sees_kernels: bool) -> Counts:
        device = busy_time(self.work)
        host = launch_seconds if sees_kernels else launch_seconds - device
        return Counts(self.blocking, self.commands, host, device)


@dataclass
class _Gathered:
    """What is found of one iteration."""

    prefill: _Share = field(default_factory=_Share)
    moves: _Share = field(default_factory=_Share)
    rest: _Share = field(default_factory=_Share)
    seconds: dict[tuple[Kind, str], float] = field(default_factory=dict)
    seams: list[Seam] = field(default_factory=list)
    runs: dict[int, list[Interval]] = field(default_factory=dict)

    @property
    def phases(self) -> dict[str, float]:
        return {name: self.seconds[Kind.PHASE, name] for name in PHASES if self._has(name)}

    def _has(self, phase: str) -> bool:
        return (Kind.PHASE, phase) in self.seconds

    def add_span(self, index: int, span: Span) -> None:
        key = span.kind, span.name
        self.seconds[key] = self.seconds.get(key, 0.0) + span.seconds
        if span.kind is Kind.SEAM:
            self.seams.append(Seam(span.name, span.start, span.seconds))
        elif span.kind is Kind.GRAPH:
            self.runs[index] = []

    def add_work(self, trace: Trace, work: Work) -> None:
        for index, _ in trace.around(work.launcher):
            if index in self.runs:
                self.runs[index].append((work.start, work.end))

    def finish(self, trace: Trace, root: Span, unread: int) -> Iteration:
        runs = {index: tuple(run) for index, run in self.runs.items() if run}
        queued = None
        if trace.sees_kernels and runs:
            first = next(iter(runs))
            queued = min(runs[first])[0] - trace.spans[first].start
        parts = {name: taken for (kind, name), taken in self.seconds.items() if kind is Kind.PART}
        prefill, moves, rest = (
            share.counts(parts.get(name, 0.0), sees_kernels=trace.sees_kernels)
            for name, share in (
                ("prefill", self.prefill), ("move", self.moves), ("decode", self.rest),
            )
        )  # fmt: skip
        uploads = (taken for (kind, _), taken in self.seconds.items() if kind is Kind.UPLOAD)
        return Iteration(
            start=root.start,
            seconds=root.seconds,
            phases=self.phases,
            upload_seconds=sum(uploads),
            run_ahead=unread,
            queued_seconds=queued,
            has_prefill="prefill" in parts,
            has_decode="decode" in parts,
            prefill=prefill,
            moves=moves,
            rest=rest,
            seams=tuple(self.seams),
            runs=tuple(runs.values()),
        )


def _places(
    trace: Trace, index: int | None, found: dict[int, _Gathered]
) -> Iterator[tuple[_Gathered, _Share]]:
    """Yield the iteration that a span lies in, if any, and its share of it."""
    around = list(trace.around(index))
    if around and around[-1][0] in found:
        gathered = found[around[-1][0]]
        part = next((span.name for _, span in around if span.kind is Kind.PART), None)
        shares = {"prefill": gathered.prefill, "move": gathered.moves}
        yield gathered, shares.get(part or "", gathered.rest)
