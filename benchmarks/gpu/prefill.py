"""Prefill of a whole engine: captured beside launched, and rows with snapshots beside rows without.

Called by `benchmarks.gpu.engine --prefill`. All that is compared is timed in turn, round by round
of one run, and reported as medians. A time is the host's, from the call until the tokens are there.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from gapless.bench.decode import time_requests
from gapless.core.plan import PrefillSegment, Snapshot, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.runner.syncs import count_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gapless import LLM
    from gapless.runner.runner import Runner

LENGTHS = (64, 512, 2048, 8192)
ROUNDS = 9
# lengths of the rows of one chunk of 2,048 tokens
TRACKED = {"1x2048": (2048,), "4x512": (512,) * 4, "8x256": (256,) * 8}
PROFILED = 4


def measure_prefill(llm: LLM, vocab_size: int) -> dict[str, Any]:
    """Return time to first token, blocking calls, and what snapshots cost."""
    runner = llm.engine._loaded.runner
    first = []
    for length in LENGTHS:
        if length + 2 <= llm.engine.config.max_model_len:
            first.append(_first_token(llm, runner, length, vocab_size))
            print("prefill", first[-1], flush=True)
    llm.flush_cache()
    tracked = []
    for name, lengths in TRACKED.items():
        for is_captured in (True, False):
            row = {"rows": name, "is_captured": is_captured}
            tracked.append(row | _tracked(runner, lengths, is_captured=is_captured))
            print("tracked", tracked[-1], flush=True)
    return {"first_token": first, "tracked": tracked}


def _first_token(llm: LLM, runner: Runner, length: int, vocab_size: int) -> dict[str, float]:
    """Time fresh prompts through the whole engine."""
    rng = random.Random(length)

    def call() -> float:
        ids = [rng.randrange(vocab_size) for _ in range(length)]
        return time_requests(llm, [ids], 2).first_token_seconds * 1e3

    def launched() -> float:
        with _without_rooms(runner):
            return call()

    ms, launched_ms = _in_turn(call, launched)
    with count_calls() as nothing:
        torch.cuda.synchronize()
    with count_calls() as counts:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    blocking = sum((counts.blocking - nothing.blocking).values()) / PROFILED
    busy_ms = sum(end - start for _, start, end in counts.kernels) / 1e3 / PROFILED
    return {
        "tokens": length,
        "ms": ms,
        "launched_ms": launched_ms,
        "tokens_per_second": length / ms * 1e3,
        "launched_tokens_per_second": length / launched_ms * 1e3,
        # of prefill and the decode step that follows it
        "busy_ms": busy_ms,
        "blocking_calls": blocking,
        "graph_launches": counts.graph_launches / PROFILED,
        "kernel_launches": counts.kernel_launches / PROFILED,
    }


def _tracked(runner: Runner, lengths: tuple[int, ...], *, is_captured: bool) -> dict[str, float]:
    """Time one chunk whose rows all store snapshots beside the same chunk without any."""
    plain, tracked = (_plan(runner, lengths, num_snapshots=n) for n in (0, 2))

    def run(plan: StepPlan) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        if is_captured:
            runner.run(plan).wait()
        else:
            with _without_rooms(runner):
                runner.run(plan).wait()
        return (time.perf_counter() - started) * 1e3

    ms, tracked_ms = _in_turn(lambda: run(plain), lambda: run(tracked))
    return {"ms": ms, "tracked_ms": tracked_ms, "ratio": tracked_ms / ms}


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
        # where a chat stores them: near the end, and where the last page begins
        positions = sorted({length - 40, (length - 1) // geometry.page_size * geometry.page_size})
        snapshots = tuple(Snapshot(p, row + i) for i, p in enumerate(positions[:num_snapshots]))
        pages = tuple(range(page, page + num_pages))
        segments.append(
            PrefillSegment(request, slot, slot, pages, 0, length, is_last=True, snapshots=snapshots)
        )
        page, row = page + num_pages, row + len(snapshots)
    assert row <= geometry.num_state_rows, f"{row} state rows, there are {geometry.num_state_rows}"
    return StepPlan(0, tuple(segments), (), (), 0)


def _in_turn(*calls: Callable[[], float]) -> list[float]:
    """Return medians; a first round of all is not counted."""
    rounds = [[call() for call in calls] for _ in range(1 + ROUNDS)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


@contextmanager
def _without_rooms(runner: Runner) -> Iterator[None]:
    """Launch chunks kernel by kernel."""
    prefill = runner._prefill
    kept, prefill.rooms = prefill.rooms, ()
    try:
        yield
    finally:
        prefill.rooms = kept
