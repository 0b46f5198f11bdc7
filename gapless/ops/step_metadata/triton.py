"""`reference.window_indices` in one launch, the same integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.linear_replay import ReplayIndices
from gapless.ops.step_metadata.kernels import _window_indices_kernel
from gapless.ops.step_metadata.reference import Geometry, SlotColumns, WindowIndices

if TYPE_CHECKING:
    from torch import Tensor


def window_indices(
    slots: Tensor, columns: SlotColumns, geometry: Geometry, *, window: int
) -> WindowIndices:
    """See `reference.window_indices`."""
    out = empty_indices(slots.shape[0], geometry, window=window, device=slots.device)
    fill(out, slots, columns, geometry)
    return out


def empty_indices(
    num_rows: int, geometry: Geometry, *, window: int, device: torch.device
) -> WindowIndices:
    """Allocate the index tensors of `num_rows` windows."""
    num_replayed, num_tokens = geometry.num_replayed, num_rows * window

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    positions = empty(num_rows, window)
    return WindowIndices(
        slots=empty(num_rows),
        seq_lens=empty(num_rows),
        fold_len=empty(num_rows),
        positions=positions,
        logical=positions,
        ancestors=None,
        kv_write=empty(num_tokens),
        replay=ReplayIndices(
            ring_read=empty(num_rows, num_replayed),
            ring_write=empty(num_rows, window),
            fold_mask=empty(num_rows, num_replayed, dtype=torch.bool),
            read_rows=empty(num_rows),
            fold_rows=empty(num_rows),
        ),
        conv_write=empty(num_tokens),
        conv_taps=empty(geometry.conv_width, num_tokens),
        live=empty(num_tokens, dtype=torch.bool),
    )


def fill(out: WindowIndices, slots: Tensor, columns: SlotColumns, geometry: Geometry) -> None:
    """Write the indices of `slots` [B] into contiguous tensors of `empty_indices`' shapes."""
    num_rows, window = out.positions.shape
    num_replayed = geometry.num_replayed
    assert columns.page_table.stride(1) == 1, "a page table's rows are contiguous"
    _window_indices_kernel[(num_rows,)](
        slots,
        columns.seq_lens,
        columns.checkpoint_len,
        columns.state_rows,
        columns.done.view(torch.uint8),
        columns.page_table,
        out.slots,
        out.seq_lens,
        out.fold_len,
        out.positions,
        out.kv_write,
        out.replay.ring_read,
        out.replay.ring_write,
        out.replay.fold_mask.view(torch.uint8),
        out.replay.read_rows,
        out.replay.fold_rows,
        out.conv_write,
        out.conv_taps,
        out.live.view(torch.uint8),
        num_rows * window,
        columns.page_table.stride(0),
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
        BLOCK_N=triton.next_power_of_2(num_replayed),
        BLOCK_W=triton.next_power_of_2(window),
        num_warps=1,
    )
