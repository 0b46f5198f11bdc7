"""When one token of many rows takes the resident kernel, and how it is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gapless.ops.chaining import chained, nvidia_capability

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.linear_replay.reference import ReplayIndices, ReplayMemory

# A program shares its multiprocessor with none of the kernels before and after it: with few items a
# step loses by that what the launch itself gains, which was 12 to 16% with 8 to 32 rows of 32 heads
# where steps took 0.3 to 0.9% longer.
LEAST_ITEMS = 64 * 32
# with a single entry each step folds
LEAST_ENTRIES, MOST_ENTRIES = 2, 16
DIM = 128  # K and V
STAGES = 3
# vectors and decays of each channel take the room of the third
CHANNEL_STAGES = 2


def can_reside(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    num_replayed: int,  # N
) -> bool:
    """Whether the resident kernel serves windows of one token.

    It does with enough rows and value heads, rings of some entries, and `is_resident_kind`.
    """
    q, k, v, _, log_decay = inputs
    return (
        log_decay.shape[0] * log_decay.shape[2] >= LEAST_ITEMS
        and LEAST_ENTRIES <= num_replayed <= MOST_ENTRIES
        and all(x.stride(0) % 16 == 0 for x in (q, k, v))
        and is_resident_kind(inputs, memory)
    )


def is_resident_kind(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
) -> bool:
    """Whether resident kernels are made for such a layer, whatever its window.

    That is a delta rule, bfloat16 keys, fp32 states of 128 x 128, a decay per head or channel,
    vectors that start at 16 bytes, and a Hopper GPU.
    """
    q, k, v, beta, log_decay = inputs
    return (
        beta is not None
        and log_decay.shape[3] in (1, DIM)
        and {x.dtype for x in (q, k, v, memory.k_ring)} == {torch.bfloat16}
        and memory.checkpoint.dtype is torch.float32
        and memory.checkpoint.shape[2:] == (DIM, DIM)
        and all(x.data_ptr() % 16 == 0 for x in (q, k, v))
        and nvidia_capability(q.device)[0] == 9
    )


def described_states(memory: ReplayMemory) -> Any:
    """Describe checkpoints, for the tensor memory accelerator, in tiles of a head's state."""
    # Gluon is loaded where it is used
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    rows = memory.checkpoint.view(-1, DIM)
    return TensorDescriptor.from_tensor(rows, [DIM, DIM], layout)


def programs_of(num_items: int, device: torch.device, num_programs: int | None) -> int:
    """Return how many programs stay: asked for, or one for each multiprocessor."""
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
    return min(num_programs, num_items)


def run_resident(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],  # q, k, v, beta, log_decay
    memory: ReplayMemory,
    indices: ReplayIndices,
    *,
    l2norm_eps: float | None,
    scale: float,
    num_programs: int | None = None,  # one for each multiprocessor
) -> Tensor:
    """Run windows of one token as `replay_window` does, where `can_reside`; one launch."""
    # Gluon is loaded where it is used
    from gapless.ops.linear_replay.resident.kernel import _resident_kernel

    q, k, v, beta, log_decay = inputs
    assert beta is not None, "a delta rule"
    rows, _, value_heads, value_dim = v.shape
    key_heads, key_dim = q.shape[2:]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    num_items = rows * value_heads
    is_per_channel = log_decay.shape[3] > 1
    tensors = (q, k, v, beta, log_decay)
    _resident_kernel[(programs_of(num_items, q.device, num_programs),)](
        *tensors, out, described_states(memory),
        memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring,
        indices.order, *indices.places(), indices.read_rows, indices.fold_rows,
        *(x.stride(0) for x in tensors), memory.d_ring.shape[0] - 1, num_items, scale,
        0.0 if l2norm_eps is None else l2norm_eps,
        N=indices.ring_read.shape[1], NP=MOST_ENTRIES, H=key_heads, HV=value_heads,
        K=key_dim, V=value_dim, STAGES=CHANNEL_STAGES if is_per_channel else STAGES,
        IS_PER_CHANNEL=is_per_channel, HAS_NORM=l2norm_eps is not None,
        num_warps=8, **chained(q),
    )  # fmt: skip
    return out
