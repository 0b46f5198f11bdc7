"""Paged attention and the q/k preparation on a GPU: right first, then how fast.

    python -m benchmarks.gpu.attention --check --measure [--sweep] [--output figures.json]

Checks compare with float64 on poisoned memory. Times are those of CUDA graphs that hold one launch
per KV pool, with so many pools that none is found in the L2 cache; the median of 25 replays, over
the number of launches. A window's time includes joining its splits. Its floor is reading every key
and value once at `READ_BANDWIDTH`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention

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
from gapless.ops.paged_attention import PackedSegment, prefill_attention
from gapless.ops.paged_attention.triton import (
    PrefillTiling,
    WindowTiling,
    paged_prefill_attention,
    paged_window_attention,
    prefill_tiles,
    prefill_tiling,
    window_tiling,
)
from gapless.ops.qk_norm_rope import reference as rope_reference
from gapless.ops.qk_norm_rope.triton import qk_norm_rope
from gapless.ops.rope import rotary_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STORAGE_BYTES = 36 << 30
PAGE_SIZE = 16
REPLAYS = 25

# |out - wanted| / |wanted|; bfloat16 rounds the softmax's weights and the result
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int

    def __str__(self) -> str:
        return f"{self.heads}q {self.kv_heads}kv d{self.head_dim}"

    def kv_bytes(self, positions: int) -> int:
        """Bytes of bfloat16 keys and values."""
        return positions * 2 * self.kv_heads * self.head_dim * 2


QWEN3_5_35B = Heads(16, 2, 256, 64)
LLAMA_8B = Heads(32, 8, 128, 128)
SHAPES = (QWEN3_5_35B, LLAMA_8B)


@dataclass
class Rows:
    """Decode rows with their pages in random order; the last row is a padded one where asked."""

    heads: Heads
    lengths: Sequence[int]  # committed
    width: int
    device: torch.device
    is_padded: bool = False

    def __post_init__(self) -> None:
        count = len(self.lengths)
        self.columns = -(-(max(self.lengths) + self.width) // PAGE_SIZE) + 1
        self.null_page = count * self.columns
        table = torch.randperm(self.null_page, device=self.device).view(count, self.columns)
        null = torch.full((1, self.columns), self.null_page, device=self.device)
        self.page_table = torch.cat([table, null])
        slots = torch.randperm(count, device=self.device)
        committed = torch.tensor(self.lengths, device=self.device)
        if self.is_padded:
            slots = torch.cat([slots, torch.tensor([count], device=self.device)])
            committed = torch.cat([committed, torch.zeros_like(committed[:1])])
        self.slots = slots
        self.positions = committed[:, None] + torch.arange(self.width, device=self.device)
        self.kv_len = self.columns * PAGE_SIZE

    @property
    def entries(self) -> int:
        return (self.null_page + 1) * PAGE_SIZE

    def pool(self, dtype: torch.dtype, *, first: int) -> torch.Tensor:
        """Random where a row has positions, NaN elsewhere."""
        heads = self.heads
        shape = (self.entries, 2, heads.kv_heads, heads.head_dim)
        pool = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        for row, length in enumerate(self.lengths):
            position = torch.arange(first, length + self.width, device=self.device)
            pages = self.page_table[self.slots[row], position // PAGE_SIZE]
            own = pages * PAGE_SIZE + position % PAGE_SIZE
            pool[own] = torch.randn(len(own), *shape[1:], device=self.device).to(dtype)
        return pool

    def q(self, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.slots.numel() * self.width, self.heads.heads, self.heads.head_dim)
        return torch.randn(shape, device=self.device).to(dtype)

    def backend(self, kind: type[TritonAttention | ReferenceAttention]) -> Any:
        return kind(page_size=PAGE_SIZE, max_len=self.kv_len, device=str(self.device))

    def plan(self, kind: type[TritonAttention | ReferenceAttention], *, first: int = 0) -> Any:
        return self.backend(kind).plan_window(
            self.slots, self.positions, self.page_table, kv_len=self.kv_len, first=first
        )


def check(
    device: torch.device, dtypes: Sequence[torch.dtype] = tuple(BOUNDS), most: int = 3000
) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []
    for shape, dtype in product((*SHAPES, Heads(4, 2, 64, 32)), dtypes):
        label = f"{shape} {str(dtype).removeprefix('torch.')}"
        for width, first in ((1, 0), (1, 1), (4, 0), (16, 1)):
            error = _window_error(shape, dtype, width, first, most, device)
            name = f"window {label} W={width} first={first}"
            found.append(result(name, error, BOUNDS[dtype]))
        found.append(
            result(f"prefill {label}", _prefill_error(shape, dtype, device), BOUNDS[dtype])
        )
        error = _rope_error(shape, dtype, device)
        found.append(result(f"qk_norm_rope {label}", error, BOUNDS[dtype]))
    for shape in SHAPES:
        name = f"window {shape}: rows alone, in a batch and in a graph are the same bits"
        found.append(result(name, _differing_rows(shape, dtypes[0], most, device), 0))
    return found


def _window_error(
    shape: Heads, dtype: torch.dtype, width: int, first: int, most: int, device: torch.device
) -> float:
    lengths = (1, most, 15, 16, most // 2, 127, 128 - width, most // 3)
    rows = Rows(shape, lengths, width, device, is_padded=True)
    pool, q = rows.pool(dtype, first=first), rows.q(dtype)
    scale = shape.head_dim**-0.5
    wanted = rows.plan(ReferenceAttention, first=first).run(q.double(), pool.double(), scale)
    out = rows.plan(TritonAttention, first=first).run(q, pool, scale)
    real = len(lengths) * width
    return relative(out[:real], wanted[:real])


def _prefill_error(shape: Heads, dtype: torch.dtype, device: torch.device) -> float:
    segments = packed_segments((300, 300), (17, 800), (1, 90), (1, 1), (129, 257))
    num_tokens, num_keys = segments[-1][1], segments[-1][3]
    pool_shape = (num_keys + 50, 2, shape.kv_heads, shape.head_dim)
    pool = torch.full(pool_shape, float("nan"), dtype=dtype, device=device)
    kv_read = torch.randperm(num_keys + 50, device=device)[:num_keys]
    pool[kv_read] = torch.randn(num_keys, *pool_shape[1:], device=device).to(dtype)
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device).to(dtype)
    scale = shape.head_dim**-0.5
    wanted = prefill_attention(q.double(), pool.double(), kv_read, segments, scale)
    backend = TritonAttention(page_size=PAGE_SIZE, max_len=num_keys, device=str(device))
    return relative(backend.plan_prefill(kv_read, segments).run(q, pool, scale), wanted)


def packed_segments(*sizes: tuple[int, int]) -> tuple[PackedSegment, ...]:
    """Packed segments of (queries, keys)."""
    segments, q_start, kv_start = [], 0, 0
    for queries, keys in sizes:
        packed = PackedSegment(q_start, q_start + queries, kv_start, kv_start + keys)
        segments.append(packed)
        q_start, kv_start = q_start + queries, kv_start + keys
    return tuple(segments)


@dataclass
class Projected:
    """Inputs of the q/k preparation for T tokens."""

    heads: Heads
    num_tokens: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        heads, tokens = self.heads, self.num_tokens
        gate = heads.heads * heads.head_dim
        size = gate + (heads.heads + 2 * heads.kv_heads) * heads.head_dim
        self.qkv = torch.randn(tokens, size, device=self.device).to(self.dtype)[:, gate:]
        table = rotary_table(tokens, heads.rotary_dim, 1e6, self.dtype, self.device)
        self.rotary = table[torch.randperm(tokens, device=self.device)]
        shape = (tokens + 9, 2, heads.kv_heads, heads.head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        self.kv_write = torch.randperm(tokens + 9, device=self.device)[:tokens]
        self.norm_weight = torch.randn(
            heads.heads + heads.kv_heads, heads.head_dim, device=self.device
        )

    def run(self) -> torch.Tensor:
        return qk_norm_rope(
            self.qkv,
            self.rotary,
            self.pool,
            self.kv_write,
            norm_weight=self.norm_weight,
            eps=1e-6,
        )


def _rope_error(shape: Heads, dtype: torch.dtype, device: torch.device) -> float:
    case = Projected(shape, 130, dtype, device)
    pool = case.pool.double()
    wanted = rope_reference.qk_norm_rope(
        case.qkv.double(),
        case.rotary.double(),
        pool,
        case.kv_write,
        norm_weight=case.norm_weight.double(),
        eps=1e-6,
    )
    out = case.run()
    stored = relative(case.pool[case.kv_write], pool[case.kv_write])
    return max(relative(out, wanted), stored)


def _differing_rows(shape: Heads, dtype: torch.dtype, most: int, device: torch.device) -> int:
    """Count rows whose bits change with the batch or with capture."""
    rows = Rows(shape, (most, 5, 130, most // 2), 2, device)
    pool, q = rows.pool(dtype, first=0), rows.q(dtype)
    scale = shape.head_dim**-0.5
    together = rows.plan(TritonAttention).run(q, pool, scale).clone()
    differing = 0
    for row, length in enumerate(rows.lengths):
        mine = slice(2 * row, 2 * row + 2)
        alone = rows.backend(TritonAttention).plan_window(
            rows.slots[row : row + 1],
            rows.positions[row : row + 1],
            rows.page_table,
            kv_len=length + 2,
        )
        differing += not torch.equal(alone.run(q[mine], pool, scale), together[mine])
    if device.type == "cuda":
        captured: list[torch.Tensor] = []
        plan = rows.plan(TritonAttention)
        graph = capture([lambda: captured.append(plan.run(q, pool, scale))])
        graph.replay()
        differing += not torch.equal(captured[-1], together)
    return differing


class Storage:
    """Random numbers that the pools of all measurements are cut from."""

    def __init__(self, device: torch.device) -> None:
        free, _ = torch.cuda.mem_get_info(device)
        self._numbers = torch.empty(
            min(STORAGE_BYTES, free // 2) // 2, dtype=torch.bfloat16, device=device
        )
        for part in self._numbers.split(1 << 30):
            part.normal_()

    def pools(self, heads: Heads, entries: int) -> list[torch.Tensor]:
        """Return so many pools that their sum leaves the L2 cache; none where one does not fit."""
        size = entries * 2 * heads.kv_heads * heads.head_dim
        wanted = min(MOST_LAUNCHES, max(2, -(-ROTATED_BYTES // (2 * size))))
        count = min(wanted, self._numbers.numel() // size)
        parts = self._numbers[: count * size].view(count, entries, 2, heads.kv_heads, -1)
        return list(parts)


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, and what the time is a share of."""
    torch.manual_seed(0)
    storage = Storage(device)
    found = []
    for shape, context, width in product(SHAPES, (1024, 4096, 32768), (1, 4)):
        for batch in (1, 8, 32, 64, 128):
            found += _window_row(storage, shape, batch, context, width, device)
    for shape in SHAPES:
        found += _prefill_rows(storage, shape, device)
        found += [_rope_row(shape, tokens, device) for tokens in (1, 64, 256, 8192)]
    return found


