"""Compaction's kernels against their definitions, bit for bit, with NaN in what stays."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
import torch

from gapless.ops.draft_tree import ancestor_bits, reference
from gapless.ops.step_metadata import Geometry
from gapless.ops.step_metadata import reference as metadata
from tests.ops.trees import random_parents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

NUM_SLOTS, COLUMNS = 6, 20


def words(pool: torch.Tensor) -> torch.Tensor:
    """The bits of a pool, in which a NaN equals itself."""
    return pool.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[pool.itemsize])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("entry", [(3,), (2, 150), (0, 4)], ids=str)
@pytest.mark.parametrize("window", [1, 5, 16])
def test_compaction_gives_the_definitions_bits(
    window: int, entry: tuple[int, ...], dtype: torch.dtype
) -> None:
    from gapless.ops.draft_tree import triton

    rows, null = 3, 3 * 2 * window
    order = torch.stack([torch.randperm(window) for _ in range(rows)])
    # the first row moves nothing
    order[0] = torch.arange(window)
    write = (torch.randperm(null)[: rows * window]).view(rows, window)
    read = write.gather(1, order)
    read, write = (torch.cat([x, torch.full((2, window), null)]) for x in (read, write))
    # layers may lie in a larger allocation, entries behind one another
    pool = torch.randn(2, 2, null + 1, *entry).to(dtype)[:, 1].to(DEVICE)
    pool[:, null] = float("nan")
    wanted = pool.clone()
    reference.compact([wanted], read.to(DEVICE), write.to(DEVICE))
    triton.compact([pool, pool[:0]], read.to(DEVICE), write.to(DEVICE))
    assert torch.equal(words(pool.contiguous()), words(wanted))


@pytest.mark.parametrize("window", [1, 6, 16])
def test_moves_are_the_definitions(window: int) -> None:
    from gapless.ops.step_metadata import triton

    geometry = Geometry(
        num_slots=NUM_SLOTS,
        num_pages=200,
        page_size=4,
        num_state_rows=9,
        replay_len=5,
        ring_len=5 + 2 * window,
        conv_width=4,
        conv_ring_len=3 + window,
        max_window=window,
    )
    generator = torch.Generator().manual_seed(window)
    slots = torch.tensor([4, 0, 5, 2, NUM_SLOTS, NUM_SLOTS])
    seq_lens = torch.tensor([0, 7, 31, 50, 0, 0])
    bits = ancestor_bits(random_parents(len(slots), window, generator))
    end = torch.randint(window, (len(slots), 1), generator=generator)
    on_path = reference.unpack(bits, window).gather(1, end[..., None].expand(-1, -1, window))[:, 0]
    path = torch.where(on_path, torch.arange(window), window).sort(1).values.minimum(end)
    lens = on_path.sum(1).masked_fill(slots == NUM_SLOTS, 0)
    table = torch.randint(200, (NUM_SLOTS + 1, COLUMNS), generator=generator)
    args = (x.to(DEVICE) for x in (path, lens, slots, seq_lens, table))
    found = triton.path_moves(*args, geometry)
    wanted = metadata.path_moves(path, lens, slots, seq_lens, table, geometry)
    for field in fields(wanted):
        own, other = getattr(found, field.name).cpu(), getattr(wanted, field.name)
        assert torch.equal(own, other), field.name
