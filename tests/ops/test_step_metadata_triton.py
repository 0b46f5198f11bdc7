"""The step metadata kernel against the torch chain, bit for bit, with guards around its outputs."""

from __future__ import annotations

import logging
import os
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless.ops import step_metadata
from gapless.ops.draft_tree import ancestor_bits
from gapless.ops.step_metadata import (
    FreshPages,
    Geometry,
    SlotColumns,
    StepConstants,
    WindowIndices,
    reference,
)
from tests.ops.trees import random_parents

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

GUARD_LEN = 5
GUARD = {torch.int64: -77, torch.bool: True}


def make_geometry(window: int, *, num_slots: int, replay_len: int = 5) -> Geometry:
    width = 4
    return Geometry(
        num_slots=num_slots,
        num_pages=90,
        page_size=3,
        num_state_rows=num_slots + 6,
        replay_len=replay_len,
        ring_len=replay_len + 2 * window,
        conv_width=width,
        conv_ring_len=width - 1 + window,
        max_window=window,
    )


def make_columns(geometry: Geometry, generator: torch.Generator) -> SlotColumns:
    """Return a table of slots at random lengths, short ones and done ones among them."""
    slots = geometry.num_slots + 1

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape or (slots,), generator=generator)

    seq_lens = draw(40)
    seq_lens[draw(3) == 0] %= 4
    # a step finds at most L - 1 + W entries behind a checkpoint
    behind = draw(geometry.num_replayed + 1).minimum(seq_lens)
    checkpoint_len = (seq_lens - behind) // geometry.replay_len * geometry.replay_len
    checkpoint_len = torch.where(
        seq_lens - checkpoint_len > geometry.num_replayed, seq_lens, checkpoint_len
    )
    columns = SlotColumns(
        seq_lens=seq_lens,
        checkpoint_len=checkpoint_len,
        state_rows=torch.randperm(geometry.num_state_rows, generator=generator)[:slots],
        done=draw(4) == 0,
        page_table=draw(geometry.num_pages, slots, 30),
        window_tokens=draw(1000, slots, geometry.max_window),
    )
    null = geometry.null_slot
    columns.seq_lens[null] = columns.checkpoint_len[null] = 0
    columns.state_rows[null] = geometry.null_row
    columns.done[null] = True
    columns.page_table[null] = geometry.null_page
    return SlotColumns(**{f.name: getattr(columns, f.name).to(DEVICE) for f in fields(columns)})


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Name the tensors of nested dataclasses."""
    if is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif value is not None:
        yield name, value


def guarded(value: Any, buffers: list[torch.Tensor]) -> Any:
    """Copy nested dataclasses with each tensor inside a larger buffer of guards."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: guarded(getattr(value, f.name), buffers) for f in fields(value)}
        if isinstance(value, WindowIndices) and value.logical is value.positions:
            own["logical"] = own["positions"]
        return type(value)(**own)
    if value is None:
        return None
    size = value.numel() + 2 * GUARD_LEN
    buffers.append(torch.full((size,), GUARD[value.dtype], dtype=value.dtype, device=value.device))
    return buffers[-1][GUARD_LEN:-GUARD_LEN].view(value.shape)


def assert_equal(found: Any, wanted: Any) -> None:
    for (name, own), (_, other) in zip(tensors(found), tensors(wanted), strict=True):
        assert own.dtype == other.dtype, name
        assert torch.equal(own, other), name


