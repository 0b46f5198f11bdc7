"""Window read-out, fold and materialize of linear layers over checkpoint and replay ring.

Tensors on a CUDA device go to the Triton kernels where those serve the shape, and to the torch
definition otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from gapless.ops.linear_replay import reference
from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import LinearSpec, Recurrence

__all__ = ["ReplayIndices", "ReplayMemory", "materialize", "replay_window", "window_bytes"]

_logger = logging.getLogger(__name__)


def replay_window(
    q: Tensor,  # [B, W, H, K]
    k: Tensor,  # [B, W, H, K]
    v: Tensor,  # [B, W, HV, V]
    beta: Tensor | None,  # [B, W, HV], after the sigmoid; None for Mamba-2
    log_decay: Tensor,  # [B, W, HV, Kd], at most 0
    memory: ReplayMemory,
    indices: ReplayIndices,
    *,
    recurrence: Recurrence,
    l2norm_eps: float | None,
    scale: float,
    ancestors: Tensor | None = None,  # [B, W] int64 bits, i itself included; None is a chain
) -> Tensor:  # [B, W, HV, V] in q's dtype
    """Return the outputs of a window of each row, fold, and put the window into the ring.

    Contract and formulas: `reference.replay_window`.
    """
    if q.is_cuda:
        from gapless.ops.linear_replay import triton

        reason = triton.unsupported_window(
            q.shape[1], indices.ring_read.shape[1], memory, recurrence, l2norm_eps
        )
        if reason is None:
            return triton.replay_window(
                q, k, v, beta, log_decay, memory, indices,
                recurrence=recurrence, l2norm_eps=l2norm_eps, scale=scale, ancestors=ancestors,
            )  # fmt: skip
        _log_fallback(reason)
    return reference.replay_window(
        q, k, v, beta, log_decay, memory, indices,
        recurrence=recurrence, l2norm_eps=l2norm_eps, scale=scale, ancestors=ancestors,
    )  # fmt: skip


def materialize(
    memory: ReplayMemory,
    ring_read: Tensor,  # [B, N] int64 entries from checkpoint_len on
    mask: Tensor,  # [B, N] bool: the prefix wanted
    *,
    read_rows: Tensor,  # [B] int64, the zero row where checkpoint_len is 0
    out_rows: Tensor,  # [B] int64
    l2norm_eps: float | None,
) -> None:
    """Write the state after the masked prefix of the ring into `out_rows` of the checkpoint.

    Contract: `reference.materialize`.
    """
    if ring_read.is_cuda:
        from gapless.ops.linear_replay import triton

        reason = triton.unsupported_memory(memory)
        if reason is None:
            triton.materialize(
                memory, ring_read, mask,
                read_rows=read_rows, out_rows=out_rows, l2norm_eps=l2norm_eps,
            )  # fmt: skip
            return
        _log_fallback(reason)
    reference.materialize(
        memory, ring_read, mask, read_rows=read_rows, out_rows=out_rows, l2norm_eps=l2norm_eps
    )


def window_bytes(
    num_rows: int,
    width: int,
    num_replayed: int,  # N
    spec: LinearSpec,
    *,
    device: str,
) -> int:
    """Return the bytes that a window takes at least, beside arguments and result, as it runs."""
    if device != "cuda":
        return 0
    from gapless.ops.linear_replay import triton

    return triton.window_bytes(
        num_rows, width, num_replayed, spec.num_value_heads, spec.key_dim, spec.recurrence
    )


@cache
def _log_fallback(reason: str) -> None:
    _logger.info("linear replay runs on torch operations: no kernel for %s", reason)
