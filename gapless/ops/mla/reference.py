"""Multi-head latent attention over a flat pool of latents; the definition, and the CPU path.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. An entry of the pool is a token's latent c (R
channels, normalised) followed by its key k_r (rotated, shared by all heads). Head h has

    key = [W_UK_h c | k_r],  value = W_UV_h c,  score = scale ([q_h | q_r,h] . key)

These functions take queries with W_UK absorbed, [W_UK_h^T q_h | q_r,h], and return mixed latents,
to which W_UV_h is still to be applied: since q_h . (W_UK_h c) = (W_UK_h^T q_h) . c, every head
attends to the entries themselves. That is multi-query attention whose one value is the first R
channels of its one key. A token costs R + rope_dim + R products per head and entry in place of
N + rope_dim + V, and nothing is expanded per entry: windows gain by it, long prefill chunks would
gain by expanding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.ops.paged_attention import PackedSegment


def window_latent_attention(
    q: Tensor,  # [B, W, H, C], absorbed
    pool: Tensor,  # [entries, C]
    kv_read: Tensor,  # [B, S] int64 entries
    mask: Tensor,  # [B, W, S] bool: attend
    scale: float,
    *,
    value_dim: int,  # R
) -> Tensor:  # [B, W, H, R] in q's dtype
    """Return softmax(scale q c^T) c[:R] of every window token over its row's masked entries.

    What a row masks must still be finite: positions past a row's window name some valid entry of
    that row. Softmax in at least float32.
    """
    entries = _entries(pool, kv_read, q.dtype)
    wide = q.to(entries.dtype).transpose(1, 2)
    out = scaled_dot_product_attention(
        wide, entries, entries, attn_mask=mask[:, None], scale=scale, enable_gqa=True
    )
    return out[..., :value_dim].transpose(1, 2).to(q.dtype)


def prefill_latent_attention(
    q: Tensor,  # [T, H, C], absorbed
    pool: Tensor,  # [entries, C]
    kv_read: Tensor,  # [S_total] int64 entries
    segments: Sequence[PackedSegment],
    scale: float,
    *,
    value_dim: int,  # R
) -> Tensor:  # [T, H, R] in q's dtype
    """Return causal attention of packed segments; a segment's last query sees all its entries.

    Segments cover q from its first token on, without gaps; padding after them gives zeros. Softmax
    in at least float32.
    """
    parts = []
    for q_start, q_end, kv_start, kv_end in segments:
        entries = _entries(pool, kv_read[None, kv_start:kv_end], q.dtype)
        wide = q[None, q_start:q_end].to(entries.dtype).transpose(1, 2)
        num_queries, num_keys = q_end - q_start, kv_end - kv_start
        is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
        out = scaled_dot_product_attention(
            wide,
            entries,
            entries,
            attn_mask=is_seen.tril(num_keys - num_queries),
            scale=scale,
            enable_gqa=True,
        )
        parts.append(out[0, ..., :value_dim].transpose(0, 1))
    padding = q[sum(len(part) for part in parts) :, :, :value_dim]
    return torch.cat([*parts, torch.zeros_like(padding)]).to(q.dtype)


def _entries(pool: Tensor, kv_read: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather entries [B, 1, S, C] for one key head, in acc dtype.

    The channels past the latent are mixed as if they were values and dropped: with keys and values
    of one width, torch has a fused path.
    """
    acc = torch.promote_types(dtype, torch.float32)
    rows = pool.index_select(0, kv_read.reshape(-1)).to(acc)
    return rows.view(kv_read.shape[0], 1, kv_read.shape[1], -1)
