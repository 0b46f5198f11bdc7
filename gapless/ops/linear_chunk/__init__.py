"""Chunked prefill of linear layers over packed segments.

Tensors on a CUDA device go to fla-core's kernels where those serve the layer, and to the torch
definition otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from gapless.ops.linear_chunk import fla, reference
from gapless.ops.linear_chunk.indices import ChunkPlan, Cut, plan_chunks
from gapless.ops.linear_chunk.reference import ChunkIndices
from gapless.ops.linear_chunk.waves import WavePlan, plan_waves, wave_arrays, wave_indices

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.architecture import Recurrence

__all__ = [
    "ChunkIndices",
    "ChunkPlan",
    "Cut",
    "WavePlan",
    "chunk_prefill",
    "plan_chunks",
    "plan_waves",
    "wave_arrays",
    "wave_indices",
]

_logger = logging.getLogger(__name__)


def chunk_prefill(
    q: Tensor,  # [T, H, K]
    k: Tensor,  # [T, H, K]
    v: Tensor,  # [T, HV, V]
    beta: Tensor | None,  # [T, HV], after the sigmoid; None for Mamba-2
    log_decay: Tensor,  # [T, HV, Kd], at most 0; Kd is 1 or K
    checkpoint: Tensor,  # [rows, HV, V, K] state dtype
    indices: ChunkIndices,
    *,
    recurrence: Recurrence,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:  # [T, HV, V] in q's dtype
    """Return the outputs of all packed tokens; write states at the cuts and each final state.

    Contract and formulas: `reference.chunk_prefill`.
    """
    if q.is_cuda:
        reason = fla.unsupported(q, indices.gather.shape[1], recurrence)
        if reason is None:
            assert beta is not None, "a delta rule has beta"
            return fla.chunk_prefill(
                q, k, v, beta, log_decay, checkpoint, indices.waves,
                recurrence=recurrence, l2norm_eps=l2norm_eps, scale=scale,
            )  # fmt: skip
        _log_fallback(reason)
    return reference.chunk_prefill(
        q, k, v, beta, log_decay, checkpoint, indices,
        recurrence=recurrence, l2norm_eps=l2norm_eps, scale=scale,
    )  # fmt: skip


@cache
def _log_fallback(reason: str) -> None:
    _logger.warning("chunked prefill runs on slow torch operations: %s", reason)
