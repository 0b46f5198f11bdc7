"""How drafts grow within a window, and how far a step reaches for them.

A window of W tokens is the newest token and its drafts: W - 1 in a row, or a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class TreeShape:
    """A tree of drafts: each pass of the drafter goes on from the best `topk` of the last depth."""

    num_steps: int
    """Depth of the deepest draft."""
    topk: int
    """Children that are looked at of each draft that is gone on from, 2 at least."""

    @property
    def num_candidates(self) -> int:
        """Drafts that are weighed; the window holds the best of them."""
        return self.topk + (self.num_steps - 1) * self.topk**2


@cache
def most_emitted(max_window: int, tree: TreeShape | None) -> int:
    """Tokens that a step emits at most: those of the longest path, and the one after it."""
    return max_window if tree is None else 1 + tree.num_steps


@cache
def draft_reach(max_window: int, tree: TreeShape | None) -> int:
    """Positions past the newest token that draft passes write to.

    In a chain each pass writes one position further on. The passes over a tree write a position
    for each draft that they go on from: siblings must not share one. The drafts of the last depth
    are not gone on from.
    """
    if tree is None:
        return max(0, max_window - 2)
    return (tree.num_steps - 1) * tree.topk


@cache
def step_reach(max_window: int, tree: TreeShape | None) -> int:
    """Positions that a step reaches, from its committed length on: verifying and drafting."""
    if max_window == 1:
        return 1
    return max(max_window, most_emitted(max_window, tree) + draft_reach(max_window, tree) + 1)
