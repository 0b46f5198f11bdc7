"""Draft trees of tests, and who descends from whom in plain Python."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from gapless.ops.draft_tree import ancestor_bits

MAX_WIDTH = 16


def parent_lists(width: int) -> st.SearchStrategy[list[int]]:
    """Draw each node's parent, a node before it; node 0 stands as its own."""
    return st.tuples(*(st.integers(0, max(0, node - 1)) for node in range(width))).map(list)


def random_parents(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return parents [B, W] of random trees, long paths among them."""
    node = torch.arange(width)
    before = (node - 1).clamp(min=0)
    reach = 1 + torch.randint(width, (rows, width), generator=generator)
    drawn = torch.randint(1 << 20, (rows, width), generator=generator)
    return before - drawn % reach.minimum(before + 1)


def chain_parents(rows: int, width: int) -> torch.Tensor:
    """Return the parents [B, W] of chains."""
    return (torch.arange(width) - 1).clamp(min=0).expand(rows, width)


def bits_of(parents: list[int]) -> torch.Tensor:
    """Return the masks [1, W] of one tree."""
    return ancestor_bits(torch.tensor([parents]))


def ancestry(parents: list[int], node: int) -> list[int]:
    """Return a node, its parent, and so on to node 0."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path
