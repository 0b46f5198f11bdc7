"""`reference.qk_norm_rope` in one launch, in float32 between its roundings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.qk_norm_rope.kernels import _qk_norm_rope_kernel

if TYPE_CHECKING:
    from torch import Tensor

# elements of one program's tile
TILE_LEN = 1024


def qk_norm_rope(
    qkv: Tensor,  # [T, (H + 2 * KVH) * D]
    rotary: Tensor,  # [T, rotary_dim] float32
    pool: Tensor,  # [entries, 2, KVH, D] of qkv's dtype, D contiguous
    kv_write: Tensor,  # [T] int64
    *,
    norm_weight: Tensor | None,  # [H + KVH, D] float32
    eps: float,
) -> Tensor:  # [T, H, D] contiguous
    """Normalise and rotate q and k, store k and v at `kv_write`, return q; see the reference."""
    assert pool.dtype == qkv.dtype, f"{qkv.dtype} into a pool of {pool.dtype}"
    assert qkv.stride(1) == rotary.stride(1) == pool.stride(3) == 1, "channels are contiguous"
    num_tokens = qkv.shape[0]
    _, _, kv_heads, head_dim = pool.shape
    num_heads = qkv.shape[1] // head_dim
    heads = num_heads - 2 * kv_heads
    q = torch.empty(num_tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = min(max(1, TILE_LEN // block_dim), triton.next_power_of_2(num_heads))
    _qk_norm_rope_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        qkv,
        rotary,
        pool,
        kv_write,
        # without a norm nobody reads this
        rotary if norm_weight is None else norm_weight,
        q,
        eps,
        qkv.stride(0),
        rotary.stride(0),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary.shape[1],
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        HAS_NORM=norm_weight is not None,
        num_warps=4,
        **chained(qkv),
    )
    return q