def _window_row(
    storage: Storage,
    shape: Heads,
    batch: int,
    context: int,
    width: int,
    device: torch.device,
    tiling: WindowTiling | None = None,
) -> Iterator[dict[str, Any]]:
    rows = Rows(shape, [context - width] * batch, width, device)
    pools = storage.pools(shape, rows.entries)
    if not pools:
        return
    q = rows.q(torch.bfloat16)

    def launch(pool: torch.Tensor) -> torch.Tensor:
        return paged_window_attention(
            q,
            pool,
            rows.slots,
            rows.positions,
            rows.page_table,
            shape.head_dim**-0.5,
            page_size=PAGE_SIZE,
            kv_len=rows.kv_len,
            tiling=tiling,
        )

    us = time_us([lambda pool=pool: launch(pool) for pool in pools], REPLAYS)
    moved = shape.kv_bytes(batch * context)
    yield {
        "name": f"window {shape}",
        "B": batch,
        "context": context,
        "W": width,
        "us": us,
        "MB": moved / 1e6,
        "share_of_floor": moved / READ_BANDWIDTH * 1e6 / us,
    }


# queries and keys of each segment
PREFILLS = (
    ((2048, 2048),),
    ((8192, 8192),),
    ((2048, 2048),) * 4,
    ((2048, 8192),),
)


