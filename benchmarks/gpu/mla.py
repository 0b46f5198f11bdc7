"""Latent attention on a GPU: right first, then how fast.

    python -m benchmarks.gpu.mla --check --measure [--sweep] [--output figures.json]
    python -m benchmarks.gpu.mla --quick [--output figures.json]

The quick run checks and times windows of 16 heads under the tilings that `QUICK` names, in less
than a minute. Checks and times as in `benchmarks.gpu.attention`. The byte floor reads entries and
queries and writes results once at `READ_BANDWIDTH`; the floor is that, or the products at
`MATRIX_RATE` where these take longer: with 128 heads a latent is used often enough for it.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import triton

from benchmarks.gpu.attention import (
    BOUNDS,
    PAGE_SIZE,
    REPLAYS,
    Rows,
    if_it_fits,
    packed_segments,
)
from benchmarks.gpu.harness import (
    MOST_LAUNCHES,
    READ_BANDWIDTH,
    ROTATED_BYTES,
    capture,
    main,
    relative,
    result,
    time_us,
)
from gapless.attention.reference import ReferenceAttention
from gapless.attention.triton import TritonAttention
from gapless.ops.mla import prefill_latent_attention
from gapless.ops.mla.triton import paged_window_latent_attention
from gapless.ops.mla.tuning import LatentTiling, window_tiling

if TYPE_CHECKING:
    from collections.abc import Iterator

# bfloat16 operations per second of a product of 8192 x 8192 matrices of random numbers on an H200
MATRIX_RATE = 7.88e14
STORAGE_BYTES = 12 << 30
QUICK_STORAGE_BYTES = 1 << 30
COMPILERS = 8
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Latents:
    """Shape of a latent attention layer."""

    heads: int
    rank: int
    rope_dim: int

    def __str__(self) -> str:
        return f"{self.heads}q {self.rank}+{self.rope_dim}"

    @property
    def head_dim(self) -> int:
        return self.rank + self.rope_dim

    @property
    def scale(self) -> float:
        return 192**-0.5

    def moved_bytes(self, tokens: int, entries: int) -> int:
        """Bytes of bfloat16 queries, results and entries."""
        return 2 * (tokens * self.heads * (self.head_dim + self.rank) + entries * self.head_dim)

    def operations(self, pairs: int) -> int:
        """Of scores and mixes of so many pairs of a token and an entry."""
        return 2 * pairs * self.heads * (self.head_dim + self.rank)


# DeepSeek-V2-Lite, and a rank's share of V3 over eight; V3 on one GPU
FEW = Latents(16, 512, 64)
V3 = Latents(128, 512, 64)
TINY = Latents(4, 36, 16)


@dataclass
class LatentRows(Rows):
    """Decode rows over pages of latents."""

    heads: Latents

    def pool(self, dtype: torch.dtype, *, first: int) -> torch.Tensor:
        """Random where a row has positions, NaN elsewhere."""
        shape = (self.entries, self.heads.head_dim)
        pool = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        for row, length in enumerate(self.lengths):
            position = torch.arange(first, length + self.width, device=self.device)
            pages = self.page_table[self.slots[row], position // PAGE_SIZE]
            own = pages * PAGE_SIZE + position % PAGE_SIZE
            pool[own] = torch.randn(len(own), shape[1], device=self.device).to(dtype)
        return pool


# shape, dtype, (window, first index that exists)s
CHECKS = (
    (FEW, BF16, ((1, 0), (1, 1), (4, 1), (16, 0))),
    (FEW, FP32, ((1, 0), (4, 1))),
    (V3, BF16, ((1, 0), (4, 0))),
    (TINY, BF16, ((1, 0), (4, 1))),
    (TINY, FP32, ((1, 1), (16, 0))),
)


def check(device: torch.device, most: int = 1400) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    for shape, dtype, windows in CHECKS:
        label = f"{shape} {str(dtype).removeprefix('torch.')}"
        for width, first in windows:
            error = _window_error(shape, dtype, width, first, most, device)
            name = f"latent window {label} W={width} first={first}"
            found.append(result(name, error, BOUNDS[dtype]))
        error = _prefill_error(shape, dtype, device)
        found.append(result(f"latent prefill {label}", error, BOUNDS[dtype]))
    for shape in (FEW, V3):
        name = f"latent window {shape}: rows alone, in a batch and in a graph are the same bits"
        found.append(result(name, _differing_rows(shape, 3 * most, device), 0))
    return found


def _window_error(
    shape: Latents, dtype: torch.dtype, width: int, first: int, most: int, device: torch.device
) -> float:
    lengths = (1, most, 15, 16, most // 2, 255, 256 - width, most // 3)
    rows = LatentRows(shape, lengths, width, device, is_padded=True)
    pool, q = rows.pool(dtype, first=first), rows.q(dtype)

    def run(kind: type[TritonAttention | ReferenceAttention], acc: torch.dtype) -> torch.Tensor:
        plan = rows.plan(kind, first=first)
        out = plan.run_latent(q.to(acc), pool.to(acc), shape.scale, value_dim=shape.rank)
        return out[: len(lengths) * width]

    return relative(run(TritonAttention, dtype), run(ReferenceAttention, torch.float64))


def _prefill_error(shape: Latents, dtype: torch.dtype, device: torch.device) -> float:
    segments = packed_segments((300, 300), (17, 800), (1, 90), (1, 1), (129, 257))
    num_tokens, num_keys = segments[-1][1], segments[-1][3]
    pool_shape = (num_keys + 50, shape.head_dim)
    pool = torch.full(pool_shape, float("nan"), dtype=dtype, device=device)
    kv_read = torch.randperm(num_keys + 50, device=device)[:num_keys]
    pool[kv_read] = torch.randn(num_keys, shape.head_dim, device=device).to(dtype)
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device).to(dtype)
    wanted = prefill_latent_attention(
        q.double(), pool.double(), kv_read, segments, shape.scale, value_dim=shape.rank
    )
    backend = TritonAttention(page_size=PAGE_SIZE, max_len=num_keys, device=str(device))
    plan = backend.plan_prefill(kv_read, segments)
    return relative(plan.run_latent(q, pool, shape.scale, value_dim=shape.rank), wanted)


def _differing_rows(shape: Latents, most: int, device: torch.device) -> int:
    """Count rows whose bits change with the batch or with capture."""
    rows = LatentRows(shape, (most, 5, 130, most // 2), 2, device)
    pool, q = rows.pool(BF16, first=0), rows.q(BF16)

    def run(plan: Any, q: torch.Tensor) -> torch.Tensor:
        return plan.run_latent(q, pool, shape.scale, value_dim=shape.rank)

    together = run(rows.plan(TritonAttention), q)
    differing = 0
    for row, length in enumerate(rows.lengths):
        mine = slice(2 * row, 2 * row + 2)
        alone = rows.backend(TritonAttention).plan_window(
            rows.slots[row : row + 1],
            rows.positions[row : row + 1],
            rows.page_table,
            kv_len=length + 2,
        )
        differing += not torch.equal(run(alone, q[mine]), together[mine])
    if device.type == "cuda":
        captured: list[torch.Tensor] = []
        plan = rows.plan(TritonAttention)
        graph = capture([lambda: captured.append(run(plan, q))])
        graph.replay()
        differing += not torch.equal(captured[-1], together)
    return differing


class Storage:
    """Random numbers that the pools of all measurements are cut from."""

    def __init__(self, device: torch.device, num_bytes: int = STORAGE_BYTES) -> None:
        self._numbers = torch.empty(num_bytes // 2, dtype=BF16, device=device)
        for part in self._numbers.split(1 << 30):
            part.normal_()

    def pools(self, shape: Latents, entries: int) -> list[torch.Tensor]:
        """Return so many pools that their sum leaves the L2 cache."""
        size = entries * shape.head_dim
        wanted = min(MOST_LAUNCHES, max(2, -(-ROTATED_BYTES // (2 * size))))
        return list(self._numbers[: wanted * size].view(wanted, entries, shape.head_dim))


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, and what the time is a share of."""
    torch.manual_seed(0)
    storage = Storage(device)
    found: list[dict[str, Any]] = []
    for shape, width, context, batch in product((FEW, V3), (1, 4), (4096, 32768), (1, 8, 64)):
        found.append(_window_row(storage, shape, batch, context, width, device))
    for shape in (FEW, V3):
        for size in ((2048, 2048), (2048, 8192)):
            found.append(_prefill_row(storage, shape, size, device))
    return found


