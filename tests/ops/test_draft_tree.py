"""Draft trees as bit masks, and the moving of an accepted path, against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.ops import draft_tree
from gapless.ops.draft_tree import ancestor_bits, depths, nth_ancestors, unpack
from tests.ops.trees import MAX_WIDTH, ancestry, parent_lists

trees = st.integers(1, MAX_WIDTH).flatmap(parent_lists)


@given(trees)
def test_masks_and_depths_follow_the_parents(parents: list[int]) -> None:
    width = len(parents)
    bits = ancestor_bits(torch.tensor([parents, [0] * width]))
    related = unpack(bits, width)[0].tolist()
    for node in range(width):
        path = ancestry(parents, node)
        assert {j for j in range(width) if related[node][j]} == set(path)
        assert depths(bits, width)[0, node] == len(path) - 1
    assert depths(bits, width)[1].tolist() == [0] + [1] * (width - 1)


@given(trees, st.lists(st.integers(0, MAX_WIDTH), max_size=5))
def test_ancestors_are_found_at_their_distance(parents: list[int], distances: list[int]) -> None:
    width = len(parents)
    bits = ancestor_bits(torch.tensor([parents, [0] * width]))
    found = nth_ancestors(bits, torch.tensor(distances, dtype=torch.int64)).tolist()
    for distance, (own, flat) in zip(distances, found, strict=True):
        paths = [ancestry(parents, node) for node in range(width)]
        assert own == [path[distance] if distance < len(path) else -1 for path in paths]
        star = {0: list(range(width)), 1: [-1] + [0] * (width - 1)}
        assert flat == star.get(distance, [-1] * width)


@given(st.data(), st.integers(1, MAX_WIDTH), st.integers(1, 3))
def test_compaction_reads_a_row_before_it_writes(
    data: st.DataObject, width: int, rows: int
) -> None:
    own = torch.arange(rows * width).view(rows, width) * 2 + 1
    order = [data.draw(st.permutations(range(width))) for _ in range(rows)]
    read = own.gather(1, torch.tensor(order))
    # two padded rows name one entry, which stays
    null = 2 * rows * width
    write, read = (torch.cat([x, torch.full((2, width), null)]) for x in (own, read))
    shapes = ((2, null + 1, 3), (1, null + 1), (3, null + 1, 2, 2))
    pools = [torch.randn(shape) for shape in shapes]
    for pool in pools:
        pool[:, null] = float("nan")
    before = [pool.clone() for pool in pools]
    draft_tree.compact(pools, read, write)
    source = torch.arange(null + 1)
    source[write[:rows].flatten()] = read[:rows].flatten()
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.nan_to_num(9.0), old[:, source].nan_to_num(9.0))


def compact_entry_by_entry(
    pools: list[torch.Tensor], read: torch.Tensor, write: torch.Tensor
) -> None:
    """Move entries in a path's descending order, each read as the ones before have left it."""
    for pool in pools:
        for i in reversed(range(read.shape[1])):
            pool[:, write[:, i]] = pool[:, read[:, i]]


def test_planted_compaction_per_entry_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_tree, "compact", compact_entry_by_entry)
    with pytest.raises(AssertionError):
        test_compaction_reads_a_row_before_it_writes()
