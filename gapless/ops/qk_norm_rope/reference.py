"""From the projection's q, k and v to attention's: head norm, rotary embedding, KV store.

The definition, and the CPU path; the parts are those of `ops/norm` and `ops/rope`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.norm.reference import rms_norm
from gapless.ops.rope.reference import apply_rotary

if TYPE_CHECKING:
    from torch import Tensor


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

    Rounded to qkv's dtype after the norm and after the rotation.
    """
    _, _, kv_heads, head_dim = pool.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    num_rotated = heads.shape[1] - kv_heads
    qk, v = heads.split([num_rotated, kv_heads], dim=1)
    if norm_weight is not None:
        qk = rms_norm(qk, norm_weight, eps)
    q: Tensor
    q, k = apply_rotary(qk, rotary).split([num_rotated - kv_heads, kv_heads], dim=1)
    pool.select(1, 0).index_copy_(0, kv_write, k)
    pool.select(1, 1).index_copy_(0, kv_write, v)
    return q