def _prefill_rows(
    storage: Storage,
    shape: Heads,
    device: torch.device,
    tiling: PrefillTiling | None = None,
    sizes: Sequence[tuple[tuple[int, int], ...]] = PREFILLS,
) -> Iterator[dict[str, Any]]:
    scale = shape.head_dim**-0.5
    group = shape.heads // shape.kv_heads
    for packed in sizes:
        segments = packed_segments(*packed)
        num_tokens, num_keys = segments[-1][1], segments[-1][3]
        chosen = tiling or prefill_tiling(group, shape.head_dim, torch.bfloat16)
        tiles = torch.from_numpy(prefill_tiles(segments, chosen.block_m // group)).to(device)
        q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device).bfloat16()
        kv_read = torch.randperm(num_keys, device=device)

        def launch(
            pool: torch.Tensor,
            q: torch.Tensor = q,
            kv_read: torch.Tensor = kv_read,
            tiles: torch.Tensor = tiles,
            chosen: PrefillTiling = chosen,
        ) -> torch.Tensor:
            return paged_prefill_attention(q, pool, kv_read, tiles, scale, tiling=chosen)

        pools = storage.pools(shape, num_keys)[:8]
        us = time_us([lambda pool=pool: launch(pool) for pool in pools], REPLAYS)
        seen = sum(queries * keys - queries * (queries - 1) // 2 for queries, keys in packed)
        operations = 4 * shape.heads * shape.head_dim * seen
        row = {
            "name": f"prefill {shape}",
            "segments": " ".join(f"{queries}/{keys}" for queries, keys in packed),
            "us": us,
            "TFLOP/s": operations / us / 1e6,
        }
        if len(packed) == 1 and num_tokens == num_keys:
            row["sdpa_us"] = _sdpa_us(q, pools)
        yield row


def _sdpa_us(q: torch.Tensor, pools: Sequence[torch.Tensor]) -> float:
    """Time torch's attention over keys and values that lie contiguous."""
    queries = q.transpose(0, 1)[None].contiguous()
    pairs = [pool.permute(1, 2, 0, 3)[:, None].contiguous() for pool in pools[:2]]

    def launch(pair: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(
            queries, pair[0], pair[1], is_causal=True, enable_gqa=True
        )

    return time_us([lambda pair=pair: launch(pair) for pair in pairs], REPLAYS)


def _rope_row(shape: Heads, num_tokens: int, device: torch.device) -> dict[str, Any]:
    moved = 2 * 2 * num_tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    count = min(MOST_LAUNCHES, max(2, -(-ROTATED_BYTES // moved)))
    cases = [Projected(shape, num_tokens, torch.bfloat16, device) for _ in range(count)]
    us = time_us([case.run for case in cases], REPLAYS)
    return {
        "name": f"qk_norm_rope {shape}",
        "T": num_tokens,
        "us": us,
        "MB": moved / 1e6,
        "share_of_floor": moved / READ_BANDWIDTH * 1e6 / us,
    }


def sweep(device: torch.device) -> list[dict[str, Any]]:
    """Time tilings around those in use, for a few sizes each."""
    torch.manual_seed(0)
    storage = Storage(device)
    found: list[dict[str, Any]] = []
    for shape, width in product(SHAPES, (1, 4)):
        usual = window_tiling(
            width * shape.heads // shape.kv_heads, shape.kv_heads, shape.head_dim, torch.bfloat16
        )
        for tiling in _window_candidates(usual):
            for batch, context in ((1, 1024), (1, 32768), (8, 4096), (64, 4096), (128, 1024)):
                args = (storage, shape, batch, context, width, device, tiling)
                found += if_it_fits(lambda args=args: list(_window_row(*args)), asdict(tiling))
    for shape in SHAPES:
        for rows, block_n, stages in product(((64, 4), (128, 8)), (32, 64, 128), (2, 3)):
            tiling = PrefillTiling(rows[0], block_n, rows[1], stages)
            args = (storage, shape, device, tiling, (((8192, 8192),),))
            found += if_it_fits(lambda args=args: list(_prefill_rows(*args)), asdict(tiling))
    return found


def _window_candidates(usual: WindowTiling) -> Iterator[WindowTiling]:
    settings = asdict(usual)
    for block_n, warps, stages in product((32, 64), (4, 8), (2, 3, 4)):
        inner = {"block_n": block_n, "num_warps": warps, "num_stages": stages}
        yield WindowTiling(**settings | inner)
    for min_split, max_splits in ((64, 64), (128, 32), (256, 64), (256, 32), (512, 32)):
        yield WindowTiling(**settings | {"min_split": min_split, "max_splits": max_splits})


def if_it_fits(
    run: Callable[[], list[dict[str, Any]]], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a run's figures with its settings, or these and why they do not run."""
    try:
        return [row | settings for row in run()]
    except triton.runtime.errors.OutOfResources as error:
        return [{"name": f"does not fit: {error}"} | settings]


if __name__ == "__main__":
    sys.exit(main(__doc__, {"check": check, "measure": measure, "sweep": sweep}))
