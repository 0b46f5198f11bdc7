"""What the GPU benchmarks share: comparing, timing by graph replay, floors, the command line."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

Rows = list[dict[str, Any]]

# replays before those that count
WARM_REPLAYS = 3
# those that count for an `Op`
OP_REPLAYS = 15

# bytes per second over 4 GiB on an H200: a sum, and an update in place
READ_BANDWIDTH = 4.39e12
UPDATE_BANDWIDTH = 4.23e12
# inputs that rotate hold this much together: several times the L2 cache
ROTATED_BYTES = 256 << 20
MOST_LAUNCHES = 64
# of a definition: it is slow enough
CHAIN_LAUNCHES = 3


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


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataclass, those of its fields included; None has none."""
    if is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif value is not None:
        yield value


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as figures have it."""
    return str(dtype).removeprefix("torch.")


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


@dataclass(frozen=True)
class Op:
    """One measurement: launches of a kernel over different inputs, and what each must move.

    Times are those of CUDA graphs, with so many launches that no input is found in the L2 cache.
    The chain is the definition's: torch operations, in a graph too. The floor is what must be read
    and written at the bandwidths above.
    """

    name: str
    shape: str
    kernel: Sequence[Callable[[], object]]
    chain: Sequence[Callable[[], object]]
    read: float  # bytes
    written: float
    flops: float = 0.0

    def row(self) -> dict[str, Any]:
        """Time it; return us, MB, the floor's us and share of that, and the definition's us."""
        us, moved = time_us(self.kernel, OP_REPLAYS), self.read + self.written
        bandwidth = READ_BANDWIDTH if self.written < self.read / 8 else UPDATE_BANDWIDTH
        floor_us = moved / bandwidth * 1e6
        row = {
            "name": self.name,
            "shape": self.shape,
            "us": us,
            "MB": moved / 1e6,
            "floor_us": floor_us,
            "share_of_floor": floor_us / us,
            "chain_us": time_us(self.chain, OP_REPLAYS) if self.chain else math.nan,
        }
        return row | ({"TFLOP_s": self.flops / us / 1e6} if self.flops else {})


def num_launches(moved: float) -> int:
    """Return how many launches, of so many bytes each, find nothing in the L2 cache."""
    return min(MOST_LAUNCHES, max(4, math.ceil(ROTATED_BYTES / moved)))


def rotating(
    make: Callable[[], Sequence[Any]],
    kernel: Callable[..., object],
    chain: Callable[..., object],
    count: int,
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return launches of both on inputs of their own."""
    inputs = [make() for _ in range(count)]
    return (
        [lambda args=args: kernel(*args) for args in inputs],
        [lambda args=args: chain(*args) for args in inputs[:CHAIN_LAUNCHES]],
    )


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
