"""Dense products of few rows on a GPU: right first, then how fast beside the library.

    python -m benchmarks.gpu.projections [--check] [--sweep] [--measure]
        [--only 35b] [--output figures.json]

Checks compare with float64. Times are those of CUDA graphs whose launches take different weights,
with so many that none is found in the L2 cache. The floor is the weight, x and the output at the
bandwidth below. The sweep prints the lines of `gapless/ops/skinny_linear/tuning.py`. A head of
drafts is in float8, and timed beside the 16-bit weight that it is a copy of.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.gpu.harness import READ_BANDWIDTH, ROTATED_BYTES, result
from gapless.ops.skinny_linear import Float8Matrix, skinny_linear
from gapless.ops.skinny_linear import triton as skinny
from gapless.ops.skinny_linear.tuning import (
    MAX_ROWS,
    Matrix,
    Tile,
    Vector,
    Wide,
    bucket_of,
    tile_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

MOST_LAUNCHES = 96
REPLAYS = 9
COMPILERS = 14
EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
# |out - wanted| / |wanted| by the output's type
BOUNDS = {BF16: 2.5e-3, FP32: 1e-5}
# a kernel is taken where it saves this share of the time that the product takes otherwise
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Shape:
    """A weight of a model."""

    name: str
    size: int
    inner: int
    out_dtype: torch.dtype = BF16
    is_float8: bool = False

    @property
    def weight_bytes(self) -> int:
        if self.is_float8:
            return self.size * (self.inner + 4)
        return 2 * self.size * self.inner

    def __str__(self) -> str:
        return f"{self.name} {self.size}x{self.inner}"


SHAPES = (
    Shape("35b gdn in", 12352, 2048),
    Shape("35b gdn/attention out", 2048, 4096),
    Shape("35b attention in", 9216, 2048),
    Shape("35b shared gate_up", 1024, 2048),
    Shape("35b shared down", 2048, 512),
    Shape("35b gates", 257, 2048),
    Shape("35b vocabulary", 248320, 2048, FP32),
    Shape("4b gdn in", 12352, 2560),
    Shape("4b gdn/attention out", 2560, 4096),
    Shape("4b attention in", 10240, 2560),
    Shape("4b gate_up", 18432, 2560),
    Shape("4b down", 2560, 9216),
    Shape("4b mtp in", 2560, 5120),
    Shape("4b vocabulary", 248320, 2560, FP32),
    Shape("35b draft head", 248320, 2048, FP32, is_float8=True),
    Shape("35b draft head, one of two ranks", 124160, 2048, FP32, is_float8=True),
    Shape("4b draft head", 248320, 2560, FP32, is_float8=True),
)
VECTORS = (
    Vector(4, 512, 4),
    Vector(8, 512, 8),
    Vector(2, 1024, 2),
    Vector(4, 512, 4, 4),
    Vector(8, 256, 8, 4),
)
# those of one row: others want more registers than there are
ROW_VECTORS = (Vector(4, 2048, 4), Vector(4, 1024, 4), Vector(16, 512, 8))
MATRICES = (
    Matrix(16, 128, 4, 5),
    Matrix(16, 64, 4, 5),
    Matrix(16, 64, 8, 4),
    Matrix(16, 256, 2, 4),
    Matrix(32, 64, 4, 5),
    Matrix(32, 128, 4, 3),
    Matrix(32, 128, 2, 4),
    Matrix(64, 64, 4, 4),
    Matrix(64, 32, 4, 5),
)


WIDES = (
    Wide(64, 128, 4),
    Wide(64, 64, 6),
    Wide(128, 64, 4),
    Wide(128, 128, 3),
)
# half the bytes an entry: deeper, or with larger blocks
FLOAT8_TILES: tuple[Matrix | Wide, ...] = (
    Matrix(16, 128, 4, 5),
    Matrix(16, 256, 4, 4),
    Matrix(32, 64, 4, 6),
    Matrix(32, 128, 2, 5),
    Matrix(32, 128, 4, 3),
    Matrix(32, 128, 4, 4),
    Matrix(32, 256, 2, 4),
    Matrix(32, 128, 8, 3),
    Matrix(64, 64, 4, 4),
    Matrix(64, 128, 2, 4),
    Matrix(64, 128, 4, 3),
    Wide(64, 128, 4),
    Wide(64, 128, 6),
    Wide(64, 256, 3),
    Wide(64, 256, 4),
    Wide(128, 64, 6),
    Wide(128, 128, 3),
    Wide(128, 128, 4),
    Wide(128, 128, 4, 8),
    Wide(128, 256, 3, 8),
    Wide(256, 128, 3, 8),
)


def candidates(shape: Shape, rows: int) -> list[Tile]:
    """Return the tiles worth a try for a product."""
    if shape.is_float8:
        return [t for t in FLOAT8_TILES if t.block_n >= rows and t.step <= shape.inner]
    found: list[Tile] = []
    if rows <= 4:
        found += VECTORS
    if rows == 1:
        found += ROW_VECTORS
    # a program of 16 rows of the weight reads as much of x where rows are many
    found += [tile for tile in (*MATRICES, *WIDES) if tile.block_n >= rows]
    fit = [tile for tile in found if tile.step <= shape.inner]
    if shape.size > 100_000:
        return [tile for tile in fit if tile.block_n >= 8]
    return fit


def draw(*shape: int) -> Tensor:
    """Draw normal bf16 values on the device."""
    return torch.empty(shape, dtype=BF16, device="cuda").normal_()


def draw_weight(size: int, inner: int, *, is_float8: bool) -> Tensor | Float8Matrix:
    """Draw a bf16 weight, or one in float8."""
    return Float8Matrix.of(draw(size, inner)) if is_float8 else draw(size, inner)


@dataclass(frozen=True)
class Job:
    """A kernel to compile or to check."""

    tile: Tile
    rows: int
    inner: int
    out_dtype: torch.dtype = BF16
    has_bias: bool = False
    is_float8: bool = False

    def run(self, x: Tensor, weight: Tensor | Float8Matrix, bias: Tensor) -> Tensor:
        """Multiply by the tile."""
        return skinny.skinny_linear(
            x, weight, bias if self.has_bias else None, self.tile,
            out_dtype=self.out_dtype,
        )  # fmt: skip

    @property
    def kernel(self) -> tuple[object, ...]:
        """What tells kernels apart."""
        least = {Vector: 1, Matrix: 8, Wide: 16}[type(self.tile)]
        block_m = max(least, MAX_ROWS[bucket_of(self.rows)])
        has_tail = self.inner % self.tile.step != 0
        return self.tile, block_m, has_tail, self.out_dtype, self.has_bias, self.is_float8

    def draw_weight(self, size: int) -> Tensor | Float8Matrix:
        """Draw a weight of so many rows."""
        return draw_weight(size, self.inner, is_float8=self.is_float8)


def compile_all(jobs: Sequence[Job]) -> None:
    """Compile kernels in parallel processes, which leave them in Triton's cache."""
    different = list({job.kernel: job for job in jobs}.values())
    context = get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
        list(pool.map(_compile, [different[i::COMPILERS] for i in range(COMPILERS)]))


