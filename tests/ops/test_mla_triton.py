"""Latent attention kernels against the torch definition in float64; what must not be read is NaN.

On a CPU they run in Triton's interpreter, which multiplies no bfloat16: float16 stands in.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from gapless.ops.mla import prefill_latent_attention, window_latent_attention

if TYPE_CHECKING:
    from types import ModuleType

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from gapless.ops.mla import triton

    return triton


SPLITS = ("min_split", "few_splits", "full_split", "max_splits")


def tiling(**changed: Any) -> Any:
    """Window tiling that splits short rows too."""
    from gapless.ops.mla.tuning import LatentTiling

    sizes = dict(zip(SPLITS, (64, 2, 128, 4), strict=True)) | {"block_m": 32, "block_n": 16}
    return LatentTiling(**sizes | {"num_warps": 4, "num_stages": 1} | changed)


@dataclass
class Window:
    """B rows of W tokens over a pool that is NaN except where a row has positions."""

    width: int
    heads: int
    rank: int
    rope_dim: int
    lengths: tuple[int, ...]  # committed
    first: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.channels = self.rank + self.rope_dim
        self.scale = self.channels**-0.5
        rows, longest = len(self.lengths), max(self.lengths) + self.width
        columns = longest // self.page_size + 2
        table = torch.randperm(rows * columns).view(rows, columns)
        # the null slot's row names the null page
        self.page_table = torch.cat([table, torch.full((1, columns), rows * columns)])
        entries = (rows * columns + 1) * self.page_size
        # an entry is followed by what the kernel must not take for its channels
        self.pool = torch.full((entries, self.channels + 4), NAN, dtype=self.dtype)
        self.pool = self.pool[:, : self.channels]
        self.slots = torch.randperm(rows)
        self.positions = torch.tensor(self.lengths)[:, None] + torch.arange(self.width)
        for row in range(rows):
            own = self.entries(row)
            values = torch.randn(len(own), self.channels, dtype=torch.float64)
            self.pool[own] = values.to(self.dtype)
        q = torch.randn(rows * self.width, self.heads + 1, self.channels, dtype=torch.float64)
        self.q = q.to(self.dtype)[:, 1:]
        self.kv_len = columns * self.page_size

    def entries(self, row: int) -> torch.Tensor:
        position = torch.arange(self.first, self.lengths[row] + self.width)
        pages = self.page_table[self.slots[row], position // self.page_size]
        return pages * self.page_size + position % self.page_size

    def wanted(self, row: int) -> torch.Tensor:
        """One row's result [W, H, R] by the definition, in float64."""
        own = self.entries(row)
        position = torch.arange(self.first, self.lengths[row] + self.width)
        mask = position <= self.positions[row][:, None]
        q = self.q.view(-1, self.width, self.heads, self.channels)[row]
        return window_latent_attention(
            q[None].double(),
            self.pool.double(),
            own[None],
            mask[None],
            self.scale,
            value_dim=self.rank,
        )[0]

    def run(self, kernels: ModuleType, **changed: Any) -> torch.Tensor:
        """The kernel's result [B, W, H, R]."""
        inputs = {
            name: changed.pop(name, getattr(self, name)).to(DEVICE)
            for name in ("q", "pool", "slots", "positions", "page_table")
        }
        settings = {"page_size": self.page_size, "kv_len": self.kv_len, "first": self.first}
        out = kernels.paged_window_latent_attention(
            **inputs, scale=self.scale, value_dim=self.rank, **settings | changed
        )
        return out.view(-1, self.width, self.heads, self.rank).cpu()


WINDOWS = [
    partial(Window, 1, 16, 512, 64, (0, 33, 260), dtype=HALF),
    partial(Window, 1, 4, 36, 16, (0, 15, 16, 129, 300)),
    partial(Window, 4, 8, 64, 32, (1, 62, 520), first=1),
    partial(Window, 4, 6, 24, 8, (1, 61, 64, 300), page_size=32, dtype=HALF),
    partial(Window, 16, 4, 32, 16, (1, 120), first=1),
]


@pytest.mark.parametrize("splits", ["usual", "small"])
@pytest.mark.parametrize("make", WINDOWS)
def test_window_agrees_with_definition(
    kernels: ModuleType, make: partial[Window], splits: str
) -> None:
    case = make()
    out = case.run(kernels, tiling=tiling() if splits == "small" else None)
    assert out.dtype is case.dtype
    bound = TOLERANCE[case.dtype]
    for row in range(len(case.lengths)):
        torch.testing.assert_close(out[row].double(), case.wanted(row), rtol=bound, atol=bound)


