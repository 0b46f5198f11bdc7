"""The functions of `reference.py` in one launch each, the same integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.linear_replay import ReplayIndices
from gapless.ops.step_metadata.kernels import (
    _draft_indices_kernel,
    _extend_indices_kernel,
    _path_moves_kernel,
    _window_indices_kernel,
)
from gapless.ops.step_metadata.reference import (
    DraftIndices,
    ExtendIndices,
    FreshPages,
    Geometry,
    PathMoves,
    SlotColumns,
    WindowIndices,
)

if TYPE_CHECKING:
    from torch import Tensor

# rows that a program looks at to find its own row's place among them: as a rule all
_BLOCK_ROWS = 256


def window_indices(
    slots: Tensor,
    columns: SlotColumns,
    geometry: Geometry,
    *,
    window: int,
    tree: Tensor | None = None,
    fresh: FreshPages | None = None,
) -> WindowIndices:
    """See `reference.window_indices`."""
    num_rows, device = slots.shape[0], slots.device
    is_tree = tree is not None
    out = empty_indices(num_rows, geometry, window=window, is_tree=is_tree, device=device)
    fill(out, slots, columns, geometry, tree, fresh)
    return out


def empty_indices(
    num_rows: int, geometry: Geometry, *, window: int, is_tree: bool = False, device: torch.device
) -> WindowIndices:
    """Allocate the index tensors of `num_rows` windows."""
    num_replayed, num_tokens = geometry.num_replayed, num_rows * window

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    positions = empty(num_rows, window)
    return WindowIndices(
        slots=empty(num_rows),
        seq_lens=empty(num_rows),
        tokens=empty(num_rows, window),
        fold_len=empty(num_rows),
        positions=positions,
        logical=empty(num_rows, window) if is_tree else positions,
        sampled_at=empty(num_rows, window),
        ancestors=empty(num_rows, window) if is_tree else None,
        kv_write=empty(num_tokens),
        replay=ReplayIndices(
            ring_read=empty(num_rows, num_replayed),
            ring_write=empty(num_rows, window),
            fold_mask=empty(num_rows, num_replayed, dtype=torch.bool),
            read_rows=empty(num_rows),
            fold_rows=empty(num_rows),
            order=empty(num_rows),
        ),
        conv_write=empty(num_tokens),
        conv_taps=empty(geometry.conv_width, num_tokens),
        live=empty(num_tokens, dtype=torch.bool),
    )


def fill(
    out: WindowIndices,
    slots: Tensor,
    columns: SlotColumns,
    geometry: Geometry,
    tree: Tensor | None = None,
    fresh: FreshPages | None = None,
) -> None:
    """Write the indices of `slots` [B] into contiguous tensors of `empty_indices`' shapes."""
    num_rows, window = out.positions.shape
    num_replayed = geometry.num_replayed
    assert columns.page_table.is_contiguous(), "an entry of the page table has one number"
    assert columns.window_tokens.is_contiguous(), "the table's windows are contiguous"
    assert tree is None or tree.stride(1) == 1, "a slot's bits are contiguous"
    _window_indices_kernel[(num_rows,)](
        slots,
        columns.seq_lens,
        columns.checkpoint_len,
        columns.state_rows,
        columns.done.view(torch.uint8),
        columns.page_table,
        columns.window_tokens,
        # what there is none of, nobody reads: neither fresh pages nor a tree
        slots if fresh is None else fresh.index,
        slots if fresh is None else fresh.page,
        slots if tree is None else tree,
        out.slots,
        out.seq_lens,
        out.tokens,
        out.fold_len,
        out.positions,
        out.logical,
        out.sampled_at,
        out.positions if out.ancestors is None else out.ancestors,
        out.kv_write,
        out.replay.ring_read,
        out.replay.ring_write,
        out.replay.fold_mask.view(torch.uint8),
        out.replay.read_rows,
        out.replay.fold_rows,
        out.replay.order,
        out.conv_write,
        out.conv_taps,
        out.live.view(torch.uint8),
        num_rows * window,
        columns.page_table.stride(0),
        0 if tree is None else tree.stride(0),
        NULL_SLOT=geometry.null_slot,
        NULL_ROW=geometry.null_row,
        ZERO_ROW=geometry.zero_row,
        RING_ZERO=geometry.ring_zero,
        CONV_ZERO=geometry.conv_zero,
        PAGE_SIZE=geometry.page_size,
        L=geometry.replay_len,
        R=geometry.ring_len,
        R_C=geometry.conv_ring_len,
        WIDTH=geometry.conv_width,
        N=num_replayed,
        W=window,
        W_MAX=columns.window_tokens.shape[1],
        NUM_FRESH=0 if fresh is None else fresh.index.shape[1],
        BLOCK_N=triton.next_power_of_2(num_replayed),
        BLOCK_W=triton.next_power_of_2(window),
        BLOCK_ROWS=_BLOCK_ROWS,
        HAS_TREE=tree is not None,
        num_warps=1,
        **chained(slots),
    )


