"""The scan over chunks: states from their rows through every chunk to the rows that want them.

What follows the terms within chunks (`reference.py`): with u = T beta v and w = T beta (k exp G),
a chunk that starts in state S gives d = u - w S^T and the next S. As d_i depends on no later token,
the first tokens of a chunk give the state after them likewise, by one more product with the same d.
One launch reads initial states from their rows, keeps a copy of each chunk's first state for the
outputs, and stores the state at every stop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_chunk.segments import ScanIndices


@dataclass(frozen=True)
class ScanTiling:
    """How a segment's head is cut into programs; each goes through all its chunks."""

    block_v: int  # value channels of a program
    num_warps: int
    num_stages: int


# chosen with `benchmarks.gpu.linear_chunk --tilings`; here two programs share a multiprocessor
TILING = ScanTiling(32, 4, 2)
# by whether channels decay apart: the programs of 32 heads have a multiprocessor each, and all that
# shortens a chunk shortens the whole
ALONE = {False: ScanTiling(32, 4, 3), True: ScanTiling(16, 4, 2)}


def tiling_of(num_segments: int, *, is_per_channel: bool) -> ScanTiling:
    """Return the tiling for so many segments."""
    return ALONE[is_per_channel] if num_segments == 1 else TILING


def scan_chunks(
    k: Tensor,  # [T, H, K]
    decayed_k: Tensor | None,  # [T, HV, K]: k exp(G_end - G); None where g is one per head
    w: Tensor,  # [T, HV, K]
    u: Tensor,  # [T, HV, V]
    g: Tensor,  # [T, HV] or [T, HV, K] float32: log2 decay summed from the chunk's start
    checkpoint: Tensor,  # [rows, HV, V, K] state dtype, written
    indices: ScanIndices,
    *,
    chunk: int,
    tiling: ScanTiling | None = None,
) -> tuple[Tensor, Tensor]:  # [C, HV, V, K] and [T, HV, V], in k's dtype
    """Return each chunk's first state and d; store the states at stops.

    Padded chunks and tokens get nothing. All inputs are contiguous. States are float32 from chunk
    to chunk; products are of k's type, those of float32 in IEEE arithmetic. No segment may write a
    row that another one starts from. `tiling` defaults to `tiling_of`.
    """
    from gapless.ops.chaining import chained
    from gapless.ops.linear_chunk.kernels import _scan_kernel

    (num_tokens, heads, value_dim), key_dim = u.shape, k.shape[2]
    is_per_channel = decayed_k is not None
    assert g.dim() == 2 + is_per_channel, "keys are decayed here where heads decay as one"
    decayed_k = k if decayed_k is None else decayed_k
    for x in (k, decayed_k, w, u, g, checkpoint):
        assert x.is_contiguous(), "inputs of the scan are contiguous"
    num_segments = indices.init_rows.shape[0]
    tiling = tiling or tiling_of(num_segments, is_per_channel=is_per_channel)
    h = torch.empty(
        (indices.chunks.shape[0], heads, value_dim, key_dim), dtype=k.dtype, device=k.device
    )
    d = torch.empty((num_tokens, heads, value_dim), dtype=k.dtype, device=k.device)
    _scan_kernel[-(-value_dim // tiling.block_v), num_segments * heads](
        k, decayed_k, w, u, g, checkpoint, h, d, indices.bounds, indices.firsts,
        indices.init_rows, indices.first_stops, indices.stop_tokens, indices.stop_rows,
        H=k.shape[1], HV=heads, K=key_dim, V=value_dim, BT=chunk,
        BK=max(16, 1 << (key_dim - 1).bit_length()), BV=tiling.block_v,
        IS_PER_CHANNEL=is_per_channel, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        **chained(k),
    )  # fmt: skip
    return h, d