def _compile(jobs: list[Job]) -> None:
    for job in jobs:
        try:
            job.run(draw(job.rows, job.inner), job.draw_weight(33), draw(33))
        except triton.runtime.errors.OutOfResources as error:
            print(f"{job.tile} of {job.rows} rows does not fit: {error}", flush=True)
    torch.cuda.synchronize()


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all tiles with float64; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    tiles: list[Tile] = [*VECTORS, *ROW_VECTORS, *MATRICES, *WIDES]
    jobs = [Job(tile, rows, 2048, FP32) for tile in tiles for rows in _rows_of(tile)]
    # columns that no step divides, and what else a launch can be
    kinds: tuple[Tile, ...] = (VECTORS[0], MATRICES[0], WIDES[0])
    jobs += [Job(tile, 4, 2576, BF16, has_bias=True) for tile in kinds]
    jobs += [
        Job(tile, rows, 2048, FP32, is_float8=True)
        for tile in FLOAT8_TILES
        for rows in _rows_of(tile)
    ]
    jobs += [Job(t, 4, 2576, BF16, has_bias=True, is_float8=True) for t in FLOAT8_TILES[::-1][:2]]
    compile_all(jobs)
    return [result for job in jobs for result in _job_results(job, device)]


def _rows_of(tile: Tile) -> list[int]:
    if not isinstance(tile, Vector):
        return [rows for rows in (1, 4, 8, 16, 32, 64) if rows <= tile.block_n]
    return [1] if tile in ROW_VECTORS else [1, 4]