@pytest.mark.parametrize(
    ("num_rows", "seed"),
    [
        pytest.param(rows, seed, marks=[pytest.mark.slow] if rows > 7 and seed else [])
        for rows in (1, 2, 7, 32, 33)
        for seed in (0, 1, 2)
    ],
)
def test_kernel_gives_the_chains_bits_and_writes_nothing_else(num_rows: int, seed: int) -> None:
    from gapless.ops.step_metadata import triton

    generator = torch.Generator().manual_seed(seed)
    window = (1, 4, 3)[seed]
    geometry = make_geometry(4, num_slots=40)
    columns = make_columns(geometry, generator)
    constants = StepConstants(geometry, torch.device(DEVICE))
    for num_padded in range(num_rows + 1) if num_rows < 8 else (0, 1, num_rows):
        slots = torch.randperm(geometry.num_slots, generator=generator)[:num_rows]
        slots[num_rows - num_padded :] = geometry.null_slot
        slots = slots.to(DEVICE)
        wanted = reference.window_indices(slots, columns, geometry, constants, window=window)
        empty = triton.empty_indices(num_rows, geometry, window=window, device=torch.device(DEVICE))
        buffers: list[torch.Tensor] = []
        found = guarded(empty, buffers)
        triton.fill(found, slots, columns, geometry)
        assert_equal(found, wanted)
        for buffer in buffers:
            guard = torch.full_like(buffer[:GUARD_LEN], GUARD[buffer.dtype])
            assert torch.equal(buffer[:GUARD_LEN], guard)
            assert torch.equal(buffer[-GUARD_LEN:], guard)


@pytest.mark.parametrize("window", [1, 3, 16])
def test_trees_give_the_chains_bits_and_write_nothing_else(window: int) -> None:
    from gapless.ops.step_metadata import triton

    generator = torch.Generator().manual_seed(window)
    geometry = make_geometry(16, num_slots=20)
    columns = make_columns(geometry, generator)
    constants = StepConstants(geometry, torch.device(DEVICE))
    tree = ancestor_bits(random_parents(21, 16, generator))
    # what the null slot's row holds does not matter
    tree[geometry.null_slot] = 0
    slots = torch.randperm(20, generator=generator)[:9]
    slots[7:] = geometry.null_slot
    slots, tree = slots.to(DEVICE), tree.to(DEVICE)
    wanted = reference.window_indices(slots, columns, geometry, constants, window=window, tree=tree)
    device = torch.device(DEVICE)
    empty = triton.empty_indices(9, geometry, window=window, is_tree=True, device=device)
    buffers: list[torch.Tensor] = []
    found = guarded(empty, buffers)
    triton.fill(found, slots, columns, geometry, tree)
    assert_equal(found, wanted)
    assert len(buffers) == len(list(tensors(wanted)))
    for buffer in buffers:
        guard = torch.full_like(buffer[:GUARD_LEN], GUARD[buffer.dtype])
        assert torch.equal(buffer[:GUARD_LEN], guard)
        assert torch.equal(buffer[-GUARD_LEN:], guard)
    whole = triton.window_indices(slots, columns, geometry, window=window, tree=tree)
    assert_equal(whole, wanted)