@pytest.mark.usefixtures("launches_do_nothing")
@pytest.mark.parametrize("make", WINDOWS)
def test_bytes_are_those_that_a_window_takes(
    kernels: ModuleType, make: partial[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make()
    made: list[torch.Tensor] = []
    empty = torch.empty

    def watched(*size: Any, **kind: Any) -> torch.Tensor:
        made.append(empty(*size, **kind))
        return made[-1]

    monkeypatch.setattr(kernels.torch, "empty", watched)
    out = case.run(kernels)
    monkeypatch.undo()
    assert sum(x.nbytes for x in made) - out.nbytes == kernels.window_bytes(
        len(case.q), case.width, case.heads, case.rank, case.dtype, kv_len=case.kv_len - case.first
    )


def test_bits_depend_on_the_row_alone(kernels: ModuleType) -> None:
    case = Window(2, 4, 32, 16, (300, 5, 64, 520))
    settings = {"tiling": tiling(max_splits=8)}
    together = case.run(kernels, **settings)
    for row, length in enumerate(case.lengths):
        alone = {
            "q": case.q.view(-1, 2, 4, case.channels)[row],
            "slots": case.slots[row : row + 1],
            "positions": case.positions[row : row + 1],
        }
        for kv_len in (length + 2, case.kv_len):
            found = case.run(kernels, **alone, **settings, kv_len=kv_len)
            assert torch.equal(found[0], together[row])


def test_a_launch_has_a_program_for_every_split(kernels: ModuleType) -> None:
    from tests.ops.latent_splits import split_lens

    lengths = torch.arange(1, 65537)
    for sizes in ((64, 8, 512, 32), (64, 16, 256, 64), (256, 2, 256, 4)):
        split_len = split_lens(65536, sizes, DEVICE)
        assert (split_len % 64 == 0).all()
        splits = -(-lengths // split_len)
        chosen = tiling(**dict(zip(SPLITS, sizes, strict=True)))
        # of rows up to a length, in steps that meet every multiple of 64 and what is beside it
        for length in (*range(1, 9000, 21), *range(63, 65536, 1984), 65536):
            assert splits[:length].max() <= chosen.most_splits(length)
        # few splits as long as they are not full, then full ones as long as there are not most
        assert splits[: sizes[1] * sizes[2]].max() == sizes[1]
        assert splits.max() == sizes[3]


def test_padded_rows_stay_to_themselves(kernels: ModuleType) -> None:
    case = Window(2, 4, 32, 16, (5, 100))
    null = torch.tensor([2])
    padded = {
        "q": torch.cat([torch.full((2, 4, case.channels), NAN), case.q, case.q[:2]]),
        "slots": torch.cat([null, case.slots, null]),
        "positions": torch.cat([torch.tensor([[0, 1]]), case.positions, torch.tensor([[0, 1]])]),
    }
    out = case.run(kernels, **padded)
    assert torch.equal(out[1:3], case.run(kernels))
    # a draft pass of a padded row stands before the first index that exists
    before = {name: value[-2:] if name == "q" else value[-1:] for name, value in padded.items()}
    assert torch.equal(case.run(kernels, **before, first=2), torch.zeros(1, 2, 4, 32))


def test_entries_beyond_32_bits(kernels: ModuleType) -> None:
    from gapless.ops.paged_attention.triton import prefill_tiles

    channels, page_size = 48, 16
    pages = 2**32 // (channels * page_size) + 2
    shape = (pages * page_size, channels)
    if DEVICE == "cuda":
        pool = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    else:
        # address space only: Linux's MAP_NORESERVE; memory is taken where it is touched
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        memory = mmap.mmap(-1, 2 * int(np.prod(shape)), flags=flags)
        pool = torch.frombuffer(memory, dtype=torch.float16).view(shape)
    table = torch.tensor([[pages - 1, 0, pages - 2]], device=DEVICE)
    pool[-2 * page_size :] = torch.randn(2 * page_size, channels).to(pool)
    pool[:page_size] = torch.randn(page_size, channels).to(pool)
    q = torch.randn(1, 2, channels).to(pool)
    entries = (table[0][:, None] * page_size + torch.arange(page_size, device=DEVICE)).view(-1)
    mask = torch.ones(1, 1, 40, dtype=torch.bool, device=DEVICE)
    wanted = window_latent_attention(q[None], pool, entries[None, :40], mask, 0.2, value_dim=32)[0]
    slots, positions = torch.tensor([0], device=DEVICE), torch.tensor([[39]], device=DEVICE)
    found = kernels.paged_window_latent_attention(
        q, pool, slots, positions, table, 0.2, value_dim=32, page_size=page_size, kv_len=48
    )
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    tiles = torch.from_numpy(prefill_tiles([(0, 1, 0, 40)], 1)).to(DEVICE)
    found = kernels.paged_prefill_latent_attention(q, pool, entries, tiles, 0.2, value_dim=32)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@dataclass
class Prefill:
    """Packed segments of (queries, keys) over a pool that is NaN except where it is read."""

    sizes: tuple[tuple[int, int], ...]
    heads: int
    rank: int
    rope_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.channels = self.rank + self.rope_dim
        self.scale = self.channels**-0.5
        segments, q_start, kv_start = [], 0, 0
        for queries, keys in self.sizes:
            segments.append((q_start, q_start + queries, kv_start, kv_start + keys))
            q_start, kv_start = q_start + queries, kv_start + keys
        self.segments = tuple(segments)
        entries = kv_start + 30
        self.pool = torch.full((entries, self.channels), NAN, dtype=self.dtype)
        self.kv_read = torch.randperm(entries)[:kv_start]
        values = torch.randn(kv_start, self.channels, dtype=torch.float64)
        self.pool[self.kv_read] = values.to(self.dtype)
        q = torch.randn(q_start, self.heads + 1, self.channels, dtype=torch.float64)
        self.q = q.to(self.dtype)[:, 1:]

    def wanted(self) -> torch.Tensor:
        """The result [T, H, R] by the definition, in float64."""
        return prefill_latent_attention(
            self.q.double(),
            self.pool.double(),
            self.kv_read,
            self.segments,
            self.scale,
            value_dim=self.rank,
        )

    def run(self, kernels: ModuleType, tiling: Any) -> torch.Tensor:
        """The kernel's result [T, H, R]."""
        from gapless.ops.paged_attention.triton import prefill_tiles

        num_tokens = kernels.tokens_per_tile(self.heads, tiling.block_m)
        tiles = torch.from_numpy(prefill_tiles(self.segments, num_tokens))
        moved = (x.to(DEVICE) for x in (self.q, self.pool, self.kv_read, tiles))
        return kernels.paged_prefill_latent_attention(
            *moved, self.scale, value_dim=self.rank, tiling=tiling
        ).cpu()


def prefill_tiling(block_m: int) -> Any:
    from gapless.ops.paged_attention.triton import PrefillTiling

    return PrefillTiling(block_m, 16, 4, 1)


# a whole prompt, a continuation, one last token, a prompt of one token
SIZES = ((40, 40), (20, 55), (1, 40), (1, 1))
PREFILLS = [
    partial(Prefill, SIZES, 4, 36, 16),
    partial(Prefill, SIZES, 6, 24, 8, dtype=HALF),
    # heads of a token over several programs, the last in part
    partial(Prefill, ((9, 30), (5, 5)), 37, 64, 32),
    partial(Prefill, ((9, 30), (17, 17)), 16, 512, 64, dtype=HALF),
]


@pytest.mark.parametrize("make", PREFILLS)
def test_prefill_agrees_with_definition(kernels: ModuleType, make: partial[Prefill]) -> None:
    from gapless.ops.mla.tuning import prefill_tiling as tuned

    case = make()
    wanted = case.wanted()
    for tiling in (tuned(case.dtype), prefill_tiling(32)):
        out = case.run(kernels, tiling)
        assert out.dtype is case.dtype
        bound = TOLERANCE[case.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)


def test_a_segment_of_nan_leaves_its_neighbours_alone(kernels: ModuleType) -> None:
    case = Prefill(((5, 9), (3, 3), (6, 20)), 4, 32, 16)
    before = case.run(kernels, prefill_tiling(32))
    case.pool[case.kv_read[9:12]] = NAN
    after = case.run(kernels, prefill_tiling(32))
    assert torch.equal(after[:5], before[:5])
    assert torch.equal(after[8:], before[8:])
    assert after[5:8].isnan().all()


@pytest.mark.parametrize(
    ("heads", "block_m", "group", "tokens"),
    [(16, 64, 16, 4), (20, 64, 20, 3), (64, 64, 64, 1), (96, 64, 48, 1), (128, 64, 64, 1)],
)
def test_heads_are_spread_evenly(
    kernels: ModuleType, heads: int, block_m: int, group: int, tokens: int
) -> None:
    assert kernels.heads_per_program(heads, block_m) == group
    assert kernels.tokens_per_tile(heads, block_m) == tokens


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((512, 64, "bfloat16"), None),
        ((36, 16, "float32"), None),
        ((640, 64, "bfloat16"), "kv_lora_rank 640 (want at most 512)"),
        ((512, 128, "bfloat16"), "rope_dim 128 (want at most 64)"),
        ((512, 64, "float64"), "dtype float64 (want one of bfloat16, float16, float32)"),
    ],
)
def test_what_is_not_served_is_named(
    kernels: ModuleType, shape: tuple[int, int, str], reason: str | None
) -> None:
    assert kernels.unsupported(*shape) == reason
