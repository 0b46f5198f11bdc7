"""The settling of `reference.py` in one launch each, the same integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.acceptance.kernels import _settle_trees_kernel, _settle_windows_kernel
from gapless.ops.acceptance.reference import AcceptColumns, Settled, SettledTrees
from gapless.ops.chaining import chained

if TYPE_CHECKING:
    from torch import Tensor


def settle_windows(
    sampled: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    checkpoint_len: Tensor,
    columns: AcceptColumns,
    emitted: Tensor,
    *,
    null_slot: int,
    forced: Tensor | None = None,
) -> Settled:
    """See `reference.settle_windows`. Columns are contiguous."""
    num_rows, window = sampled.shape
    assert sampled.is_contiguous(), "a row's tokens are contiguous"
    assert columns.window_tokens.is_contiguous(), "the table's windows are contiguous"
    assert emitted.shape == (num_rows, 2 + window), f"rows of {emitted.shape} for {sampled.shape}"
    assert emitted.is_contiguous(), "a row's results are contiguous"
    out = Settled(*(torch.empty_like(slots) for _ in range(4)))
    _settle_windows_kernel[(num_rows,)](
        sampled,
        slots,
        seq_lens,
        checkpoint_len,
        # without forced drafts nobody reads this
        slots if forced is None else forced,
        *_pointers(columns),
        emitted,
        out.lens,
        out.live_slots,
        out.seq_lens,
        out.newest,
        NULL_SLOT=null_slot,
        W=window,
        NUM_FORCED=0 if forced is None else forced.shape[0],
        W_MAX=columns.window_tokens.shape[1],
        STOPS=columns.stop_ids.shape[1],
        BLOCK_W=triton.next_power_of_2(window),
        num_warps=1,
        **chained(slots),
    )
    return out


def settle_trees(
    sampled: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    checkpoint_len: Tensor,
    columns: AcceptColumns,
    emitted: Tensor,
    bits: Tensor,
    *,
    null_slot: int,
    forced: Tensor | None = None,
) -> SettledTrees:
    """See `reference.settle_trees`. Columns are contiguous."""
    num_rows, window = sampled.shape
    assert sampled.is_contiguous(), "a row's tokens are contiguous"
    assert bits.shape == sampled.shape, f"bits {bits.shape} of nodes {sampled.shape}"
    assert bits.is_contiguous(), "a row's bits are contiguous"
    assert columns.window_tokens.is_contiguous(), "the table's windows are contiguous"
    assert emitted.shape == (num_rows, 2 + window), f"rows of {emitted.shape} for {sampled.shape}"
    assert emitted.is_contiguous(), "a row's results are contiguous"
    out = SettledTrees(
        *(torch.empty_like(slots) for _ in range(4)),
        *(torch.empty_like(sampled) for _ in range(2)),
    )
    _settle_trees_kernel[(num_rows,)](
        sampled,
        slots,
        seq_lens,
        checkpoint_len,
        bits,
        # without forced drafts nobody reads this
        slots if forced is None else forced,
        *_pointers(columns),
        emitted,
        out.lens,
        out.live_slots,
        out.seq_lens,
        out.newest,
        out.path,
        out.tokens,
        NULL_SLOT=null_slot,
        W=window,
        NUM_FORCED=0 if forced is None else forced.shape[0],
        W_MAX=columns.window_tokens.shape[1],
        STOPS=columns.stop_ids.shape[1],
        BLOCK_W=triton.next_power_of_2(window),
        num_warps=1,
        **chained(slots),
    )
    return out


def _pointers(columns: AcceptColumns) -> tuple[Tensor, ...]:
    """The columns in the order in which both kernels take them."""
    return (
        columns.seq_lens,
        columns.checkpoint_len,
        columns.done.view(torch.uint8),
        columns.window_tokens,
        columns.num_drafts,
        columns.limit_len,
        columns.stop_ids,
    )