@pytest.mark.parametrize(("window", "per_row"), [(1, 1), (4, 3)])
def test_fresh_pages_are_stored_and_used(window: int, per_row: int) -> None:
    from gapless.ops.step_metadata import triton

    generator = torch.Generator().manual_seed(window)
    geometry = make_geometry(window, num_slots=20)
    columns = make_columns(geometry, generator)
    null, num_columns = geometry.null_slot, columns.page_table.shape[1]
    slots = torch.randperm(20, generator=generator)[:9].to(DEVICE)
    slots[7:] = null
    # the pages from each window's first on, of some rows fewer
    first = columns.seq_lens[slots] // geometry.page_size
    index = slots[:, None] * num_columns + first[:, None] + torch.arange(per_row, device=DEVICE)
    page = geometry.num_pages - 1 - torch.arange(9 * per_row, device=DEVICE).view(9, per_row)
    is_null = torch.rand(9, per_row, generator=generator).to(DEVICE) < 0.3
    is_null |= (slots == null)[:, None]
    fresh = FreshPages(
        index.masked_fill(is_null, null * num_columns),
        page.masked_fill(is_null, geometry.null_page),
    )
    constants = StepConstants(geometry, torch.device(DEVICE))
    outcomes = []
    for is_kernel in (True, False):
        own = SlotColumns(**{f.name: getattr(columns, f.name).clone() for f in fields(columns)})
        if is_kernel:
            found = triton.window_indices(slots, own, geometry, window=window, fresh=fresh)
        else:
            found = reference.window_indices(
                slots, own, geometry, constants, window=window, fresh=fresh
            )
        outcomes.append((found, own))
    (found, own), (wanted, other) = outcomes
    assert_equal(found, wanted)
    for field in fields(SlotColumns):
        assert torch.equal(getattr(own, field.name), getattr(other, field.name)), field.name
    assert torch.equal(own.page_table.view(-1)[index[~is_null]], page[~is_null])
    live = ~columns.done[slots] & ~is_null[:, 0]
    used = found.kv_write.view(9, window)[live, 0] // geometry.page_size
    assert torch.equal(used, page[live, 0])
    assert len(used) > 1


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_drafters_indices_are_the_chains(num_rows: int, count: int) -> None:
    from gapless.ops.step_metadata import triton

    generator = torch.Generator().manual_seed(count)
    geometry = make_geometry(count, num_slots=20)
    columns = make_columns(geometry, generator)
    slots = torch.randperm(20, generator=generator)[:num_rows].to(DEVICE)
    slots[7:] = geometry.null_slot
    lens = torch.randint(count + 1, (num_rows,), generator=generator).to(DEVICE)
    seq_lens, page_table = columns.seq_lens[slots], columns.page_table
    given = slots, seq_lens, lens, page_table, geometry
    found = triton.extend_indices(*given, width=count)
    assert_equal(found, reference.extend_indices(*given, width=count))
    drafts = triton.draft_indices(slots, seq_lens, page_table, geometry, count=count)
    wanted = reference.draft_indices(slots, seq_lens, page_table, geometry, count=count)
    assert_equal(drafts, wanted)
    size, ring_len = geometry.page_size, geometry.hidden_ring_len
    for row, slot in enumerate(slots.tolist()):
        assert int(found.newest[row]) == row * count + max(int(lens[row]) - 1, 0)
        for i in range(count):
            before, token = int(seq_lens[row]) + i, row * count + i
            entry = int(page_table[slot, (before + 1) // size]) * size + (before + 1) % size
            assert int(found.positions[row, i]) == int(drafts.positions[i, row]) == before + 1
            assert int(found.kv_write[token]) == int(drafts.kv_write[i, row]) == entry
            assert int(found.ring_write[token]) == slot * ring_len + before % ring_len


@pytest.mark.parametrize(("window", "replay_len"), [(1, 1), (1, 16), (16, 7)])
def test_other_sizes_give_the_chains_bits(window: int, replay_len: int) -> None:
    from gapless.ops.step_metadata import triton

    geometry = make_geometry(window, num_slots=9, replay_len=replay_len)
    columns = make_columns(geometry, torch.Generator().manual_seed(window))
    constants = StepConstants(geometry, torch.device(DEVICE))
    slots = torch.tensor([3, 0, 8, 9, 9], device=DEVICE)
    wanted = reference.window_indices(slots, columns, geometry, constants, window=window)
    assert_equal(triton.window_indices(slots, columns, geometry, window=window), wanted)


def test_a_cpu_takes_the_chain_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    geometry = make_geometry(2, num_slots=3)
    columns = make_columns(geometry, torch.Generator().manual_seed(0))
    columns = SlotColumns(**{f.name: getattr(columns, f.name).cpu() for f in fields(columns)})
    constants, slots = StepConstants(geometry, torch.device("cpu")), torch.tensor([1, 3])
    step_metadata._log_chain.cache_clear()
    with caplog.at_level(logging.INFO, logger="gapless"):
        for _ in range(2):
            found = step_metadata.window_indices(slots, columns, geometry, constants, window=2)
    wanted = reference.window_indices(slots, columns, geometry, constants, window=2)
    assert_equal(found, wanted)
    assert [record.args for record in caplog.records] == [("no kernel for device cpu",)]
