"""Draft trees as bit masks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.ops.draft_tree import ancestor_bits, depths, unpack


@given(st.data(), st.integers(1, 16))
def test_masks_and_depths_follow_the_parents(data: st.DataObject, width: int) -> None:
    parents = [0] + [data.draw(st.integers(0, node - 1)) for node in range(1, width)]
    bits = ancestor_bits(torch.tensor([parents, [0] * width]))
    related = unpack(bits, width)[0].tolist()
    for node in range(width):
        path = {node}
        while node and (node := parents[node]):
            path.add(node)
        path.add(0)
        top = max(path)
        assert {j for j in range(width) if related[top][j]} == path
        assert depths(bits, width)[0, top] == len(path) - 1
    assert depths(bits, width)[1].tolist() == [0] + [1] * (width - 1)
