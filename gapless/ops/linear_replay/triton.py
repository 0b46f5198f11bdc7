"""Triton path of the replay window: chains and trees of 1 to 16 tokens, fp32 state or bf16.

Same functions and meaning as `reference.py`. The ring entry of zeros is the rings' last one, so
that it is recognised and not read. One token takes the launch of `token_kernel.py`; with many rows,
or a decay per channel, a weights kernel and the launch of `token_stream_kernel.py`; on a Hopper GPU
many rows of a delta rule take the launch of `resident/kernel.py` where it serves them. Windows of
several take a weights kernel and the launch of `window_stream_kernel.py`, or there the one of
`resident/window/kernel.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.specs.linear import Recurrence
from gapless.ops.chaining import chained
from gapless.ops.linear_replay.channel_weights_kernels import (
    _channel_token_kernel,
    _channel_window_kernel,
)
from gapless.ops.linear_replay.fold_kernels import _fold_stream_kernel, _fold_weights_kernel
from gapless.ops.linear_replay.resident import can_reside, run_resident
from gapless.ops.linear_replay.resident.window import can_reside_window, run_resident_window
from gapless.ops.linear_replay.token_kernel import _token_kernel
from gapless.ops.linear_replay.token_stream_kernel import _token_stream_kernel
from gapless.ops.linear_replay.token_weights_kernel import _token_weights_kernel
from gapless.ops.linear_replay.tuning import MATERIALIZE, Launch, launch_of
from gapless.ops.linear_replay.window_scores_kernel import _window_scores_kernel
from gapless.ops.linear_replay.window_stream_kernel import _window_stream_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

MAX_WIDTH = 16
MAX_REPLAYED = 128
# a fold of more takes matrix units
FEW_ENTRIES = 4
# of a thread that works out a window's scores: unasked, the compiler stops at 128 and spills
SCORES_REGISTERS = 168
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
    launch: Launch | None = None,
) -> Tensor:  # [B, W, HV, V] in q's dtype
    """Run one window as `reference.replay_window` does; one launch or two, no sync.

    Arguments may be views whose last two axes are contiguous; others are copied. `launch` defaults
    to the tuned one. Sums of one token are fp32; those of a wider window have 21 bits or more on
    matrix units.
    """
    width, num_replayed = q.shape[1], indices.ring_read.shape[1]
    reason = unsupported_window(width, num_replayed, memory, recurrence, l2norm_eps)
    assert reason is None, reason
    _assert_contiguous(memory)
    q, k, v, log_decay = (_inner_contiguous(x, 2) for x in (q, k, v, log_decay))
    inputs = (q, k, v, beta if beta is None else _inner_contiguous(beta, 1), log_decay)
    if width == 1 and launch is None and can_reside(inputs, memory, num_replayed):
        return run_resident(inputs, memory, indices, l2norm_eps=l2norm_eps, scale=scale)
    if ancestors is not None:
        ancestors = ancestors.contiguous()
    if width > 1 and launch is None and can_reside_window(inputs, memory, num_replayed):
        return run_resident_window(
            inputs, memory, indices, l2norm_eps=l2norm_eps, scale=scale, ancestors=ancestors
        )
    launch = launch or launch_of(width, num_replayed, rows=len(q), recurrence=recurrence)
    if width == 1:
        is_shared = _has_records(recurrence, num_replayed, launch)
        run = _run_shared_token if is_shared else _run_token
        return run(inputs, memory, indices, launch, l2norm_eps=l2norm_eps, scale=scale)
    return _run_window(
        inputs, memory, indices, launch, l2norm_eps=l2norm_eps, scale=scale, ancestors=ancestors,
    )  # fmt: skip


def _has_records(recurrence: Recurrence, num_replayed: int, launch: Launch) -> bool:
    """Whether one token's weights are worked out once for all programs of a head."""
    if recurrence is Recurrence.GATED_DELTA:
        return launch.weights_warps > 0 and num_replayed > FEW_ENTRIES
    return recurrence is Recurrence.KIMI_DELTA


