"""Draft trees as bit masks: who descends from whom among the nodes of a window.

Compaction moves an accepted path's entries to consecutive positions.
"""

from gapless.ops.draft_tree.reference import (
    MAX_NODES,
    TreeMask,
    ancestor_bits,
    compact,
    depths,
    nth_ancestors,
    unpack,
)

__all__ = [
    "MAX_NODES",
    "TreeMask",
    "ancestor_bits",
    "compact",
    "depths",
    "nth_ancestors",
    "unpack",
]
