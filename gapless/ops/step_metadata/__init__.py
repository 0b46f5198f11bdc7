"""Index tensors of one decode step, from the slot list and the slot table.

On a CUDA device one Triton launch makes them all, and one each the moves of accepted tree paths and
the indices of a drafter's passes;
other devices take the torch chain that defines them, which is logged once.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from gapless.ops.step_metadata import reference
from gapless.ops.step_metadata.reference import (
    DraftIndices,
    ExtendIndices,
    FreshPages,
    Geometry,
    PathMoves,
    SlotColumns,
    StepConstants,
    WindowIndices,
    kv_entries,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DraftIndices",
    "ExtendIndices",
    "FreshPages",
    "Geometry",
    "PathMoves",
    "SlotColumns",
    "StepConstants",
    "WindowIndices",
    "draft_indices",
    "extend_indices",
    "has_kernel",
    "kv_entries",
    "path_moves",
    "window_indices",
]

_logger = logging.getLogger(__name__)


def window_indices(
    slots: Tensor,  # [B] int64, padded rows name the null slot
    columns: SlotColumns,
    geometry: Geometry,
    constants: StepConstants,
    *,
    window: int,  # W
    tree: Tensor | None = None,  # [slots + 1, W_max] int64
    fresh: FreshPages | None = None,
    is_fused: bool = True,
) -> WindowIndices:
    """Derive a step's index tensors on the device. Contract: `reference.window_indices`.

    Args: is_fused: take the kernel where there is one.
    """
    if has_kernel(slots.device.type) and is_fused:
        from gapless.ops.step_metadata import triton

        return triton.window_indices(
            slots, columns, geometry, window=window, tree=tree, fresh=fresh
        )
    _log_chain(slots.device.type)
    return reference.window_indices(
        slots, columns, geometry, constants, window=window, tree=tree, fresh=fresh
    )


def path_moves(
    path: Tensor,  # [B, W] int64: nodes of the accepted path, node 0 first
    lens: Tensor,  # [B] int64: how many of them were kept; 0 for padded rows
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    page_table: Tensor,  # [slots + 1, P]
    geometry: Geometry,
) -> PathMoves:
    """Return what `draft_tree.compact` moves. Contract: `reference.path_moves`."""
    if path.is_cuda:
        from gapless.ops.step_metadata import triton

        return triton.path_moves(path, lens, slots, seq_lens, page_table, geometry)
    return reference.path_moves(path, lens, slots, seq_lens, page_table, geometry)


def extend_indices(
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: committed length before the window
    lens: Tensor,  # [B] int64: tokens emitted; 0 for padded rows
    page_table: Tensor,  # [slots + 1, P]
    geometry: Geometry,
    *,
    width: int,  # W
) -> ExtendIndices:
    """Return where a drafter takes in the window. Contract: `reference.extend_indices`."""
    if slots.is_cuda:
        from gapless.ops.step_metadata import triton

        return triton.extend_indices(slots, seq_lens, lens, page_table, geometry, width=width)
    return reference.extend_indices(slots, seq_lens, lens, page_table, geometry, width=width)


def draft_indices(
    slots: Tensor,  # [B] int64
    seq_lens: Tensor,  # [B] int64: position of the newest token
    page_table: Tensor,  # [slots + 1, P]
    geometry: Geometry,
    *,
    count: int,  # N
) -> DraftIndices:
    """Return where drafts stand. Contract: `reference.draft_indices`."""
    if slots.is_cuda:
        from gapless.ops.step_metadata import triton

        return triton.draft_indices(slots, seq_lens, page_table, geometry, count=count)
    return reference.draft_indices(slots, seq_lens, page_table, geometry, count=count)


def has_kernel(device_type: str) -> bool:
    """Whether one kernel makes them all on such a device."""
    return device_type == "cuda"


@cache
def _log_chain(device: str) -> None:
    reason = "asked for" if has_kernel(device) else f"no kernel for device {device}"
    _logger.info("step metadata runs on torch operations (%s)", reason)
