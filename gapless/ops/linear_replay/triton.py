"""Triton path of the replay window: GDN and KDA, chains of 1 to 16 tokens, fp32 state or bf16.

Same functions and meaning as `reference.py`, and three more rules of the indices, which step
metadata keeps: the ring entry of zeros is the rings' last one, so that it is recognised and not
read; what a fold leaves in the ring is at most N - W entries, as with W = W_max it is L - 1; and
where W_max exceeds L, every window has W_max tokens, so that a shorter one folds at most L entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.core.architecture import Recurrence
from gapless.ops.linear_replay.kernels import (
    _materialize_kernel,
    _replay_decode_kernel,
    _replay_window_kernel,
)
from gapless.ops.linear_replay.tuning import MATERIALIZE, Launch, kernel_of, launch_of

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

MAX_WIDTH = 16
MAX_LIVE = 64
_DIMS = (64, 128, 256)
_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
_STATES = (torch.float32, torch.bfloat16)


def unsupported_memory(memory: ReplayMemory) -> str | None:
    """Return why the kernels cannot serve this memory, None if they can."""
    _, value_heads, value_dim, key_dim = memory.checkpoint.shape
    if memory.checkpoint.dtype not in _STATES or memory.k_ring.dtype not in _ACTIVATIONS:
        return f"states of {memory.checkpoint.dtype} with keys of {memory.k_ring.dtype}"
    if memory.d_ring.dtype is not torch.float32:
        return f"accumulation in {memory.d_ring.dtype}"
    if key_dim not in _DIMS or value_dim not in _DIMS:
        return f"head dims K={key_dim}, V={value_dim}, want each of {_DIMS}"
    if value_heads % memory.k_ring.shape[1]:
        return f"{value_heads} value heads over {memory.k_ring.shape[1]} key heads"
    return None


def unsupported_window(
    width: int,
    num_replayed: int,
    memory: ReplayMemory,
    recurrence: Recurrence,
    ancestors: Tensor | None,
) -> str | None:
    """Return why the kernels cannot serve this window, None if they can."""
    if recurrence is Recurrence.MAMBA2:
        return "Mamba-2"
    if ancestors is not None:
        return "draft trees"
    if width > MAX_WIDTH:
        return f"a window of {width} tokens, want at most {MAX_WIDTH}"
    if num_replayed - width > MAX_LIVE:
        return f"{num_replayed - width} ring entries left after a fold, want at most {MAX_LIVE}"
    return unsupported_memory(memory)


def replay_window(
    q: Tensor,  # [B, W, H, K]
    k: Tensor,  # [B, W, H, K]
    v: Tensor,  # [B, W, HV, V]
    beta: Tensor,  # [B, W, HV]
    log_decay: Tensor,  # [B, W, HV, Kd]
    memory: ReplayMemory,
    indices: ReplayIndices,
    *,
    recurrence: Recurrence,
    l2norm_eps: float | None,
    scale: float,
    launch: Launch | None = None,
    is_exact: bool = True,
) -> Tensor:  # [B, W, HV, V] in q's dtype
    """Run one window as `reference.replay_window` does; one launch, no sync.

    Arguments may be views whose last two axes are contiguous; others are copied. `launch` defaults
    to the tuned one. The read-outs of one token are fp32 products; folds run on matrix units with
    23 bits, and the read-outs of a wider window with 21, or with 11 (TF32) if not `is_exact`.
    """
    rows, width, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    num_replayed = indices.ring_read.shape[1]
    is_per_channel = recurrence is Recurrence.KIMI_DELTA
    reason = unsupported_window(width, num_replayed, memory, recurrence, None)
    assert reason is None, reason
    _assert_contiguous(memory)
    kernel = kernel_of(width, num_replayed)
    state = memory.checkpoint
    launch = launch or launch_of(
        kernel, rows=rows, is_per_channel=is_per_channel, state_bytes=state.element_size()
    )
    launch = launch.clipped(value_dim)
    q, k, v, log_decay = (_inner_contiguous(x, 2) for x in (q, k, v, log_decay))
    beta = _inner_contiguous(beta, 1)
    inputs = (q, k, v, beta, log_decay)
    out = torch.empty((rows, width, value_heads, value_dim), dtype=q.dtype, device=q.device)
    tensors = (
        *inputs, out, state, memory.d_ring, memory.k_ring, memory.g_ring,
        indices.ring_read.contiguous(), indices.ring_write.contiguous(),
        indices.fold_mask.contiguous().view(torch.uint8), indices.read_rows, indices.fold_rows,
    )  # fmt: skip
    numbers = (memory.d_ring.shape[0] - 1, scale, 0.0 if l2norm_eps is None else l2norm_eps)
    settings = {
        "N": num_replayed, "H": key_heads, "HV": value_heads, "K": key_dim, "V": value_dim,
        "BV": launch.block_v, "BLOCKS": launch.run_v // launch.block_v,
        "STAGES": launch.num_stages, "IS_PER_CHANNEL": is_per_channel,
        "HAS_NORM": l2norm_eps is not None, "num_warps": launch.num_warps, "num_stages": 1,
        "maxnreg": launch.max_registers,
    }  # fmt: skip
    grid = (value_heads * (value_dim // launch.run_v), rows)
    if width == 1:
        strides = [x.stride(0) for x in inputs]
        run = 128 // state.element_size()
        _replay_decode_kernel[grid](*tensors, *strides, *numbers, **settings, KB=run)
        return out
    strides = [stride for x in inputs for stride in x.stride()[:2]]
    _replay_window_kernel[grid](
        *tensors,
        *strides,
        *numbers,
        **settings,
        W=width,
        HALF=max(4, 1 << (width - 1).bit_length()),
        # in one warp four threads read a row of a tile, four times 16 bytes each
        KB=64 // state.element_size() if launch.num_warps == 1 else 32,
        IS_DIRECT=launch.num_warps == 1,
        SPLIT_X=is_exact and (is_per_channel or q.dtype is torch.float32),
        SPLIT_STATE=is_exact and state.dtype is torch.float32,
        SPLIT_D=is_exact,
    )
    return out


def materialize(
    memory: ReplayMemory,
    ring_read: Tensor,  # [B, N]
    mask: Tensor,  # [B, N] bool, a prefix of each row
    *,
    read_rows: Tensor,  # [B]
    out_rows: Tensor,  # [B]
    l2norm_eps: float | None,
    launch: Launch = MATERIALIZE,
) -> None:
    """Write the state after the masked prefix into `out_rows`, as `reference.materialize` does.

    One launch for all rows. Entries outside the mask are not read. No row's `out_row` is another
    row's `read_row`.
    """
    _, value_heads, value_dim, key_dim = memory.checkpoint.shape
    reason = unsupported_memory(memory)
    assert reason is None, reason
    _assert_contiguous(memory)
    _materialize_kernel[value_heads * (value_dim // launch.block_v), len(ring_read)](
        memory.checkpoint,
        memory.d_ring,
        memory.k_ring,
        memory.g_ring,
        ring_read.contiguous(),
        mask.contiguous().view(torch.uint8),
        read_rows,
        out_rows,
        0.0 if l2norm_eps is None else l2norm_eps,
        N=ring_read.shape[1],
        H=memory.k_ring.shape[1],
        HV=value_heads,
        K=key_dim,
        V=value_dim,
        BV=launch.block_v,
        IS_PER_CHANNEL=memory.g_ring.shape[2] > 1,
        HAS_NORM=l2norm_eps is not None,
        num_warps=launch.num_warps,
        num_stages=1,
    )


def _inner_contiguous(x: Tensor, num_axes: int) -> Tensor:
    """Return x, copied unless its last axes lie as in a contiguous tensor."""
    expected = 1
    for axis in range(x.ndim - 1, x.ndim - 1 - num_axes, -1):
        if x.shape[axis] > 1 and x.stride(axis) != expected:
            return x.contiguous()
        expected *= x.shape[axis]
    return x


def _assert_contiguous(memory: ReplayMemory) -> None:
    pools = (memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring)
    assert all(pool.is_contiguous() for pool in pools), "a layer's pools are contiguous"