def _attend(
    rows: LatentRows,
    q: torch.Tensor,
    pool: torch.Tensor,
    tiling: LatentTiling | None,
    *,
    kept: slice = slice(None),
    first: int = 0,
) -> torch.Tensor:
    """Attend from some of the rows."""
    return paged_window_latent_attention(
        q,
        pool,
        rows.slots[kept],
        rows.positions[kept],
        rows.page_table,
        rows.heads.scale,
        value_dim=rows.heads.rank,
        page_size=PAGE_SIZE,
        kv_len=rows.kv_len if kept == slice(None) else max(rows.lengths[kept]) + rows.width,
        first=first,
        tiling=tiling,
    )


def _window_row(
    storage: Storage,
    shape: Latents,
    batch: int,
    context: int,
    width: int,
    device: torch.device,
    tiling: LatentTiling | None = None,
) -> dict[str, Any]:
    rows = LatentRows(shape, [context - width] * batch, width, device)
    q = rows.q(BF16)

    pools = storage.pools(shape, rows.entries)
    us = time_us([lambda pool=pool: _attend(rows, q, pool, tiling) for pool in pools], REPLAYS)
    moved = shape.moved_bytes(batch * width, batch * context)
    operations = shape.operations(batch * width * context)
    seconds = us / 1e6
    byte_floor = moved / READ_BANDWIDTH
    return {
        "name": f"latent window {shape}",
        "B": batch,
        "context": context,
        "W": width,
        "us": us,
        "MB": moved / 1e6,
        "TFLOP/s": operations / seconds / 1e12,
        "share_of_byte_floor": byte_floor / seconds,
        "share_of_floor": max(byte_floor, operations / MATRIX_RATE) / seconds,
    }


