"""Triton path of the replay window: chains and trees of 1 to 16 tokens, fp32 state or bf16.

Same functions and meaning as `reference.py`. The ring entry of zeros is the rings' last one, so
that it is recognised and not read. Windows of several tokens take the two launches of
`window_kernels.py`, one token those of `kernels.py`; a launch given by hand may choose others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.specs.linear import Recurrence
from gapless.ops.chaining import chained
from gapless.ops.linear_replay.chain_kernel import _chain_kernel
from gapless.ops.linear_replay.kernels import (
    _fold_stream_kernel,
    _fold_weights_kernel,
    _stream_kernel,
    _token_weights_kernel,
    _window_weights_kernel,
)
from gapless.ops.linear_replay.tuning import (
    MATERIALIZE,
    ChainLaunch,
    Launch,
    WindowLaunch,
    kernel_of,
    launch_of,
    window_launch_of,
)
from gapless.ops.linear_replay.window_kernels import _window_scores_kernel, _window_stream_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

MAX_WIDTH = 16
MAX_REPLAYED = 128
# a fold of more takes matrix units
FEW_ENTRIES = 4
# value heads of a program that weighs one token
MOST_HEADS = 4
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
    l2norm_eps: float | None,
) -> str | None:
    """Return why the kernels cannot serve this window, None if they can."""
    if recurrence is Recurrence.MAMBA2 and l2norm_eps is not None:
        return "Mamba-2 with normalised keys"
    if width > MAX_WIDTH:
        return f"a window of {width} tokens, want at most {MAX_WIDTH}"
    if num_replayed > MAX_REPLAYED:
        return f"{num_replayed} ring entries, want at most {MAX_REPLAYED}"
    return unsupported_memory(memory)


def replay_window(
    q: Tensor,  # [B, W, H, K]
    k: Tensor,  # [B, W, H, K]
    v: Tensor,  # [B, W, HV, V]
    beta: Tensor | None,  # [B, W, HV]; None for Mamba-2
    log_decay: Tensor,  # [B, W, HV, Kd]
    memory: ReplayMemory,
    indices: ReplayIndices,
    *,
    recurrence: Recurrence,
    l2norm_eps: float | None,
    scale: float,
    ancestors: Tensor | None = None,  # [B, W] int64 bits
    launch: Launch | ChainLaunch | WindowLaunch | None = None,
) -> Tensor:  # [B, W, HV, V] in q's dtype
    """Run one window as `reference.replay_window` does; two launches, no sync.

    Arguments may be views whose last two axes are contiguous; others are copied. `launch` defaults
    to the tuned one, and says by its type which kernels run. Sums of one token are fp32; those of a
    wider window have 23 bits on matrix units, or are fp32 too where the launch says so.
    """
    rows, width, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    num_replayed = indices.ring_read.shape[1]
    reason = unsupported_window(width, num_replayed, memory, recurrence, l2norm_eps)
    assert reason is None, reason
    _assert_contiguous(memory)
    state = memory.checkpoint
    is_per_channel = recurrence is Recurrence.KIMI_DELTA
    if launch is None and width > 1:
        launch = window_launch_of(width, rows=rows, is_per_channel=is_per_channel)
    launch = launch or launch_of(
        kernel_of(width, num_replayed),
        rows=rows, is_per_channel=is_per_channel, state_bytes=state.element_size(),
    )  # fmt: skip
    q, k, v, log_decay = (_inner_contiguous(x, 2) for x in (q, k, v, log_decay))
    beta = beta if beta is None else _inner_contiguous(beta, 1)
    if isinstance(launch, ChainLaunch):
        assert beta is not None, "a chain of a delta rule has beta"
        inputs = (q, k, v, beta, log_decay)
        return _run_chain(inputs, memory, indices, launch, l2norm_eps=l2norm_eps, scale=scale)
    if isinstance(launch, WindowLaunch):
        return _run_window(
            (q, k, v, beta, log_decay), memory, indices, launch,
            l2norm_eps=l2norm_eps, scale=scale, ancestors=ancestors,
        )  # fmt: skip
    columns = width if beta is None else 2 * width
    shape = _Shape(num_replayed, _least_entries(width, num_replayed), columns, width, memory)
    records = torch.empty((rows, value_heads, shape.size), dtype=torch.float32, device=q.device)
    ring_read, ring_write = indices.ring_read.contiguous(), indices.ring_write.contiguous()
    fold_mask = indices.fold_mask.contiguous().view(torch.uint8)
    zero_entry = memory.d_ring.shape[0] - 1
    weighed = (records, memory.k_ring, memory.g_ring, ring_read, ring_write, fold_mask)
    numbers = (zero_entry, scale, 0.0 if l2norm_eps is None else l2norm_eps)
    settings = shape.settings() | {
        "HAS_DELTA": beta is not None, "HAS_NORM": l2norm_eps is not None,
        "num_warps": launch.weights_warps, **chained(q),
    }  # fmt: skip
    gates = (q if beta is None else beta, log_decay)
    if width == 1:
        heads = 1 if is_per_channel else math.gcd(value_heads // key_heads, MOST_HEADS)
        _token_weights_kernel[value_heads // heads, rows, 2](
            q, k, *gates, *weighed, *(x.stride(0) for x in (q, k, *gates)), *numbers,
            **settings, KB=min(32, key_dim), HEADS=heads,
        )  # fmt: skip
    else:
        tree = ring_read if ancestors is None else ancestors.contiguous()
        strides = [stride for x in (q, k, *gates) for stride in x.stride()[:2]]
        _window_weights_kernel[value_heads, rows](
            q, k, *gates, tree, *weighed, *strides, *numbers,
            **settings, KB=32, W=width, XP=max(16, 1 << (columns - 1).bit_length()),
            HAS_TREE=ancestors is not None,
            SPLIT_X=is_per_channel or q.dtype is torch.float32,
        )  # fmt: skip
    out = torch.empty((rows, width, value_heads, value_dim), dtype=q.dtype, device=q.device)
    block_v = min(launch.block_v, value_dim)
    _stream_kernel[value_heads * (value_dim // block_v), rows](
        records, v, out, state, memory.d_ring, memory.k_ring, ring_read, ring_write, fold_mask,
        indices.read_rows, indices.fold_rows, v.stride(0), v.stride(1), zero_entry,
        **shape.settings() | shape.tile(block_v),
        W=width, XP=max(8, 1 << (columns - 1).bit_length()), HAS_DELTA=beta is not None,
        HAS_DOTS=launch.has_dots, SPLIT_STATE=state.dtype is torch.float32,
        **chained(q), num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return out


def _run_chain(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    indices: ReplayIndices,
    launch: ChainLaunch,
    *,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:
    q, _, v, _, log_decay = inputs
    rows, width, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    is_per_channel = log_decay.shape[3] > 1
    launch = launch.clipped(value_dim)
    state = memory.checkpoint
    out = torch.empty((rows, width, value_heads, value_dim), dtype=q.dtype, device=q.device)
    _chain_kernel[value_heads * (value_dim // launch.run_v), rows](
        *inputs, out, state, memory.d_ring, memory.k_ring, memory.g_ring,
        indices.ring_read.contiguous(), indices.ring_write.contiguous(),
        indices.fold_mask.contiguous().view(torch.uint8), indices.read_rows, indices.fold_rows,
        *(stride for x in inputs for stride in x.stride()[:2]),
        memory.d_ring.shape[0] - 1, scale, 0.0 if l2norm_eps is None else l2norm_eps,
        N=indices.ring_read.shape[1], W=width, HALF=max(4, 1 << (width - 1).bit_length()),
        H=key_heads, HV=value_heads, K=key_dim, V=value_dim,
        BV=launch.block_v, BLOCKS=launch.run_v // launch.block_v, STAGES=launch.num_stages,
        # in one warp four threads read a row of a tile, four times 16 bytes each
        KB=64 // state.element_size() if launch.num_warps == 1 else 32,
        IS_DIRECT=launch.num_warps == 1,
        IS_PER_CHANNEL=is_per_channel, HAS_NORM=l2norm_eps is not None,
        SPLIT_X=is_per_channel or q.dtype is torch.float32,
        SPLIT_STATE=state.dtype is torch.float32,
        num_warps=launch.num_warps, num_stages=1, maxnreg=launch.max_registers, **chained(q),
    )  # fmt: skip
    return out


def _run_window(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    indices: ReplayIndices,
    launch: WindowLaunch,
    *,
    l2norm_eps: float | None,
    scale: float,
    ancestors: Tensor | None,
) -> Tensor:
    q, k, v, beta, log_decay = inputs
    rows, width, _, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    is_per_channel = log_decay.shape[3] > 1
    half = _half(width)
    shape = _Shape(indices.ring_read.shape[1], 16, 0, 0, memory)
    head = _window_head(half, key_dim, is_per_channel=is_per_channel)
    size = head + 2 * half * (shape.entries + 2 * half) + shape.size
    records = torch.empty((rows, value_heads, size), dtype=torch.float32, device=q.device)
    ring_read, ring_write = indices.ring_read.contiguous(), indices.ring_write.contiguous()
    fold_mask = indices.fold_mask.contiguous().view(torch.uint8)
    zero_entry = memory.d_ring.shape[0] - 1
    settings = shape.settings() | {
        "SIZE": size, "RING": head, "W": width, "HALF": half, **chained(q),
    }  # fmt: skip
    gates = (q if beta is None else beta, log_decay)
    _window_scores_kernel[value_heads, rows, 2](
        q, k, *gates, ring_read if ancestors is None else ancestors.contiguous(), records,
        memory.k_ring, memory.g_ring, ring_read, ring_write, fold_mask,
        *(stride for x in (q, k, *gates) for stride in x.stride()[:2]),
        zero_entry, scale, 0.0 if l2norm_eps is None else l2norm_eps,
        **settings, HAS_TREE=ancestors is not None, HAS_DELTA=beta is not None,
        HAS_NORM=l2norm_eps is not None, KB=min(128, key_dim),
        num_warps=launch.weights_warps, maxnreg=launch.weights_registers,
        # the interpreter has no products of bfloat16
        IS_SHORT=q.is_cuda and q.dtype is memory.k_ring.dtype and q.dtype is not torch.float32,
    )  # fmt: skip
    out = torch.empty((rows, width, value_heads, value_dim), dtype=q.dtype, device=q.device)
    state = memory.checkpoint
    block_v = min(launch.block_v, value_dim)
    is_wide = is_per_channel or q.dtype is torch.float32
    _window_stream_kernel[value_heads * (value_dim // block_v), rows](
        records, q, k, v, out, state, memory.d_ring, memory.k_ring, ring_read, ring_write,
        fold_mask, indices.read_rows, indices.fold_rows,
        *(stride for x in (q, k, v) for stride in x.stride()[:2]), zero_entry,
        **settings, V=value_dim, BV=block_v,
        # in one warp four threads read a row of a tile, each 16 bytes of what is widest
        KB=16 if launch.num_warps == 1 and (is_wide or state.dtype is torch.float32) else 32,
        PAIR=0 if launch.num_warps > 1 else 1 if is_wide and state.dtype is torch.float32 else 2,
        SPLIT_X=is_wide, SPLIT_STATE=state.dtype is torch.float32,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return out


def window_bytes(
    rows: int,
    width: int,
    num_replayed: int,  # N
    value_heads: int,
    key_dim: int,
    recurrence: Recurrence,
) -> int:
    """Return the bytes that `replay_window` takes beside its arguments and result, by default."""
    is_per_channel = recurrence is Recurrence.KIMI_DELTA
    entries = _num_entries(num_replayed, _least_entries(width, num_replayed))
    fold = _fold_len(num_replayed, entries, key_dim, is_per_channel=is_per_channel)
    if width > 1:
        half = _half(width)
        head = _window_head(half, key_dim, is_per_channel=is_per_channel)
        size = head + 2 * half * (entries + 2 * half) + _aligned(fold)
    else:
        columns = 1 if recurrence is Recurrence.MAMBA2 else 2
        size = _aligned(columns * (key_dim + entries + 1) + fold)
    return 4 * rows * value_heads * size


def _half(width: int) -> int:
    return max(4, 1 << (width - 1).bit_length())


def _least_entries(width: int, num_replayed: int) -> int:
    return 16 if width > 1 or num_replayed > FEW_ENTRIES else 1


def _num_entries(num_replayed: int, least: int) -> int:
    return max(least, 1 << (num_replayed - 1).bit_length())


def _fold_len(num_replayed: int, entries: int, key_dim: int, *, is_per_channel: bool) -> int:
    return key_dim * (1 + num_replayed) if is_per_channel else entries + 1


def _window_head(half: int, key_dim: int, *, is_per_channel: bool) -> int:
    """Floats of the columns' factors, then with a decay per channel of x and the state's decays."""
    return 2 * half + (2 * half + 1) * key_dim * is_per_channel


def _aligned(size: int) -> int:
    return -(-size // 4) * 4


def materialize(
    memory: ReplayMemory,
    ring_read: Tensor,  # [B, N]
    mask: Tensor,  # [B, N] bool, a prefix of each row
    *,
    read_rows: Tensor,  # [B]
    out_rows: Tensor,  # [B]
    l2norm_eps: float | None,
) -> None:
    """Write the state after the masked prefix into `out_rows`, as `reference.materialize` does.

    Two launches for all rows. Entries outside the mask are not read. No row's `out_row` is another
    row's `read_row`.
    """
    reason = unsupported_memory(memory)
    assert reason is None, reason
    _assert_contiguous(memory)
    shape = _Shape(ring_read.shape[1], 16, 0, 0, memory)
    value_heads, value_dim = memory.checkpoint.shape[1:3]
    rows, device = len(ring_read), ring_read.device
    records = torch.empty((rows, value_heads, shape.size), dtype=torch.float32, device=device)
    ring_read, mask = ring_read.contiguous(), mask.contiguous().view(torch.uint8)
    _fold_weights_kernel[value_heads, rows](
        records, memory.k_ring, memory.g_ring, ring_read, mask,
        0.0 if l2norm_eps is None else l2norm_eps,
        **shape.settings(), KB=32, HAS_NORM=l2norm_eps is not None, **chained(ring_read),
        num_warps=MATERIALIZE.weights_warps,
    )  # fmt: skip
    block_v = min(MATERIALIZE.block_v, value_dim)
    _fold_stream_kernel[value_heads * (value_dim // block_v), rows](
        records, memory.checkpoint, memory.d_ring, memory.k_ring, ring_read, mask,
        read_rows, out_rows, **shape.settings() | shape.tile(block_v),
        **chained(ring_read), num_warps=MATERIALIZE.num_warps,
    )  # fmt: skip


@dataclass(frozen=True)
class _Shape:
    """What both kernels of a step must agree on."""

    num_replayed: int  # N
    least_entries: int  # of a tile
    columns: int
    width: int  # W
    memory: ReplayMemory

    @property
    def entries(self) -> int:
        """NP."""
        return _num_entries(self.num_replayed, self.least_entries)

    @property
    def size(self) -> int:
        """Floats of a record, in units of 16 bytes."""
        key_dim, decay_dim = self.memory.checkpoint.shape[3], self.memory.g_ring.shape[2]
        fold = _fold_len(self.num_replayed, self.entries, key_dim, is_per_channel=decay_dim > 1)
        return _aligned(self.columns * (key_dim + self.entries + self.width) + fold)

    def settings(self) -> dict[str, object]:
        """Return the constants of all kernels."""
        return {
            "N": self.num_replayed,
            "NP": self.entries,
            "H": self.memory.k_ring.shape[1],
            "HV": self.memory.checkpoint.shape[1],
            "K": self.memory.checkpoint.shape[3],
            "SIZE": self.size,
            "IS_PER_CHANNEL": self.memory.g_ring.shape[2] > 1,
        }

    def tile(self, block_v: int) -> dict[str, object]:
        """Return the constants of the kernels that read the state, tiles being 128 bytes wide."""
        state = self.memory.checkpoint
        return {"V": state.shape[2], "BV": block_v, "KB": 128 // state.element_size()}


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
