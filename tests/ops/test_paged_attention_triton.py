"""Attention kernels against the torch definition in float64; what must not be read is NaN.

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

from gapless.ops.paged_attention import prefill_attention, window_attention

if TYPE_CHECKING:
    from types import ModuleType

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

NAN = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from gapless.ops.paged_attention import triton

    return triton


@dataclass
class Window:
    """B rows of W tokens over a pool that is NaN except where a row has positions."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]  # committed
    first: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        rows, longest = len(self.lengths), max(self.lengths) + self.width
        columns = longest // self.page_size + 2
        table = torch.randperm(rows * columns).view(rows, columns)
        # the null slot's row names the null page
        self.page_table = torch.cat([table, torch.full((1, columns), rows * columns)])
        entries = (rows * columns + 1) * self.page_size
        # layers share one allocation
        stacked = torch.full((entries, 2, 2, self.kv_heads, self.head_dim), NAN, dtype=self.dtype)
        self.pool = stacked[:, 1]
        self.slots = torch.randperm(rows)
        self.positions = torch.tensor(self.lengths)[:, None] + torch.arange(self.width)
        for row in range(rows):
            own = self.entries(row)
            values = torch.randn(len(own), *self.pool.shape[1:], dtype=torch.float64)
            self.pool[own] = values.to(self.dtype)
        q = torch.randn(rows * self.width, self.heads + 1, self.head_dim, dtype=torch.float64)
        self.q = q.to(self.dtype)[:, 1:]
        self.kv_len = columns * self.page_size

    def entries(self, row: int) -> torch.Tensor:
        position = torch.arange(self.first, self.lengths[row] + self.width)
        pages = self.page_table[self.slots[row], position // self.page_size]
        return pages * self.page_size + position % self.page_size

    def wanted(self, row: int) -> torch.Tensor:
        """One row's result [W, H, D] by the definition, in float64."""
        own = self.entries(row)
        position = torch.arange(self.first, self.lengths[row] + self.width)
        mask = position <= self.positions[row][:, None]
        q = self.q.view(-1, self.width, self.heads, self.head_dim)[row]
        return window_attention(
            q[None].double(), self.pool.double(), own[None], mask[None], self.head_dim**-0.5
        )[0]

    def run(self, kernels: ModuleType, **changed: Any) -> torch.Tensor:
        """The kernel's result [B, W, H, D]."""
        inputs = {
            name: changed.pop(name, getattr(self, name)).to(DEVICE)
            for name in ("q", "pool", "slots", "positions", "page_table")
        }
        settings = {"page_size": self.page_size, "kv_len": self.kv_len, "first": self.first}
        out = kernels.paged_window_attention(
            **inputs, scale=self.head_dim**-0.5, **settings | changed
        )
        return out.view(-1, self.width, self.heads, self.head_dim).cpu()


def small_splits(kernels: ModuleType, **changed: Any) -> Any:
    """Tiling that splits short rows too."""
    sizes = {"min_split": 64, "max_splits": 4, "block_m": 32, "block_n": 16}
    return kernels.WindowTiling(**sizes | {"num_warps": 4, "num_stages": 1} | changed)


HALF: dict[str, Any] = {"dtype": torch.bfloat16 if DEVICE == "cuda" else torch.float16}
WINDOWS = [
    partial(Window, 1, 2, 2, 64, (0, 15, 16, 129, 300)),
    partial(Window, 1, 8, 1, 256, (5, 70), page_size=32),
    partial(Window, 4, 4, 2, 128, (1, 13, 62, 200), first=1),
    partial(Window, 4, 8, 1, 64, (1, 61, 64, 300), first=1, **HALF),
    partial(Window, 16, 4, 1, 64, (1, 120), first=1),
    partial(Window, 3, 6, 2, 32, (1, 40), page_size=8, **HALF),
]


@pytest.mark.parametrize("splits", ["usual", "small"])
@pytest.mark.parametrize("make", WINDOWS)
def test_window_agrees_with_definition(
    kernels: ModuleType, make: partial[Window], splits: str
) -> None:
    case = make()
    tiling = small_splits(kernels) if splits == "small" else None
    out = case.run(kernels, tiling=tiling)
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
    case.run(kernels)
    monkeypatch.undo()
    assert sum(x.nbytes for x in made) == kernels.window_bytes(
        len(case.q), case.width, case.heads, case.kv_heads, case.head_dim, case.dtype,
        kv_len=case.kv_len - case.first,
    )  # fmt: skip


def test_bits_depend_on_the_row_alone(kernels: ModuleType) -> None:
    case = Window(2, 4, 2, 32, (300, 5, 64, 520))
    settings = {"tiling": small_splits(kernels, max_splits=8)}
    together = case.run(kernels, **settings)
    for row, length in enumerate(case.lengths):
        q = case.q.view(-1, 2, 4, 32)[row]
        alone = {
            "q": q,
            "slots": case.slots[row : row + 1],
            "positions": case.positions[row : row + 1],
        }
        for kv_len in (length + 2, case.kv_len):
            found = case.run(kernels, **alone, **settings, kv_len=kv_len)
            assert torch.equal(found[0], together[row])


def test_padded_rows_stay_to_themselves(kernels: ModuleType) -> None:
    case = Window(2, 4, 2, 64, (5, 100))
    null = torch.tensor([2])
    padded = {
        "q": torch.cat([torch.full((2, 4, 64), NAN), case.q, case.q[:2]]),
        "slots": torch.cat([null, case.slots, null]),
        "positions": torch.cat([torch.tensor([[0, 1]]), case.positions, torch.tensor([[0, 1]])]),
    }
    out = case.run(kernels, **padded)
    assert torch.equal(out[1:3], case.run(kernels))
    # a draft pass of a padded row stands before the first index that exists
    before = {name: value[-2:] if name == "q" else value[-1:] for name, value in padded.items()}
    assert torch.equal(case.run(kernels, **before, first=2), torch.zeros(1, 2, 4, 64))


def test_entries_beyond_32_bits(kernels: ModuleType) -> None:
    head_dim, page_size = 16, 16
    pages = 2**32 // (2 * head_dim * page_size) + 2
    shape = (pages * page_size, 2, 1, head_dim)
    if DEVICE == "cuda":
        pool = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    else:
        # address space only: Linux's MAP_NORESERVE; memory is taken where it is touched
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        memory = mmap.mmap(-1, 2 * int(np.prod(shape)), flags=flags)
        pool = torch.frombuffer(memory, dtype=torch.float16).view(shape)
    table = torch.tensor([[pages - 1, 0, pages - 2]], device=DEVICE)
    pool[-2 * page_size :] = torch.randn(2 * page_size, *shape[1:]).to(pool)
    pool[:page_size] = torch.randn(page_size, *shape[1:]).to(pool)
    q = torch.randn(1, 2, head_dim).to(pool)
    entries = (table[0][:, None] * page_size + torch.arange(page_size, device=DEVICE)).view(-1)
    mask = torch.ones(1, 1, 40, dtype=torch.bool, device=DEVICE)
    wanted = window_attention(q[None], pool, entries[None, :40], mask, 0.2)[0]
    slots, positions = torch.tensor([0], device=DEVICE), torch.tensor([[39]], device=DEVICE)
    found = kernels.paged_window_attention(
        q, pool, slots, positions, table, 0.2, page_size=page_size, kv_len=48
    )
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
    tiles = torch.from_numpy(kernels.prefill_tiles([(0, 1, 0, 40)], 1)).to(DEVICE)
    found = kernels.paged_prefill_attention(q, pool, entries, tiles, 0.2)
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@dataclass
class Prefill:
    """Packed segments of (queries, keys) over a pool that is NaN except where it is read."""

    sizes: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        segments, q_start, kv_start = [], 0, 0
        for queries, keys in self.sizes:
            segments.append((q_start, q_start + queries, kv_start, kv_start + keys))
            q_start, kv_start = q_start + queries, kv_start + keys
        self.segments = tuple(segments)
        entries = kv_start + 30
        stacked = torch.full((entries, 2, 2, self.kv_heads, self.head_dim), NAN, dtype=self.dtype)
        self.pool = stacked[:, 1]
        self.kv_read = torch.randperm(entries)[:kv_start]
        values = torch.randn(kv_start, 2, self.kv_heads, self.head_dim, dtype=torch.float64)
        self.pool[self.kv_read] = values.to(self.dtype)
        q = torch.randn(q_start, self.heads + 1, self.head_dim, dtype=torch.float64)
        self.q = q.to(self.dtype)[:, 1:]

    def run(self, kernels: ModuleType, tiling: Any) -> torch.Tensor:
        """The kernel's result [T, H, D]."""
        group = self.heads // self.kv_heads
        tiles = kernels.prefill_tiles(self.segments, tiling.block_m // group)
        inputs = (self.q, self.pool, self.kv_read, torch.from_numpy(tiles))
        moved = (x.to(DEVICE) for x in inputs)
        return kernels.paged_prefill_attention(*moved, self.head_dim**-0.5, tiling=tiling).cpu()


# a whole prompt, a continuation, one last token, a prompt of one token
SIZES = ((70, 70), (20, 55), (1, 40), (1, 1))
PREFILLS = [
    partial(Prefill, SIZES, 2, 2, 64),
    partial(Prefill, SIZES, 6, 2, 32),
    partial(Prefill, SIZES, 8, 1, 128, **HALF),
    partial(Prefill, ((9, 30), (17, 17)), 4, 2, 256),
]


@pytest.mark.parametrize("make", PREFILLS)
def test_prefill_agrees_with_definition(kernels: ModuleType, make: partial[Prefill]) -> None:
    case = make()
    wanted = prefill_attention(
        case.q.double(), case.pool.double(), case.kv_read, case.segments, case.head_dim**-0.5
    )
    group = case.heads // case.kv_heads
    usual = kernels.prefill_tiling(group, case.head_dim, case.dtype)
    for tiling in (usual, kernels.PrefillTiling(16, 16, 4, 1)):
        out = case.run(kernels, tiling)
        assert out.dtype is case.dtype
        bound = TOLERANCE[case.dtype]
        torch.testing.assert_close(out.double(), wanted, rtol=bound, atol=bound)


def test_a_segment_of_nan_leaves_its_neighbours_alone(kernels: ModuleType) -> None:
    case = Prefill(((5, 9), (3, 3), (6, 20)), 4, 2, 64)
    tiling = kernels.PrefillTiling(32, 32, 4, 1)
    before = case.run(kernels, tiling)
    case.pool[case.kv_read[9:12]] = NAN
    after = case.run(kernels, tiling)
    assert torch.equal(after[:5], before[:5])
    assert torch.equal(after[8:], before[8:])
    assert after[5:8].isnan().all()


def test_tiles_hold_each_token_once_and_most_keys_come_first(kernels: ModuleType) -> None:
    segments = [(0, 7, 0, 7), (7, 8, 7, 30), (8, 28, 30, 80)]
    tiles = kernels.prefill_tiles(segments, 6)
    assert tiles.dtype == np.int32
    seen = {}
    for begin, end, kv_start, offset in tiles.tolist():
        assert 0 < end - begin <= 6
        seen |= {token: (kv_start, token + offset) for token in range(begin, end)}
    assert seen == {
        token: (kv_start, kv_end - (q_end - token))
        for q_start, q_end, kv_start, kv_end in segments
        for token in range(q_start, q_end)
    }
    num_keys = (tiles[:, 1] + tiles[:, 3] - tiles[:, 2]).tolist()
    assert num_keys == sorted(num_keys, reverse=True)
