"""Draft trees as bit masks: who descends from whom among the nodes of a window."""

from gapless.ops.draft_tree.reference import MAX_NODES, TreeMask, ancestor_bits, depths, unpack

__all__ = ["MAX_NODES", "TreeMask", "ancestor_bits", "depths", "unpack"]
