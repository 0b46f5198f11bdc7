"""Chunked prefill of linear layers over packed segments.

Tensors on a CUDA device go to fla-core's kernels where those serve the layer, and to the torch
definition otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from gapless.ops.linear_chunk import fla, reference
from gapless.ops.linear_chunk.indices import ChunkPlan, Cut, plan_chunks
from gapless.ops.linear_chunk.reference import RoundIndices
from gapless.ops.linear_chunk.segments import ScanIndices, ScanRoom, scan_arrays, scan_indices

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gapless.core.specs.linear import Recurrence

__all__ = [
    "ChunkIndices",
    "ChunkPlan",
    "Cut",
    "RoundIndices",
    "ScanIndices",
    "ScanRoom",
    "chunk_prefill",
    "kernels_lack",
    "plan_chunks",
    "scan_arrays",
    "scan_indices",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkIndices:
    """One packing of segments, in the form that each implementation reads."""

    chunk: int
    """Most tokens of a chunk."""
    scan: ScanIndices
    """For the kernels."""
    rounds: RoundIndices | None
    """For the torch definition; None where the kernels serve every layer."""


def kernels_lack(
    dtype: torch.dtype, key_dim: int, chunk: int, recurrence: Recurrence
) -> str | None:
    """Return what of a layer the kernels for CUDA do not serve, None if they serve it."""
    return fla.unsupported(dtype, key_dim, chunk, recurrence)


def chunk_prefill(
    q: Tensor,  # [T, H, K], normalised where the layer does that
    k: Tensor,  # [T, H, K], likewise
    v: Tensor,  # [T, HV, V]
    beta: Tensor | None,  # [T, HV], after the sigmoid; None for Mamba-2
    log_decay: Tensor,  # [T, HV, Kd], at most 0; Kd is 1 or K
    checkpoint: Tensor,  # [rows, HV, V, K] state dtype
    indices: ChunkIndices,
    *,
    recurrence: Recurrence,
    scale: float,
) -> Tensor:  # [T, HV, V] in q's dtype
    """Return the outputs of all packed tokens; write states at the cuts and each final state.

    Contract and formulas: `reference.chunk_prefill`. No segment may write a row that another one
    starts from.
    """
    if q.is_cuda:
        reason = kernels_lack(q.dtype, q.shape[2], indices.chunk, recurrence)
        if reason is None:
            assert beta is not None, "a delta rule has beta"
            return fla.chunk_prefill(
                q, k, v, beta, log_decay, checkpoint, indices.scan,
                recurrence=recurrence, scale=scale,
            )  # fmt: skip
        _log_fallback(reason)
    assert indices.rounds is not None, "the torch definition reads rounds"
    return reference.chunk_prefill(
        q, k, v, beta, log_decay, checkpoint, indices.rounds,
        recurrence=recurrence, scale=scale,
    )  # fmt: skip


@cache
def _log_fallback(reason: str) -> None:
    _logger.warning("chunked prefill runs on slow torch operations: %s", reason)
