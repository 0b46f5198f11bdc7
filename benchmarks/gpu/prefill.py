"""Prefill of a whole engine: captured beside launched, and rows with snapshots beside rows without.

Called by `benchmarks.gpu.engine --prefill`. All that is compared is timed in turn, round by round
of one run, and reported as medians. A time is the host's, from the call until the tokens are there.

Of tracked rows, those whose segment stores snapshots on its way, it says also where that time goes:
the host's until it launches the chunk's graph, the graph's on the device, the room that the chunk
was padded to, launches, and the kernels whose time differs most. All is timed before the first
profile is taken: once a profiler has run in a process, the host takes longer for each launch.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gapless.bench.decode import time_requests
from gapless.core.plan import PrefillSegment, Snapshot, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.runner.syncs import count_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gapless import LLM
    from gapless.runner.layout import PrefillRoom
    from gapless.runner.runner import Runner
    from gapless.runner.syncs import CallCounts

Found = TypeVar("Found")

LENGTHS = (64, 512, 2048, 8192)
ROUNDS = 9
# tracked rows are to cost less than a fiftieth: more rounds than for factors
TRACKED_ROUNDS = 30
# lengths of the rows of one chunk: of 2,048 tokens, and of as many as are captured
TRACKED = {
    "1x2048": (2048,), "4x512": (512,) * 4, "8x256": (256,) * 8, "4x2048": (2048,) * 4,
}  # fmt: skip
# where a chat stores states: near the end, and where the last page begins
SNAPSHOTS = 2
PROFILED = 4
DIFFERING = 4


def measure_prefill(llm: LLM, vocab_size: int) -> dict[str, Any]:
    """Return time to first token, blocking calls, and what snapshots cost."""
    runner = llm.engine._loaded.runner
    lengths = [n for n in LENGTHS if n + 2 <= llm.engine.config.max_model_len]
    first = [_first_token(llm, runner, length, vocab_size) for length in lengths]
    llm.flush_cache()
    tracked = []
    for name, rows in TRACKED.items():
        plans = [_plan(runner, rows, num_snapshots=n) for n in (0, SNAPSHOTS)]
        for is_captured in (True, False):
            row = {"rows": name, "is_captured": is_captured}
            tracked.append(row | _tracked(runner, plans, is_captured=is_captured))
    for row in tracked:
        if row["is_captured"]:
            plans = [_plan(runner, TRACKED[row["rows"]], num_snapshots=n) for n in (0, SNAPSHOTS)]
            row.update(_tracked_work(runner, plans))
        print("tracked", row, flush=True)
    for row in first:
        row.update(_first_work(llm, row["tokens"], vocab_size))
        print("prefill", row, flush=True)
    return {"first_token": first, "tracked": tracked}


def _fresh(llm: LLM, length: int, vocab_size: int) -> Callable[[], float]:
    """Return a call that sends a prompt of its own, and returns the milliseconds to its token."""
    rng = random.Random(length)

    def call() -> float:
        ids = [rng.randrange(vocab_size) for _ in range(length)]
        return time_requests(llm, [ids], 2).first_token_seconds * 1e3

    return call


def _first_token(llm: LLM, runner: Runner, length: int, vocab_size: int) -> dict[str, Any]:
    """Time fresh prompts through the whole engine."""
    call = _fresh(llm, length, vocab_size)

    def launched() -> float:
        with _without_rooms(runner):
            return call()

    ms, launched_ms = _medians(in_turn(ROUNDS, call, launched))
    return {
        "tokens": length,
        "ms": ms,
        "launched_ms": launched_ms,
        "tokens_per_second": length / ms * 1e3,
        "launched_tokens_per_second": length / launched_ms * 1e3,
    }


def _first_work(llm: LLM, length: int, vocab_size: int) -> dict[str, float]:
    """Profile fresh prompts: of prefill and the decode step that follows it."""
    call = _fresh(llm, length, vocab_size)
    counts = _profiled(call)
    return {
        "busy_ms": sum(_us_by_kernel(counts).values()) / 1e3,
        "blocking_calls": sum(counts.blocking.values()) / PROFILED,
        "graph_launches": counts.graph_launches / PROFILED,
        "kernel_launches": counts.kernel_launches / PROFILED,
    }


def _tracked(runner: Runner, plans: Sequence[StepPlan], *, is_captured: bool) -> dict[str, Any]:
    """Time one chunk whose rows all store snapshots beside the same chunk without any."""

    def run(plan: StepPlan) -> list[float]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        with nullcontext() if is_captured else _without_rooms(runner):
            runner.run(plan).wait()
        return [(time.perf_counter() - started) * 1e3]

    def parts(plan: StepPlan) -> list[float]:
        with _watched_graph(runner, plan) as (launched, span):
            started = time.perf_counter()
            total = run(plan)
        return [*total, (launched[0] - started) * 1e3, span[0].elapsed_time(span[1])]

    call = parts if is_captured else run
    rounds = in_turn(TRACKED_ROUNDS if is_captured else ROUNDS, *(partial(call, p) for p in plans))
    found: dict[str, Any] = {}
    for prefix, times in zip(("", "tracked_"), rounds, strict=True):
        for name, own in zip(("ms", "host_ms", "graph_ms"), zip(*times, strict=True), strict=False):
            found[prefix + name] = statistics.median(own)
    ratios = [tracked[0] / plain[0] for plain, tracked in zip(*rounds, strict=True)]
    found |= {"ratio": found["tracked_ms"] / found["ms"], "paired": statistics.median(ratios)}
    if is_captured:
        rooms = [room_of(runner, plan) for plan in plans]
        found |= {"room": str(rooms[0]), "is_same_room": rooms[0] == rooms[1]}
    return found


def _tracked_work(runner: Runner, plans: Sequence[StepPlan]) -> dict[str, Any]:
    """Profile both chunks: what they launch and wait for, and where the device's times differ."""
    plain, tracked = (_profiled(lambda p=plan: runner.run(p).wait()) for plan in plans)
    found: dict[str, Any] = {}
    for prefix, counts in (("", plain), ("tracked_", tracked)):
        found[prefix + "graph_launches"] = counts.graph_launches / PROFILED
        found[prefix + "kernel_launches"] = counts.kernel_launches / PROFILED
        found[prefix + "blocking_calls"] = sum(counts.blocking.values()) / PROFILED
    times = _us_by_kernel(plain), _us_by_kernel(tracked)
    return found | {
        "busy_ms": sum(times[0].values()) / 1e3,
        "tracked_busy_ms": sum(times[1].values()) / 1e3,
        "scan_us": times[0].get("_scan_kernel", 0.0),
        "more_us": largest_differences(*times),
    }