def path_moves(
    path: Tensor,
    lens: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    geometry: Geometry,
) -> PathMoves:
    """See `reference.path_moves`. Indices are contiguous."""
    assert page_table.stride(1) == 1, "a page table's rows are contiguous"
    assert path.is_contiguous(), "paths are contiguous"
    window = path.shape[1]
    out = PathMoves(*(torch.empty_like(path) for _ in range(6)))
    _path_moves_kernel[(path.shape[0],)](
        path,
        lens,
        slots,
        seq_lens,
        page_table,
        out.kv_read,
        out.kv_write,
        out.ring_read,
        out.ring_write,
        out.conv_read,
        out.conv_write,
        page_table.stride(0),
        PAGE_SIZE=geometry.page_size,
        R=geometry.ring_len,
        R_C=geometry.conv_ring_len,
        W=window,
        BLOCK_W=triton.next_power_of_2(window),
        num_warps=1,
        **chained(slots),
    )
    return out


def extend_indices(
    slots: Tensor,
    seq_lens: Tensor,
    lens: Tensor,
    page_table: Tensor,
    geometry: Geometry,
    *,
    width: int,
) -> ExtendIndices:
    """See `reference.extend_indices`."""
    num_rows, device = slots.shape[0], slots.device
    assert page_table.stride(1) == 1, "a page table's rows are contiguous"

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    num_tokens = num_rows * width
    out = ExtendIndices(
        positions=empty(num_rows, width),
        kv_write=empty(num_tokens),
        ring_write=empty(num_tokens),
        newest=empty(num_rows),
    )
    _extend_indices_kernel[(num_rows,)](
        slots,
        seq_lens,
        lens,
        page_table,
        out.positions,
        out.kv_write,
        out.ring_write,
        out.newest,
        page_table.stride(0),
        PAGE_SIZE=geometry.page_size,
        R=geometry.hidden_ring_len,
        W=width,
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=1,
        **chained(slots),
    )
    return out


def draft_indices(
    slots: Tensor, seq_lens: Tensor, page_table: Tensor, geometry: Geometry, *, count: int
) -> DraftIndices:
    """See `reference.draft_indices`."""
    num_rows, device = slots.shape[0], slots.device
    assert page_table.stride(1) == 1, "a page table's rows are contiguous"
    out = DraftIndices(
        *(torch.empty(count, num_rows, dtype=torch.int64, device=device) for _ in range(2))
    )
    _draft_indices_kernel[(num_rows,)](
        slots,
        seq_lens,
        page_table,
        out.positions,
        out.kv_write,
        num_rows,
        page_table.stride(0),
        PAGE_SIZE=geometry.page_size,
        N=count,
        BLOCK_N=triton.next_power_of_2(count),
        num_warps=1,
        **chained(slots),
    )
    return out
