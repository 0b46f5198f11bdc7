"""What a step emits, and its outcome in the slot table.

On a CUDA device one Triton launch settles all rows; other devices take the torch chain that
defines it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.acceptance import reference
from gapless.ops.acceptance.reference import (
    Acceptance,
    AcceptColumns,
    Settled,
    SettledTrees,
    accept_chain,
    accept_tree,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AcceptColumns",
    "Acceptance",
    "Settled",
    "SettledTrees",
    "accept_chain",
    "accept_tree",
    "settle_trees",
    "settle_windows",
]


def settle_windows(
    sampled: Tensor,  # [B, W] int64: the target's token after each window position
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    checkpoint_len: Tensor,  # [B] int64: checkpoint length once the step is over
    columns: AcceptColumns,  # written
    emitted: Tensor,  # [B, 2 + W] int64, contiguous, written
    *,
    null_slot: int,
    forced: Tensor | None = None,  # [N] int64: drafts to keep whatever they are, see reference
) -> Settled:
    """Decide what each row emits, and store it. Contract: `reference.settle_windows`."""
    if sampled.is_cuda:
        from gapless.ops.acceptance import triton

        settle = triton.settle_windows
    else:
        settle = reference.settle_windows
    return settle(
        sampled,
        slots,
        seq_lens,
        checkpoint_len,
        columns,
        emitted,
        null_slot=null_slot,
        forced=forced,
    )


def settle_trees(
    sampled: Tensor,  # [B, W] int64: the target's token after each node
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    checkpoint_len: Tensor,  # [B] int64: checkpoint length once the step is over
    columns: AcceptColumns,  # written
    emitted: Tensor,  # [B, 2 + W] int64, contiguous, written
    bits: Tensor,  # [B, W] int64: `draft_tree.ancestor_bits`
    *,
    null_slot: int,
    forced: Tensor | None = None,  # [N] int64: drafts to keep whatever they are, see reference
) -> SettledTrees:
    """Decide what each row's tree emits, and store it. Contract: `reference.settle_trees`."""
    if sampled.is_cuda:
        from gapless.ops.acceptance import triton

        settle = triton.settle_trees
    else:
        settle = reference.settle_trees
    return settle(
        sampled,
        slots,
        seq_lens,
        checkpoint_len,
        columns,
        emitted,
        bits,
        null_slot=null_slot,
        forced=forced,
    )