def _run_token(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    indices: ReplayIndices,
    launch: Launch,
    *,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:
    q, k, v, beta, log_decay = inputs
    rows, _, value_heads, value_dim = v.shape
    record = _Record(1, indices.ring_read.shape[1], q.shape[3], is_per_channel=False)
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    block_v = min(launch.block_v, value_dim)
    tensors = (q, k, v, q if beta is None else beta, log_decay)
    settings = record.settings(memory)
    del settings["SIZE"]
    _token_kernel[value_heads * (value_dim // block_v), rows](
        *tensors, out, memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring,
        indices.order, *indices.places(), indices.read_rows, indices.fold_rows,
        *(x.stride(0) for x in tensors),
        memory.d_ring.shape[0] - 1, scale, 0.0 if l2norm_eps is None else l2norm_eps,
        **settings | _tile(memory, block_v),
        HAS_DELTA=beta is not None, HAS_NORM=l2norm_eps is not None,
        num_warps=launch.num_warps, maxnreg=launch.max_registers, **chained(q),
    )  # fmt: skip
    return out


def _run_shared_token(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    memory: ReplayMemory,
    indices: ReplayIndices,
    launch: Launch,
    *,
    l2norm_eps: float | None,
    scale: float,
) -> Tensor:
    q, k, v, beta, log_decay = inputs
    assert beta is not None, "a delta rule"
    rows, _, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    is_per_channel = log_decay.shape[3] > 1
    record = _Record(1, indices.ring_read.shape[1], key_dim, is_per_channel=is_per_channel)
    records = torch.empty((rows, value_heads, record.size), dtype=torch.float32, device=q.device)
    settings = record.settings(memory) | {"HAS_NORM": l2norm_eps is not None}
    places, zero_entry = indices.places(), memory.d_ring.shape[0] - 1
    eps = 0.0 if l2norm_eps is None else l2norm_eps
    tensors = (q, k, beta, log_decay)
    rings = (records, memory.k_ring, memory.g_ring)
    scalars = (*(x.stride(0) for x in tensors), zero_entry, scale, eps)
    if is_per_channel:
        _channel_token_kernel[value_heads, rows, 2](
            *tensors, *rings, *places, *scalars, **settings,
            GROUP=min(record.entries, launch.group),
            num_warps=launch.weights_warps, **chained(q),
        )  # fmt: skip
    else:
        heads = math.gcd(value_heads // key_heads, launch.heads)
        _token_weights_kernel[value_heads // heads, rows](
            *tensors, *rings, *places[:2], *scalars, **settings,
            KB=min(32, key_dim), HEADS=heads, num_warps=launch.weights_warps, **chained(q),
        )  # fmt: skip
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    block_v = min(launch.block_v, value_dim)
    _token_stream_kernel[value_heads * (value_dim // block_v), rows](
        records, v, out, memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring,
        indices.order, *places, indices.read_rows, indices.fold_rows, v.stride(0), zero_entry, eps,
        **settings | _tile(memory, block_v), IS_PER_CHANNEL=is_per_channel,
        num_warps=launch.num_warps, maxnreg=launch.max_registers, **chained(q),
    )  # fmt: skip
    return out


def _run_window(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    indices: ReplayIndices,
    launch: Launch,
    *,
    l2norm_eps: float | None,
    scale: float,
    ancestors: Tensor | None,
) -> Tensor:
    q, k, v, beta, log_decay = inputs
    rows, width, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    is_per_channel = log_decay.shape[3] > 1
    record = _Record(width, indices.ring_read.shape[1], key_dim, is_per_channel=is_per_channel)
    records = torch.empty((rows, value_heads, record.size), dtype=torch.float32, device=q.device)
    settings = record.settings(memory) | {"RING": record.ring, "W": width, "HALF": record.half}
    places, zero_entry = indices.places(), memory.d_ring.shape[0] - 1
    eps = 0.0 if l2norm_eps is None else l2norm_eps
    tensors = (q, k, q if beta is None else beta, log_decay)
    arguments = (
        *tensors, places[0] if ancestors is None else ancestors, records,
        memory.k_ring, memory.g_ring,
    )  # fmt: skip
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    weights = settings | {"HAS_TREE": ancestors is not None, "HAS_NORM": l2norm_eps is not None}
    if is_per_channel:
        _channel_window_kernel[value_heads, rows, 3](
            *arguments, *places, *strides, zero_entry, scale, eps, **weights, GROUP=launch.group,
            num_warps=launch.weights_warps, **chained(q),
        )  # fmt: skip
    else:
        heads = math.gcd(value_heads // key_heads, launch.heads)
        _window_scores_kernel[value_heads // heads, rows, 2](
            *arguments, *places, *strides, zero_entry, scale, eps,
            **weights, HAS_DELTA=beta is not None, KB=min(128, key_dim), HEADS=heads,
            # the interpreter has no products of bfloat16
            IS_SHORT=q.is_cuda and q.dtype is memory.k_ring.dtype and q.dtype is not torch.float32,
            num_warps=launch.weights_warps, maxnreg=SCORES_REGISTERS, **chained(q),
        )  # fmt: skip
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    block_v = min(launch.block_v, value_dim)
    is_one_warp = launch.num_warps == 1
    is_wide = is_per_channel or q.dtype is torch.float32
    is_wide_state = memory.checkpoint.dtype is torch.float32
    _window_stream_kernel[value_heads * (value_dim // block_v), rows](
        records, q, k, v, out, memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring,
        *places, indices.read_rows, indices.fold_rows,
        *(stride for x in (q, k, v) for stride in x.stride()[:2]), zero_entry,
        **settings, V=value_dim, BV=block_v, IS_PER_CHANNEL=is_per_channel,
        # in one warp four threads read a row of a tile, each 16 bytes of what is widest
        KB=16 if is_one_warp and (is_wide or is_wide_state) else 32,
        PAIR=0 if not is_one_warp else 1 if is_wide and is_wide_state else 2,
        SPLIT_X=is_wide, SPLIT_STATE=is_wide_state,
        num_warps=launch.num_warps, maxnreg=launch.max_registers, **chained(q),
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
    """Return the most bytes that `replay_window` takes beside its arguments and result."""
    launch = launch_of(width, num_replayed, rows=rows, recurrence=recurrence)
    if width == 1 and not _has_records(recurrence, num_replayed, launch):
        return 0
    is_per_channel = recurrence is Recurrence.KIMI_DELTA
    record = _Record(width, num_replayed, key_dim, is_per_channel=is_per_channel)
    return 4 * rows * value_heads * record.size


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

    One launch for all rows, two with a decay per channel. Entries outside the mask are not read. No
    row's `out_row` is another row's `read_row`.
    """
    reason = unsupported_memory(memory)
    assert reason is None, reason
    _assert_contiguous(memory)
    rows, num_replayed = ring_read.shape
    value_heads, value_dim, key_dim = memory.checkpoint.shape[1:]
    record = _Record(0, num_replayed, key_dim, is_per_channel=memory.g_ring.shape[2] > 1)
    settings = record.settings(memory) | {"HAS_NORM": l2norm_eps is not None}
    eps = 0.0 if l2norm_eps is None else l2norm_eps
    ring_read, mask = ring_read.contiguous(), mask.contiguous().view(torch.uint8)
    records = memory.g_ring
    if record.is_per_channel:
        size = (rows, value_heads, record.size)
        records = torch.empty(size, dtype=torch.float32, device=ring_read.device)
        # sums run over a program's threads
        _fold_weights_kernel[value_heads, rows](
            records, memory.k_ring, memory.g_ring, ring_read, mask, eps,
            **settings, num_warps=1, **chained(ring_read),
        )  # fmt: skip
    block_v = min(MATERIALIZE.block_v, value_dim)
    _fold_stream_kernel[value_heads * (value_dim // block_v), rows](
        records, memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring, ring_read, mask,
        read_rows, out_rows, eps, **settings | _tile(memory, block_v),
        IS_PER_CHANNEL=record.is_per_channel, num_warps=MATERIALIZE.num_warps, **chained(ring_read),
    )  # fmt: skip


@dataclass(frozen=True)
class _Record:
    """Where the parts of a record lie, in floats; with no token it is a fold's weights alone."""

    width: int  # W
    num_replayed: int  # N
    key_dim: int  # K
    is_per_channel: bool

    @property
    def entries(self) -> int:
        """NP."""
        is_small = self.width == 1 and self.num_replayed <= FEW_ENTRIES
        return _padded(self.num_replayed, 1 if is_small else 16)

    @property
    def half(self) -> int:
        """HALF, of windows."""
        return _padded(self.width, 4)

    @property
    def ring(self) -> int:
        """Start of a window's scores.

        It begins with the columns' factors, with a decay per channel also x and the state's decays.
        """
        return 2 * self.half + (2 * self.half + 1) * self.key_dim * self.is_per_channel

    @property
    def size(self) -> int:
        """Floats of a record, so that each starts at 16 bytes."""
        fold = self.key_dim * (1 + self.num_replayed) if self.is_per_channel else self.entries + 1
        start = 0
        if self.width == 1:
            start = 2 * (self.key_dim + self.entries + 1)
        elif self.width > 1:
            start = self.ring + 2 * self.half * (self.entries + 2 * self.half)
        return -(-(start + fold) // 4) * 4

    def settings(self, memory: ReplayMemory) -> dict[str, int]:
        """Return the constants of all kernels."""
        return {
            "N": self.num_replayed,
            "NP": self.entries,
            "H": memory.k_ring.shape[1],
            "HV": memory.checkpoint.shape[1],
            "K": self.key_dim,
            "SIZE": self.size,
        }


def _tile(memory: ReplayMemory, block_v: int) -> dict[str, int]:
    """Return the constants of kernels that read a state in tiles 128 bytes wide."""
    state = memory.checkpoint
    return {"V": state.shape[2], "BV": block_v, "KB": 128 // state.element_size()}


def _padded(count: int, least: int) -> int:
    """Return a power of two of at least both."""
    return max(least, 1 << (count - 1).bit_length())


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
