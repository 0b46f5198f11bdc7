"""What the GPU benchmarks share: comparing, timing by graph replay, and the command line."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

Rows = list[dict[str, Any]]

# replays before those that count
WARM_REPLAYS = 3


Params = ParamSpec("Params")
Found = TypeVar("Found")


def in_own_process(
    measure: Callable[Params, Found], *args: Params.args, **kwargs: Params.kwargs
) -> Found:
    """Call a module's function in a process that ends with it.

    What it leaves on the GPU goes with it, and so does a profiler: torch leaves CUPTI attached, and
    each launch of a graph then takes the host far longer.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(measure, *args, **kwargs).result()


def result(name: str, error: float, bound: float) -> dict[str, Any]:
    """Say whether an error is within its bound."""
    return {"name": name, "error": error, "bound": bound, "ok": error <= bound}


def relative(out: Tensor, wanted: Tensor) -> float:
    """Return |out - wanted| / |wanted|, infinite where something is not finite."""
    difference = out.double() - wanted.double()
    error = float(difference.norm() / wanted.double().norm())
    return error if math.isfinite(error) else math.inf


def capture(launches: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Warm up and capture all launches in one graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for launch in launches[:2]:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Return the microseconds of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def time_us(launches: Sequence[Callable[[], object]], replays: int) -> float:
    """Return microseconds per launch: the median of some replays of a graph of all of them."""
    graph = capture(launches)
    times = [replay_us(graph) for _ in range(WARM_REPLAYS + replays)]
    return statistics.median(times[WARM_REPLAYS:]) / len(launches)


def print_rows(rows: Rows) -> None:
    """Print figures, a row a line."""
    for row in rows:
        parts = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()]
        print("  ".join(parts), flush=True)


def main(doc: str | None, runs: Mapping[str, Callable[[torch.device], Rows]]) -> int:
    """Run what is asked for, in order; a failed check ends the run without figures.

    Args: runs: by the name of their flag, `check` first.
    """
    parser = argparse.ArgumentParser(description=doc)
    for name in runs:
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    asked = parser.parse_args()
    device = torch.device("cuda")
    figures: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
    }
    for name, run in runs.items():
        if not vars(asked)[name]:
            continue
        figures[name] = run(device)
        print_rows(figures[name])
        if not all(row.get("ok", True) for row in figures[name]):
            return 1
    if asked.output:
        asked.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 0
