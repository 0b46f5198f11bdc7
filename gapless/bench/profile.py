"""A fixed load run in process and recorded, iteration by iteration.

It runs from an idle engine with an empty prefix cache, first to warm up. On CUDA it then runs once,
under torch's profiler. On a CPU, where watching for blocking calls slows every operation down, it
runs twice, timed and then counted: both take the same steps.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gapless.bench.idle import IdleShares, idle_shares
from gapless.bench.iterations import PHASES, Counts, Iteration, Seam, merged, read_iterations
from gapless.core.sampling_params import SamplingParams
from gapless.observe.trace import Command, Kind, Trace
from gapless.runner.recorder import record_cuda, record_host_calls, record_traffic, take_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from gapless.bench.idle import Run
    from gapless.engine.llm import LLM


@dataclass(frozen=True)
class Load:
    """Requests that arrive together, with random prompts, greedy, of fixed length."""

    num_prompts: int
    input_len: int
    output_len: int
    steps: int
    """Iterations to record, from the first on; fewer where the requests end before."""


@dataclass(frozen=True)
class EngineProfile:
    """Recorded iterations, and the trace that they were read from."""

    load: Load
    iterations: tuple[Iteration, ...]
    trace: Trace

    @property
    def steps(self) -> list[Iteration]:
        """Those with a decode step."""
        return [i for i in self.iterations if i.has_decode]

    @property
    def chunks(self) -> list[Iteration]:
        """Those with a prefill chunk."""
        return [i for i in self.iterations if i.has_prefill]

    @property
    def seams(self) -> list[Seam]:
        """Those of all iterations."""
        return [seam for iteration in self.iterations for seam in iteration.seams]

    @property
    def shares(self) -> IdleShares | None:
        """Idle shares of decode steps that follow each other; a prefill chunk parts them."""
        stretches: list[list[Run]] = [[]]
        for iteration in self.iterations:
            if iteration.has_prefill or not iteration.has_decode:
                stretches.append([])
            stretches[-1] += iteration.runs
        return idle_shares(stretches)

    @property
    def kernels(self) -> list[tuple[str, int, float]]:
        """What ran on the device, by name: how often, and seconds in all, the longest first."""
        seconds: dict[str, list[float]] = {}
        for work in self.trace.work:
            if work.launcher is not None:
                seconds.setdefault(work.name, []).append(work.end - work.start)
        found = [(name, len(taken), sum(taken)) for name, taken in seconds.items()]
        return sorted(found, key=lambda kernel: -kernel[2])

    @property
    def moves(self) -> list[Iteration]:
        """Those that moved something for the cache."""
        return [i for i in self.iterations if i.moves.commands]

    def blocking(self) -> list[dict[str, Any]]:
        """Blocking calls by call site: how many in decode steps, prefill chunks, moves."""
        columns = {
            "decode": [i.step for i in self.iterations],
            "prefill": [i.chunk for i in self.iterations],
            "moves": [i.moves for i in self.iterations],
        }
        found = {
            name: sum((counts.blocking for counts in column), Counter[str]())
            for name, column in columns.items()
        }
        calls = sorted({call for counts in found.values() for call in counts})
        return [{"call": call, **{name: found[name][call] for name in found}} for call in calls]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the trace; times in milliseconds."""
        shares = self.shares
        plain = [i for i in self.steps if not i.has_prefill]
        return {
            "load": asdict(self.load),
            "sees_kernels": self.trace.sees_kernels,
            "summary": {
                "decode": _part_summary([i.step for i in self.steps]),
                "prefill": _part_summary([i.chunk for i in self.chunks]),
                "moves": _part_summary([i.moves for i in self.moves]),
                "without_prefill": _iteration_summary(plain),
                "with_prefill": _iteration_summary(self.chunks),
                "queued_ms": _ms(_median([i.queued_seconds for i in self.steps])),
                "run_ahead": [i.run_ahead for i in self.steps],
                "seam_share": None if shares is None else shares.seam,
                "gap_share": None if shares is None else shares.gap,
            },
            "blocking": self.blocking(),
            "seams": [
                {"stage": stage, "count": len(taken), "median_ms": 1e3 * statistics.median(taken),
                 "max_ms": 1e3 * max(taken)}
                for stage, taken in self.seams_by_stage().items()
            ],
            "device_work": [
                {"name": name, "count": count, "ms": 1e3 * seconds}
                for name, count, seconds in self.kernels
            ],
            "iterations": [self._iteration_json(i) for i in self.iterations],
        }  # fmt: skip

    def seams_by_stage(self) -> dict[str, list[float]]:
        """Seconds of each seam, by the stage that it plans."""
        found: dict[str, list[float]] = {}
        for seam in self.seams:
            found.setdefault(seam.stage, []).append(seam.seconds)
        return found

    def _iteration_json(self, iteration: Iteration) -> dict[str, Any]:
        begin = self.trace.spans[0].start
        return {
            "start_ms": 1e3 * (iteration.start - begin),
            "ms": 1e3 * iteration.seconds,
            "phases_ms": {name: 1e3 * taken for name, taken in iteration.phases.items()},
            "upload_ms": 1e3 * iteration.upload_seconds,
            "run_ahead": iteration.run_ahead,
            "queued_ms": _ms(iteration.queued_seconds),
            "has_prefill": iteration.has_prefill,
            "has_decode": iteration.has_decode,
            "prefill": _counts_json(iteration.prefill),
            "moves": _counts_json(iteration.moves),
            "rest": _counts_json(iteration.rest),
            "seams": [
                {"stage": seam.stage, "start_ms": 1e3 * (seam.start - begin),
                 "ms": 1e3 * seam.seconds}
                for seam in iteration.seams
            ],
        }  # fmt: skip