def largest_differences(
    plain: Mapping[str, float], tracked: Mapping[str, float]
) -> dict[str, float]:
    """Return what some kernels take longer, or less long, where rows are tracked."""
    names = dict.fromkeys((*plain, *tracked))
    more = {name: tracked.get(name, 0.0) - plain.get(name, 0.0) for name in names}
    return dict(sorted(more.items(), key=lambda pair: -abs(pair[1]))[:DIFFERING])


def _profiled(call: Callable[[], object]) -> CallCounts:
    """Count what some calls ask of the device; calls that block leave out the profiler's own."""
    with count_calls() as nothing:
        torch.cuda.synchronize()
    with count_calls() as counts:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    counts.blocking -= nothing.blocking
    return counts


def _us_by_kernel(counts: CallCounts) -> Counter[str]:
    """Return each kernel's microseconds per call."""
    found: Counter[str] = Counter()
    for name, start, end in counts.kernels:
        found[name] += (end - start) / PROFILED
    return found


def room_of(runner: Runner, plan: StepPlan) -> PrefillRoom:
    """Return the room that a plan's chunk is padded to."""
    prefill = runner._prefill
    return next(room for room in prefill.rooms if prefill._suits(room, plan.prefill))


@contextmanager
def _watched_graph(
    runner: Runner, plan: StepPlan
) -> Iterator[tuple[list[float], list[torch.cuda.Event]]]:
    """Note when the host launches a chunk's graph, and put an event on either side of it."""
    graph = runner._prefill.graph_for(room_of(runner, plan), plan.prefill)
    assert graph is not None, "rooms in use are captured"
    launched: list[float] = []
    span = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    honest = graph.launch

    def launch() -> Any:
        launched.append(time.perf_counter())
        span[0].record()
        value = honest()
        span[1].record()
        return value

    vars(graph)["launch"] = launch
    try:
        yield launched, span
    finally:
        del vars(graph)["launch"]


def _plan(runner: Runner, lengths: tuple[int, ...], *, num_snapshots: int) -> StepPlan:
    """Rows in slots, rows and pages that nobody holds, after the cache was flushed."""
    geometry = runner.device.geometry
    segments, page, row = [], 0, len(lengths)
    for slot, length in enumerate(lengths):
        request = Request(
            request_id="measured", prompt_ids=(0,) * length, seed=0, stop_ids=(),
            params=SamplingParams(temperature=0.0), limit_len=length + 1,
        )  # fmt: skip
        num_pages = -(-(length + geometry.max_window) // geometry.page_size)
        positions = sorted({length - 40, (length - 1) // geometry.page_size * geometry.page_size})
        snapshots = tuple(Snapshot(p, row + i) for i, p in enumerate(positions[:num_snapshots]))
        pages = tuple(range(page, page + num_pages))
        segments.append(
            PrefillSegment(request, slot, slot, pages, 0, length, is_last=True, snapshots=snapshots)
        )
        page, row = page + num_pages, row + len(snapshots)
    assert row <= geometry.num_state_rows, f"{row} state rows, there are {geometry.num_state_rows}"
    return StepPlan(0, tuple(segments), (), (), 0)


def in_turn(count: int, *calls: Callable[[], Found]) -> list[list[Found]]:
    """Return what each call does in each round; a first round of all is not counted.

    Every other round goes backwards, so that none always comes after the same.
    """
    rounds: list[list[Found]] = []
    for index in range(1 + count):
        found = [call() for call in calls[:: 1 - 2 * (index % 2)]]
        rounds.append(found[:: 1 - 2 * (index % 2)])
    return [list(own) for own in zip(*rounds[1:], strict=True)]


def _medians(rounds: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(times) for times in rounds]


@contextmanager
def _without_rooms(runner: Runner) -> Iterator[None]:
    """Launch chunks kernel by kernel."""
    prefill = runner._prefill
    kept, prefill.rooms = prefill.rooms, ()
    try:
        yield
    finally:
        prefill.rooms = kept
