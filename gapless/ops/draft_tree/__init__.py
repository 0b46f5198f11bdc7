"""Draft trees as bit masks: who descends from whom among the nodes of a window.

Compaction moves an accepted path's entries to consecutive positions: on a CUDA device by a Triton
kernel, on others by the torch operations that define it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.draft_tree import reference
from gapless.ops.draft_tree.reference import (
    MAX_NODES,
    TreeMask,
    ancestor_bits,
    depths,
    nth_ancestors,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "MAX_NODES",
    "TreeMask",
    "ancestor_bits",
    "compact",
    "depths",
    "nth_ancestors",
    "unpack",
]


def compact(
    pools: Sequence[Tensor],  # [layers, entries, ...] each, written
    read: Tensor,  # [B, W] int64 entries
    write: Tensor,  # [B, W] int64 entries
) -> None:
    """Move entries of stacked pools. Contract: `reference.compact`."""
    if write.is_cuda:
        from gapless.ops.draft_tree import triton

        triton.compact(pools, read, write)
    else:
        reference.compact(pools, read, write)
