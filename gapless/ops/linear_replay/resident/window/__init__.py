"""When windows of many rows take the resident kernel of their own, and how it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.chaining import chained
from gapless.ops.linear_replay.resident import described_states, is_resident_kind, programs_of

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

# steps of 16 rows of 32 heads gain 0.4% by it and those of 8 lose 0.1%, though the launch takes two
# thirds of the time there, too: see `resident.LEAST_ITEMS`
LEAST_WINDOW_ITEMS = 16 * 32
MOST_TOKENS = 4
# more leave no room in shared memory
MOST_ENTRIES = 23


def can_reside_window(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    num_replayed: int,  # N
) -> bool:
    """Whether the resident kernel serves these windows.

    It does with 2 to 4 tokens, enough rows and value heads, and `is_resident_kind`.
    """
    rows, width, value_heads, _ = inputs[2].shape
    return (
        2 <= width <= MOST_TOKENS
        and rows * value_heads >= LEAST_WINDOW_ITEMS
        and num_replayed <= MOST_ENTRIES
        # the compiler knows strides by whether 16 divides them
        and all(s % 16 == 0 for x in inputs[:3] for s in x.stride()[:2])
        and is_resident_kind(inputs, memory)
    )


def run_resident_window(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    indices: ReplayIndices,
    *,
    l2norm_eps: float | None,
    scale: float,
    ancestors: Tensor | None,  # [B, W] int64 bits
    num_programs: int | None = None,  # one for each multiprocessor
) -> Tensor:
    """Run windows as `replay_window` does, where `can_reside_window`; one launch."""
    # Gluon is loaded where it is used
    from gapless.ops.linear_replay.resident.window.kernel import _resident_window_kernel

    q, k, v, beta, log_decay = inputs
    assert beta is not None, "a delta rule"
    rows, width, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    num_replayed = indices.ring_read.shape[1]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    num_items = rows * value_heads
    programs = programs_of(num_items, q.device, num_programs)
    is_per_channel = log_decay.shape[3] > 1
    folds = log_decay
    if is_per_channel:
        # of each program's two groups of two items, a list of decayed keys
        size = (programs, 4, 8 * (num_replayed // 8 + 1), key_dim)
        folds = torch.empty(size, dtype=torch.float32, device=q.device)
    tensors = (q, k, v, beta, log_decay)
    _resident_window_kernel[(programs,)](
        *tensors, indices.ring_read if ancestors is None else ancestors, out,
        described_states(memory), folds,
        memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring,
        indices.order, *indices.places(), indices.read_rows, indices.fold_rows,
        *(stride for x in tensors for stride in x.stride()[:2]),
        memory.d_ring.shape[0] - 1, num_items, programs, scale,
        0.0 if l2norm_eps is None else l2norm_eps,
        N=num_replayed, W=width, HALF=MOST_TOKENS, H=key_heads, HV=value_heads, K=key_dim,
        V=value_dim, IS_PER_CHANNEL=is_per_channel, HAS_TREE=ancestors is not None,
        HAS_NORM=l2norm_eps is not None, num_warps=8, **chained(q),
    )  # fmt: skip
    return out
