"""Host time of a decode step, part by part, with no device to wait for.

    python -m benchmarks.host_step [--rows 64] [--steps 0,3] [--output ...]

A whole engine over the bundled model on a CPU, with rows that decode and neither come nor go. A
launched decode step is nothing: each row emits the same tokens again, with drafts three at a time,
as `benchmarks.gpu.engine` forces. What is left is what the host does on any device; what calls of
a driver cost, it does not show. Text is that of plain tokens, decoded without stop strings.

Times are the thread's own, in microseconds per step: the median of many steps, and their tenth
percentile, which counts where the machine has other work.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import torch

from gapless import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.runner.runner import Runner

# of the shortest prompt; others are longer, so that not all rows want a page at once
PROMPT_LEN = 64
ACCEPTED_LEN = 3
MAX_MODEL_LEN = 4096
NUM_STEPS = 600
# tokens of plain text
FIRST_TOKEN, NUM_TOKENS = 300, 2000


class NoGraphs:
    """Decode steps of any key, whose launch does nothing."""

    num_launches = 1

    def get(self, _key: object, _make_stages: object) -> NoGraphs:
        """Return the step of a key."""
        return self

    def launch(self) -> None:
        """Leave what the last step emitted in its buffer."""

    def clear(self) -> None:
        """Forget nothing."""


def decoding_engine(num_rows: int, num_drafts: int) -> LLM:
    """Return an engine with `num_rows` requests that decode, on no device."""
    llm = LLM(
        device="cpu", max_running_requests=num_rows, speculative_num_steps=num_drafts, seed=0,
        max_model_len=MAX_MODEL_LEN,
    )  # fmt: skip
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for row in range(num_rows):
        length = PROMPT_LEN + row % engine.config.page_size
        engine.submit(str(row), [_text_token(row, place) for place in range(length)], params)
    while engine.scheduler.num_waiting:
        engine.step()
    engine.step()
    _leave_out_device(llm, num_drafts)
    for _ in range(3):
        engine.step()
    return llm


def _text_token(row: int, place: int) -> int:
    return FIRST_TOKEN + (31 * row + 7 * place) % NUM_TOKENS


def _runner(llm: LLM) -> Runner:
    return llm.engine._loaded.runner


def _leave_out_device(llm: LLM, num_drafts: int) -> None:
    decode: Any = _runner(llm)._decode
    decode._graphs.clear()
    decode._graphs = NoGraphs()
    rows, window = decode._emitted.shape[0], 1 + num_drafts
    emitted = [
        [min(ACCEPTED_LEN, window), num_drafts, *(_text_token(row, i) for i in range(window))]
        for row in range(rows)
    ]
    decode._emitted.copy_(torch.tensor(emitted))


class Stopwatch:
    """Times the calls of methods, each of which is made once a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Time a method of one object from now on."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any) -> Any:
            started = time.thread_time()
            found = original(*args)
            self.seconds[part].append(time.thread_time() - started)
            return found

        setattr(owner, method, timed)


def measure(num_rows: int, num_drafts: int) -> dict[str, dict[str, float]]:
    """Microseconds per step of the whole and of its parts; an indented part is within another."""
    llm = decoding_engine(num_rows, num_drafts)
    engine, loop, runner = llm.engine, llm.engine._loop, _runner(llm)
    watch, inner = Stopwatch(), Stopwatch()
    watch.watch(engine, "step", "whole step")
    for _ in range(NUM_STEPS):
        engine.step()
    # a stopwatch within takes time of the whole, so they have steps of their own
    for owner, method, part in (
        (engine.scheduler, "schedule", "schedule"),
        (loop, "_run", "launch"),
        (runner._decode._upload, "send", "  copy up"),
        (runner._results, "fetch", "  copy down"),
        (engine.scheduler, "commit", "commit"),
        (engine, "_updates", "text and messages"),
    ):
        inner.watch(owner, method, part)
    for _ in range(NUM_STEPS):
        engine.step()
    assert engine.scheduler.num_running == num_rows, "rows neither come nor go"
    order = ("schedule", "launch", "  copy up", "  copy down", "commit", "text and messages")
    parts = {part: inner.seconds[part] for part in order}
    return {
        part: {"median": _us(seconds, 50), "tenth": _us(seconds, 10)}
        for part, seconds in {**watch.seconds, **parts}.items()
    }


def _us(seconds: list[float], percent: int) -> float:
    return round(quantiles(seconds[:NUM_STEPS], n=100)[percent - 1] * 1e6, 1)


def main() -> None:
    """Measure what is asked for, print it, and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", default="0,3", help="tokens drafted per step")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    found = {f"k={k}": measure(asked.rows, k) for k in map(int, asked.steps.split(","))}
    for name, parts in found.items():
        print(f"{asked.rows} rows, {name}: microseconds per step, median and tenth percentile")
        for part, us in parts.items():
            print(f"  {part:<20}{us['median']:9.1f}{us['tenth']:9.1f}")
    if asked.output is not None:
        record = {
            "command": " ".join(["python -m benchmarks.host_step", *sys.argv[1:]]),
            "date": str(date.today()),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rows": asked.rows,
            "us_per_step": found,
        }
        asked.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
