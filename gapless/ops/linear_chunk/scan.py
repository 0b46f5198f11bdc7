"""The scan over chunks: states from their rows through every chunk to the rows that want them.

What follows the terms within chunks (`reference.py`): with u = T beta v and w = T beta (k exp G),
a chunk that starts in state S gives d = u - w S^T and the next S. One launch reads initial states
from their rows, keeps a copy of each chunk's first state for the outputs, and stores the state
after every piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_chunk.pieces import PieceIndices


@dataclass(frozen=True)
class ScanTiling:
    """How a segment's head is cut into programs; each goes through all its chunks."""

    block_v: int  # value channels of a program
    num_warps: int
    num_stages: int


# one segment of 32 heads then fills the device
TILING = ScanTiling(32, 4, 2)


def scan_chunks(
    k: Tensor,  # [T, H, K]: as they are; of decay per channel [T, HV, K], k exp(G_end - G)
    w: Tensor,  # [T, HV, K]
    u: Tensor,  # [T, HV, V]
    g: Tensor,  # [T, HV] or [T, HV, K] float32: log2 decay summed from the chunk's start
    checkpoint: Tensor,  # [rows, HV, V, K] state dtype, written
    indices: PieceIndices,
    *,
    chunk: int,
    tiling: ScanTiling = TILING,
) -> tuple[Tensor, Tensor]:  # [C, HV, V, K] and [T, HV, V], in k's dtype
    """Return each chunk's first state and d; store the states after pieces.

    Chunks of no segment, and tokens of no chunk, get nothing. All inputs are contiguous. States
    are float32 from chunk to chunk; products are of k's type, those of float32 in IEEE arithmetic.
    No segment may write a row that another one starts from.
    """
    from gapless.ops.chaining import chained
    from gapless.ops.linear_chunk.kernels import _scan_kernel

    (num_tokens, heads, value_dim), key_dim = u.shape, k.shape[2]
    for x in (k, w, u, g, checkpoint):
        assert x.is_contiguous(), "inputs of the scan are contiguous"
    num_segments = indices.init_rows.shape[0]
    h = torch.empty(
        (indices.chunks.shape[0], heads, value_dim, key_dim), dtype=k.dtype, device=k.device
    )
    d = torch.empty((num_tokens, heads, value_dim), dtype=k.dtype, device=k.device)
    _scan_kernel[-(-value_dim // tiling.block_v), num_segments * heads](
        k, w, u, g, checkpoint, h, d,
        indices.bounds, indices.firsts, indices.rows, indices.segments, indices.init_rows,
        H=k.shape[1], HV=heads, K=key_dim, V=value_dim, BT=chunk,
        BK=max(16, 1 << (key_dim - 1).bit_length()), BV=tiling.block_v,
        IS_PER_CHANNEL=g.dim() == 3, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        **chained(k),
    )  # fmt: skip
    return h, d