def _prefill_row(
    storage: Storage, shape: Latents, size: tuple[int, int], device: torch.device
) -> dict[str, Any]:
    segments = packed_segments(size)
    num_tokens, num_keys = size
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device).to(BF16)
    kv_read = torch.randperm(num_keys, device=device)
    backend = TritonAttention(page_size=PAGE_SIZE, max_len=num_keys, device=str(device))
    plan = backend.plan_prefill(kv_read, segments)
    pools = storage.pools(shape, num_keys)[:4]
    # the first run sends the tiles up, which a graph cannot hold
    plan.run_latent(q, pools[0], shape.scale, value_dim=shape.rank)
    us = time_us(
        [
            lambda pool=pool: plan.run_latent(q, pool, shape.scale, value_dim=shape.rank)
            for pool in pools
        ],
        REPLAYS,
    )
    pairs = num_tokens * num_keys - num_tokens * (num_tokens - 1) // 2
    rate = shape.operations(pairs) / us * 1e6
    return {
        "name": f"latent prefill {shape}",
        "segments": f"{num_tokens}/{num_keys}",
        "us": us,
        "TFLOP/s": rate / 1e12,
        "share_of_floor": rate / MATRIX_RATE,
    }


# windows that are in use
ONE, FOUR = window_tiling(FEW.heads, BF16), window_tiling(4 * FEW.heads, BF16)
# window -> tilings to choose from for 16 heads
QUICK: dict[int, tuple[LatentTiling, ...]] = {
    1: (
        ONE,
        replace(ONE, min_split=128, full_split=512),
    ),
    4: (
        FOUR,
        replace(FOUR, num_stages=4),
        replace(FOUR, block_n=64, num_stages=2),
        replace(FOUR, block_m=32, block_n=64, num_stages=2),
        replace(FOUR, min_split=128, full_split=1024),
    ),
}


