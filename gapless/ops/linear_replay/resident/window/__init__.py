"""When windows of many rows take the resident kernel of their own, and how it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.chaining import chained, nvidia_capability

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

# fewer leave multiprocessors without work while others end
LEAST_WINDOW_ITEMS = 64 * 32
MOST_TOKENS = 4
MOST_ENTRIES = 32
DIM = 128  # K and V


def can_reside_window(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    num_replayed: int,  # N
) -> bool:
    """Whether the resident kernel serves the second launch of these windows.

    It does with 2 to 4 tokens of a delta rule, enough rows and value heads, bfloat16 keys and fp32
    states of 128 x 128, vectors that start at 16 bytes, and a Hopper GPU.
    """
    q, k, v, beta, _ = inputs
    rows, width, value_heads, _ = v.shape
    return (
        beta is not None
        and 2 <= width <= MOST_TOKENS
        and rows * value_heads >= LEAST_WINDOW_ITEMS
        and num_replayed <= MOST_ENTRIES
        and {x.dtype for x in (q, k, v, memory.k_ring)} == {torch.bfloat16}
        and memory.checkpoint.dtype is torch.float32
        and memory.checkpoint.shape[2:] == (DIM, DIM)
        # the compiler knows strides by whether 16 divides them
        and all(s % 16 == 0 for x in (q, k, v) for s in x.stride()[:2])
        and all(x.data_ptr() % 16 == 0 for x in (q, k, v))
        and nvidia_capability(q.device)[0] == 9
    )


def run_resident_window(
    records: Tensor,  # [B, HV, SIZE] of the weights kernel
    vectors: tuple[Tensor, Tensor, Tensor],  # q, k, v
    memory: ReplayMemory,
    indices: ReplayIndices,
    settings: dict[str, int],  # constants of windows' kernels, those of the record among them
    *,
    num_programs: int | None = None,  # one for each multiprocessor
) -> Tensor:
    """Run the second launch of windows, where `can_reside_window`."""
    # Gluon is loaded where it is used
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gapless.ops.linear_replay.resident.window.kernel import _resident_window_kernel

    q, _, v = vectors
    rows, _, value_heads, value_dim = v.shape
    key_dim = q.shape[3]
    is_per_channel = memory.g_ring.shape[2] > 1
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    states = TensorDescriptor.from_tensor(
        memory.checkpoint.view(-1, key_dim),
        [value_dim // 2, key_dim],
        NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2),
    )
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    num_items = rows * value_heads
    _resident_window_kernel[(min(num_programs, num_items),)](
        records, *vectors, out, states, memory.checkpoint, memory.d_ring, memory.k_ring,
        indices.order, *indices.places(), indices.read_rows, indices.fold_rows,
        *(stride for x in vectors for stride in x.stride()[:2]),
        memory.d_ring.shape[0] - 1, num_items,
        **settings, V=value_dim, IS_PER_CHANNEL=is_per_channel,
        num_warps=4, **chained(q),
    )  # fmt: skip
    return out
