"""`reference.compact` in one launch per pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.draft_tree.kernels import _compact_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK_CHANNELS = 256
# entries move as words of their size, whatever they stand for
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(pools: Sequence[Tensor], read: Tensor, write: Tensor) -> None:
    """See `reference.compact`. An entry of a layer is contiguous."""
    assert read.shape == write.shape, f"reads {read.shape}, writes {write.shape}"
    assert read.is_contiguous(), "reads are contiguous"
    assert write.is_contiguous(), "writes are contiguous"
    rows, window = write.shape
    for pool in pools:
        # layers without heads have entries without channels
        if not pool.numel():
            continue
        entry = pool[0, 0]
        assert entry.is_contiguous(), "an entry is contiguous"
        block_c = min(BLOCK_CHANNELS, triton.next_power_of_2(entry.numel()))
        _compact_kernel[triton.cdiv(entry.numel(), block_c), pool.shape[0], rows](
            pool.view(_WORDS[pool.itemsize]),
            read,
            write,
            pool.stride(0),
            pool.stride(1),
            C=entry.numel(),
            W=window,
            BLOCK_W=triton.next_power_of_2(window),
            BLOCK_C=block_c,
            num_warps=4,
            **chained(pool),
        )