def quick(device: torch.device) -> list[dict[str, Any]]:
    """Check the tilings of `QUICK`, then time them; rows as those of `check` and `measure`."""
    torch.manual_seed(0)
    chosen = [(width, tiling) for width, tilings in QUICK.items() for tiling in tilings]
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        fits = list(pool.map(_compile, chosen))
    found = [
        {"name": "does not fit", "W": width} | asdict(tiling)
        for (width, tiling), is_one in zip(chosen, fits, strict=True)
        if not is_one
    ]
    chosen = [each for each, is_one in zip(chosen, fits, strict=True) if is_one]
    for width, tiling in chosen:
        found += _quick_results(width, tiling, device)
    if not all(row.get("ok", True) for row in found):
        return found
    storage = Storage(device, QUICK_STORAGE_BYTES)
    for context, batch in product((512, 4096), (1, 8, 32, 64)):
        for width, tiling in chosen:
            row = _window_row(storage, FEW, batch, context, width, device, tiling)
            found.append(row | asdict(tiling))
    return found


def _compile(job: tuple[int, LatentTiling]) -> bool:
    """Leave a tiling's kernels in Triton's cache; say whether they fit the device."""
    width, tiling = job
    device = torch.device("cuda")
    rows = LatentRows(FEW, (1200,), width, device)
    try:
        _attend(rows, rows.q(BF16), rows.pool(BF16, first=0), tiling)
    except triton.runtime.errors.OutOfResources as error:
        print(f"{tiling} of {width} tokens does not fit: {error}", flush=True)
        return False
    torch.cuda.synchronize()
    return True


def _quick_results(width: int, tiling: LatentTiling, device: torch.device) -> list[dict[str, Any]]:
    lengths = (1, 1400, 15, 500, 128 - width, 5000)
    rows = LatentRows(FEW, lengths, width, device)
    pool, q = rows.pool(BF16, first=1), rows.q(BF16)
    together = _attend(rows, q, pool, tiling, first=1)
    plan = rows.plan(ReferenceAttention, first=1)
    wanted = plan.run_latent(q.double(), pool.double(), FEW.scale, value_dim=FEW.rank)
    differing = 0
    for row in range(len(lengths)):
        mine = slice(row * width, (row + 1) * width)
        alone = _attend(rows, q[mine], pool, tiling, kept=slice(row, row + 1), first=1)
        differing += not torch.equal(alone, together[mine])
    sizes = (tiling.block_m, tiling.block_n, tiling.num_warps, tiling.num_stages)
    name = f"window {width} {sizes}"
    return [
        result(name, relative(together, wanted), BOUNDS[BF16]),
        result(f"{name}: rows alone and in a batch are the same bits", differing, 0),
    ]


# block_m, block_n, warps, stages
INNER = {
    16: ((16, 32, 4, 2), (16, 32, 4, 3), (16, 32, 4, 4), (16, 64, 4, 2), (16, 64, 8, 2)),
    64: ((64, 32, 8, 3), (64, 32, 8, 4), (64, 64, 8, 2), (32, 64, 8, 2), (16, 32, 4, 3)),
}
# shortest split, splits of short rows, full split, most splits
SPLITS = ((64, 8, 256, 64), (64, 16, 256, 32), (128, 8, 512, 32), (64, 8, 1024, 32))


def sweep(device: torch.device) -> list[dict[str, Any]]:
    """Time tilings around those in use for 16 heads, for a few sizes each."""
    torch.manual_seed(0)
    storage = Storage(device)
    found: list[dict[str, Any]] = []
    for width in (1, 4):
        for tiling in _candidates(width * FEW.heads):
            for batch, context in ((1, 4096), (1, 32768), (8, 4096), (64, 4096), (64, 32768)):
                args = (storage, FEW, batch, context, width, device, tiling)
                found += if_it_fits(lambda args=args: [_window_row(*args)], asdict(tiling))
    return found


def _candidates(queries: int) -> Iterator[LatentTiling]:
    usual = window_tiling(queries, BF16)
    for block_m, block_n, num_warps, num_stages in INNER[queries]:
        yield replace(
            usual, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages
        )
    for min_split, few_splits, full_split, max_splits in SPLITS:
        yield replace(
            usual,
            min_split=min_split,
            few_splits=few_splits,
            full_split=full_split,
            max_splits=max_splits,
        )


if __name__ == "__main__":
    sys.exit(main(__doc__, {"check": check, "measure": measure, "quick": quick, "sweep": sweep}))