def _job_results(job: Job, device: torch.device) -> Iterator[dict[str, Any]]:
    # a size that no block divides
    size = 1027
    x, weight = draw(job.rows, 2 * job.inner)[:, job.inner :], job.draw_weight(size)
    bias = draw(size)
    wanted = skinny_linear(x.double(), _double(weight), bias.double() if job.has_bias else None)
    poison = torch.full((job.rows, size), math.nan, dtype=job.out_dtype, device=device)
    # its memory is the next output's
    del poison
    out = job.run(x, weight, bias)
    error = float((out.double() - wanted).norm() / wanted.norm())
    error = error if math.isfinite(error) else math.inf
    yield result(str(job), error, BOUNDS[job.out_dtype])
    # a vector kernel for fewer rows is another one
    first = 1 if isinstance(job.tile, Vector) else job.rows - 1
    if 0 < first < job.rows:
        differing = int((job.run(x[first:], weight, bias) != out[first:]).sum())
        yield result(f"{job}: changed by other rows", differing, 0)


def _double(weight: Tensor | Float8Matrix) -> Tensor:
    """Return what a weight stands for."""
    if isinstance(weight, Float8Matrix):
        return weight.values.double() * weight.scales.double()[:, None]
    return weight.double()


class Weights:
    """Weights of a shape, more than the L2 cache holds."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        count = min(MOST_LAUNCHES, max(2, -(-ROTATED_BYTES // shape.weight_bytes)))
        # one that is larger than the cache evicts itself
        number = 1 if shape.weight_bytes > ROTATED_BYTES else count
        own = [
            draw_weight(shape.size, shape.inner, is_float8=shape.is_float8) for _ in range(number)
        ]
        self.each = [own[i % number] for i in range(count)]
        # larger than the cache too
        self.copied = draw(shape.size, shape.inner) if shape.is_float8 else None

    def us(self, run: Callable[[Any], object]) -> float:
        """Return microseconds of `run` with a weight."""
        return _time_us([lambda weight=weight: run(weight) for weight in self.each])

    def other_us(self, x: Tensor) -> float:
        """Time what serves the product otherwise: the library, or the weight that was copied."""
        dtype = self.shape.out_dtype
        if self.copied is None:
            return self.library_us(x)
        return _time_us([lambda: skinny_linear(x, self.copied, out_dtype=dtype)] * 2)

    def library_us(self, x: Tensor) -> float:
        """Time the library's product, with the cast that the vocabulary's logits want."""
        dtype = self.shape.out_dtype
        return self.us(lambda weight: F.linear(x, weight).to(dtype))

    def tile_us(self, x: Tensor, tile: Tile) -> float:
        """Time a kernel of ours, infinite where it does not fit."""
        dtype = self.shape.out_dtype
        try:
            return self.us(lambda w: skinny.skinny_linear(x, w, None, tile, out_dtype=dtype))
        except triton.runtime.errors.OutOfResources:
            return math.inf

    def floor_us(self, rows: int) -> float:
        """Return what moving all bytes once takes."""
        shape = self.shape
        moved = shape.weight_bytes + rows * (
            2 * shape.inner + shape.out_dtype.itemsize * shape.size
        )
        return moved / READ_BANDWIDTH * 1e6


def _time_us(launches: Sequence[Callable[[], object]]) -> float:
    """Return microseconds per launch in a graph of all of them."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        launches[0]()
        torch.cuda.synchronize()
        # `torch.cuda.graph` also collects garbage, which takes longer than the replays
        graph.capture_begin()
        for launch in launches:
            launch()
        graph.capture_end()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times[2:])


def _figures(weights: Weights, rows: int, us: float, other_us: float) -> dict[str, Any]:
    shape, floor_us = weights.shape, weights.floor_us(rows)
    return {
        "name": str(shape),
        "rows": rows,
        "us": us,
        "TB_s": shape.weight_bytes / us / 1e6,
        "floor_us": floor_us,
        "share_of_floor": floor_us / us,
        "model_head_us" if shape.is_float8 else "library_us": other_us,
    }


def _shapes(only: str) -> list[Shape]:
    return [shape for shape in SHAPES if shape.name.startswith(only)]