def profile(llm: LLM, load: Load) -> EngineProfile:
    """Warm up with the load, then record it.

    Raises:
        RequestError: the requests cannot be served.
    """
    prompts = random_prompts(load, llm.engine.limits.vocab_size)
    on_gpu = llm.engine.config.device == "cuda"
    recorders = [record_traffic, record_cuda] if on_gpu else [record_traffic]
    # what the profiler sets up at its first start is no part of any iteration
    _record(llm, load, prompts, recorders)
    trace = _record(llm, load, prompts, recorders)
    iterations = read_iterations(trace)
    if not on_gpu:
        counted = _record(llm, load, prompts, [record_traffic, record_host_calls])
        iterations = merged(iterations, read_iterations(counted))
    return EngineProfile(load, tuple(iterations), trace)


def random_prompts(load: Load, vocab_size: int) -> list[list[int]]:
    """Token ids, the same at every call."""
    rng = random.Random(0)
    return [
        [rng.randrange(vocab_size) for _ in range(load.input_len)] for _ in range(load.num_prompts)
    ]


def _record(
    llm: LLM,
    load: Load,
    prompts: Sequence[Sequence[int]],
    recorders: Sequence[Callable[[Trace], AbstractContextManager[None]]],
) -> Trace:
    """Run the load's iterations from an idle engine, and leave it idle."""
    engine, trace = llm.engine, Trace()
    engine.flush_cache()
    params = SamplingParams(temperature=0.0, max_tokens=load.output_len, ignore_eos=True)
    request_ids = [f"profile-{index}" for index in range(len(prompts))]
    try:
        for request_id, ids in zip(request_ids, prompts, strict=True):
            engine.submit(request_id, ids, params)
        engine.watch(trace)
        with ExitStack() as recording:
            for record in recorders:
                recording.enter_context(record(trace))
            for _ in range(load.steps):
                if not engine.has_work:
                    break
                with trace.span(Kind.ITERATION, "iteration"):
                    engine.step()
    finally:
        engine.watch(None)
        for request_id in request_ids:
            engine.abort(request_id)
        # a step in flight belongs to no one, and what follows must not wait for it
        while engine.has_work:
            engine.step()
    if not trace.sees_kernels:
        take_host(trace)
    return trace


def _counts_json(counts: Counts) -> dict[str, Any]:
    return {
        "blocking": dict(counts.blocking),
        **{command.value: counts.commands[command] for command in Command},
        "host_ms": 1e3 * counts.host_seconds,
        "device_ms": 1e3 * counts.device_seconds,
    }


def _part_summary(parts: Sequence[Counts]) -> dict[str, Any]:
    """Means of counts and medians of times; no figures where there are no parts."""
    number = len(parts)
    if not parts:
        return {"number": 0}
    return {
        "number": number,
        "blocking": sum(sum(part.blocking.values()) for part in parts) / number,
        **{
            command.value: sum(part.commands[command] for part in parts) / number
            for command in Command
        },
        "host_ms": 1e3 * statistics.median(part.host_seconds for part in parts),
        "device_ms": 1e3 * statistics.median(part.device_seconds for part in parts),
    }


def _iteration_summary(iterations: Sequence[Iteration]) -> dict[str, Any]:
    """Medians of times; no figures where there are no iterations."""
    if not iterations:
        return {"number": 0}
    return {
        "number": len(iterations),
        "ms": 1e3 * statistics.median(i.seconds for i in iterations),
        **{
            f"{phase}_ms": 1e3 * statistics.median(i.phases.get(phase, 0.0) for i in iterations)
            for phase in PHASES
        },
        "upload_ms": 1e3 * statistics.median(i.upload_seconds for i in iterations),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
