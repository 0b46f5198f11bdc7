"""Head norm and rotary embedding of q and k, and the store of k and v into the pages.

CUDA tensors of a type that the kernel serves go to it, all others to the torch definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.qk_norm_rope import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["qk_norm_rope"]


def qk_norm_rope(
    qkv: Tensor,  # [T, (H + 2 * KVH) * D]: q, k, v of the tokens; rows may be strided
    rotary: Tensor,  # [T, rotary_dim], the tokens' rows of `rotary_table`
    pool: Tensor,  # [entries, 2, KVH, D], may be strided
    kv_write: Tensor,  # [T] int64 entries
    *,
    norm_weight: Tensor | None,  # [H + KVH, D] acc dtype, a row per head of q and k; None: no norm
    eps: float,
) -> Tensor:  # [T, H, D] in qkv's dtype
    """Normalise and rotate q and k, store k and v at `kv_write`, return q.

    Contract: `reference.qk_norm_rope`.
    """
    # rotary rows are wider than float32 only where the activations are
    if qkv.is_cuda and rotary.dtype == torch.float32:
        from gapless.ops.qk_norm_rope import triton

        return triton.qk_norm_rope(qkv, rotary, pool, kv_write, norm_weight=norm_weight, eps=eps)
    return reference.qk_norm_rope(qkv, rotary, pool, kv_write, norm_weight=norm_weight, eps=eps)