def measure(device: torch.device, only: str = "") -> list[dict[str, Any]]:
    """Time what the table chooses beside the library."""
    del device
    torch.manual_seed(0)
    shapes = _shapes(only)
    pinned = {
        (shape, rows): tile_of(rows, shape.size, shape.inner, is_float8=shape.is_float8)
        for shape, rows in product(shapes, MAX_ROWS)
    }
    compile_all(
        [
            Job(tile, rows, shape.inner, shape.out_dtype, is_float8=shape.is_float8)
            for (shape, rows), tile in pinned.items()
            if tile is not None
        ]
    )
    found = []
    for shape in shapes:
        weights = Weights(shape)
        for rows in MAX_ROWS:
            x, tile = draw(rows, shape.inner), pinned[shape, rows]
            other_us = weights.other_us(x)
            us = other_us if tile is None else weights.tile_us(x, tile)
            other = "model's head" if shape.is_float8 else "library"
            kernel = other if tile is None else str(tile)
            found.append(_figures(weights, rows, us, other_us) | {"kernel": kernel})
    return found


def sweep(device: torch.device, only: str) -> list[dict[str, Any]]:
    """Time all candidates; print the best three of each product, then the table's lines."""
    del device
    shapes = _shapes(only)
    torch.manual_seed(0)
    started = time.perf_counter()
    cases = list(product(shapes, MAX_ROWS))
    compile_all(
        [
            Job(tile, rows, shape.inner, shape.out_dtype, is_float8=shape.is_float8)
            for shape, rows in cases
            for tile in candidates(shape, rows)
        ]
    )
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    lines = []
    for shape in shapes:
        weights = Weights(shape)
        best: list[Tile | None] = []
        for rows in MAX_ROWS:
            x = draw(rows, shape.inner)
            other_us = weights.other_us(x)
            times = {tile: weights.tile_us(x, tile) for tile in candidates(shape, rows)}
            ranked = sorted(times, key=times.__getitem__)
            gains = times[ranked[0]] < (1 - LEAST_GAIN) * other_us
            best.append(ranked[0] if gains else None)
            tops = ", ".join(f"{times[tile]:.2f} {tile}" for tile in ranked[:3])
            print(f"{shape} M={rows}: floor {weights.floor_us(rows):.2f}, otherwise "
                  f"{other_us:.2f}; {tops}", flush=True)  # fmt: skip
            found += [
                _figures(weights, rows, times[tile], other_us) | {"kernel": str(tile)}
                for tile in ranked
            ]
        name = "FLOAT8_TILES" if shape.is_float8 else "TABLE"
        lines.append(f"{name}:    ({shape.size}, {shape.inner}): ({', '.join(map(_code, best))}),")
    print("\n".join(lines))
    print(f"swept in {time.perf_counter() - started:.0f} s", flush=True)
    return found


def _code(tile: Tile | None) -> str:
    """Return a tile as the table has it."""
    if tile is None:
        return "None"
    values = [tile.block_n, tile.block_k]
    if isinstance(tile, Vector):
        values += [tile.num_warps] + [tile.num_stages] * (tile.num_stages != 1)
    elif isinstance(tile, Matrix):
        values += [tile.slices, tile.num_stages]
    else:
        values += [tile.num_stages] + [tile.num_warps] * (tile.num_warps != 4)
    return f"{type(tile).__name__}({', '.join(map(str, values))})"


def main() -> int:
    """Run what is asked for, print it, and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("check", "sweep", "measure"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose names begin so")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    device = torch.device("cuda")
    wrong: list[dict[str, Any]] = []
    record: dict[str, Any] = {"command": sys.argv, "gpu": torch.cuda.get_device_name(device)}
    if asked.check:
        record["checks"] = check(device)
        wrong = [result for result in record["checks"] if not result["ok"]]
        print(f"{len(record['checks'])} checks, {len(wrong)} wrong", flush=True)
        for result in wrong:
            print("WRONG", f"{result['error']:.2e}", result["name"], flush=True)
    if asked.sweep:
        record["sweep"] = sweep(device, asked.only)
    if asked.measure:
        record["measure"] = measure(device, asked.only)
        for row in record["measure"]:
            parts = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values())
            print(" | ".join(parts), flush=True)
    if asked.output is not None:
        asked.output.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
