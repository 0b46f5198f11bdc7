"""Grouped-query attention over a flat pool of keys and values; the definition, and the CPU path.

The caller turns page tables into entry numbers once per step. Keys and values of the window, or
of the segment, are in the pool before these functions read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class PackedSegment(NamedTuple):
    """Which of a prefill chunk's packed queries attend to which of its packed reads.

    Both are of one request, in order of position, and the last query is at the last read.
    """

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int


def window_attention(
    q: Tensor,  # [B, W, H, D]
    pool: Tensor,  # [entries, 2, KVH, D], keys then values
    kv_read: Tensor,  # [B, S] int64 entries
    mask: Tensor,  # [B, W, S] bool: attend
    scale: float,
) -> Tensor:  # [B, W, H, D] in q's dtype
    """Return softmax(scale q k^T) v of every window token over its row's masked entries.

    Query head h reads key head h // (H / KVH). What a row masks must still be finite: positions
    past a row's window name some valid entry of that row. Softmax in at least float32.
    """
    keys, values = _heads(pool, kv_read, q.dtype)
    wide = q.to(keys.dtype).transpose(1, 2)
    out = scaled_dot_product_attention(
        wide, keys, values, attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).to(q.dtype)


def prefill_attention(
    q: Tensor,  # [T, H, D]
    pool: Tensor,  # [entries, 2, KVH, D]
    kv_read: Tensor,  # [S_total] int64 entries
    segments: Sequence[PackedSegment],
    scale: float,
) -> Tensor:  # [T, H, D] in q's dtype
    """Return causal attention of packed segments; a segment's last query sees all its keys.

    Segments cover q from its first token on, without gaps; padding after them gives zeros. Softmax
    in at least float32.
    """
    parts = []
    for q_start, q_end, kv_start, kv_end in segments:
        keys, values = _heads(pool, kv_read[None, kv_start:kv_end], q.dtype)
        wide = q[None, q_start:q_end].to(keys.dtype).transpose(1, 2)
        num_queries, num_keys = q_end - q_start, kv_end - kv_start
        is_whole = num_queries == num_keys
        mask = None if is_whole else _aligned_to_end(num_queries, num_keys, q.device)
        out = scaled_dot_product_attention(
            wide, keys, values, attn_mask=mask, is_causal=is_whole, scale=scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    padding = q[sum(len(part) for part in parts) :]
    return torch.cat([*parts, torch.zeros_like(padding)]).to(q.dtype)


def _aligned_to_end(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    ones = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return ones.tril(num_keys - num_queries)


def _heads(
    pool: Tensor,
    kv_read: Tensor,  # [B, S]
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # [B, KVH, S, D] each, in acc dtype
    """Gather keys and values; index_select on flat rows takes a fraction of pool[kv_read]."""
    acc = torch.promote_types(dtype, torch.float32)
    rows = pool.flatten(1).index_select(0, kv_read.reshape(-1)).to(acc)
    keys, values = rows.view(*kv_read.shape, *pool.shape[1:]).permute(2, 0, 3, 1, 4)
    return keys, values
