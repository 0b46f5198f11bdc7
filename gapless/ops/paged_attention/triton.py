"""Attention over pages on a GPU, the functions of `reference.py` without gathering keys first.

Both kernels pack the query heads that share a key head into the rows of one matrix product, keep a
running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) and accumulate in float32. A window
splits its row's positions over programs (split-KV, as flash decoding does): where the cuts lie
follows from the row's length alone, and partial results are joined in order, so a row's bits
depend neither on the batch nor on how far other rows reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.paged_attention.kernels import (
    _prefill_kernel,
    _window_combine_kernel,
    _window_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.ops.draft_tree import TreeMask
    from gapless.ops.paged_attention import PackedSegment

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
LOG2_E = 1.4426950408889634
# rows of the smallest matrix product
MIN_ROWS = 16


@dataclass(frozen=True)
class WindowTiling:
    """How a window is cut into programs; only the first two decide the order of sums."""

    min_split: int  # positions, a multiple of kernels.SPLIT_GRAIN
    max_splits: int  # a power of two
    block_m: int  # most rows: window tokens times query heads per key head
    block_n: int  # positions per iteration
    num_warps: int
    num_stages: int

    def most_splits(self, length: int) -> int:
        """Return the most splits that a row of up to `length` positions has."""
        return min(self.max_splits, max(1, -(-length // self.min_split)))


@dataclass(frozen=True)
class PrefillTiling:
    """How a prefill chunk is cut into programs."""

    block_m: int  # rows: tokens times query heads per key head
    block_n: int  # positions per iteration
    num_warps: int
    num_stages: int


def window_tiling(rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> WindowTiling:
    """Choose from what is constant while an engine runs.

    Args: rows: window tokens times query heads per key head.
    """
    # a partial result is 4 * rows * head_dim bytes, to be small beside the keys and values read
    if rows <= MIN_ROWS:
        min_split, fewest, most = 128, 16, 64
    else:
        min_split, fewest, most = 256, 8, 32
    max_splits = min(most, max(fewest, triton.next_power_of_2(256 // kv_heads)))
    if dtype == torch.float32:
        return WindowTiling(min_split, max_splits, 32, 16 if head_dim > 128 else 32, 8, 1)
    return WindowTiling(min_split, max_splits, 64, 32 if head_dim > 128 else 64, 4, 3)


def prefill_tiling(group: int, head_dim: int, dtype: torch.dtype) -> PrefillTiling:
    """Choose from the layer's shape; `group` query heads share a key head."""
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:
        block_m, block_n = (16, 16) if head_dim > 128 else (32, 32)
        return PrefillTiling(max(block_m, least), block_n, 8, 1)
    # a third stage of 256 channels does not fit the shared memory
    return PrefillTiling(max(128, least), 64, 8, 2 if head_dim > 128 else 3)


def paged_window_attention(
    q: Tensor,  # [B * W, H, D], D contiguous
    pool: Tensor,  # [entries, 2, KVH, D], keys then values, D contiguous
    slots: Tensor,  # [B]
    positions: Tensor,  # [B, W], ascending in a row
    page_table: Tensor,  # [slots + 1, P]
    scale: float,
    *,
    page_size: int,
    kv_len: int,
    first: int = 0,
    tree: TreeMask | None = None,
    tiling: WindowTiling | None = None,
) -> Tensor:  # [B * W, H, D] in q's dtype
    """Return attention of every window token to its row's positions `first` to its own.

    With `tree`, a token's positions are instead those that the mask names, from `first` on and up
    to the row's last. `kv_len` bounds every row's length, window included. A row without any
    position gives zeros. Entries that no token of a row sees are never read. Softmax and sums in
    float32; float32 operands are multiplied in IEEE arithmetic.
    """
    num_rows, window = positions.shape
    num_tokens, heads, head_dim = q.shape
    kv_heads = pool.shape[2]
    group = heads // kv_heads
    _check(q, pool)
    if tiling is None:
        tiling = window_tiling(window * group, kv_heads, head_dim, q.dtype)
    block_m = min(tiling.block_m, max(MIN_ROWS, triton.next_power_of_2(window * group)))
    splits = tiling.most_splits(kv_len - first)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial, partial_lse = empty_partials(num_tokens, heads, splits, head_dim, q.device)
    shared: dict[str, Any] = {
        "WINDOW": window,
        "HEAD_DIM": head_dim,
        "MIN_SPLIT": tiling.min_split,
        "MAX_SPLITS": tiling.max_splits,
    }
    _window_kernel[(splits, kv_heads * triton.cdiv(window * group, block_m), num_rows)](
        q,
        pool,
        slots,
        positions,
        *tree_arguments(tree, positions),
        page_table,
        out,
        partial,
        partial_lse,
        scale * LOG2_E,
        first,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        positions.stride(0),
        positions.stride(1),
        0 if tree is None else tree.bits.stride(0),
        page_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block_n,
        PRECISION=_precision(q.dtype),
        HAS_TREE=tree is not None,
        num_warps=tiling.num_warps,
        **chained(q),
        num_stages=tiling.num_stages,
        **shared,
    )
    if splits > 1:
        block_d = min(64, head_dim)
        _window_combine_kernel[(num_tokens, heads, head_dim // block_d)](
            partial,
            partial_lse,
            positions,
            out,
            splits,
            first,
            positions.stride(0),
            positions.stride(1),
            BLOCK_D=block_d,
            num_warps=4,
            **chained(q),
            **shared,
        )
    return out


def window_bytes(
    num_tokens: int,  # B * W
    window: int,  # W
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kv_len: int,
) -> int:
    """Return the bytes that `paged_window_attention` takes beside its arguments and result."""
    tiling = window_tiling(window * heads // kv_heads, kv_heads, head_dim, dtype)
    return partial_bytes(num_tokens, heads, tiling.most_splits(kv_len), head_dim)


def empty_partials(
    num_tokens: int, heads: int, splits: int, channels: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:  # [T, H, splits, channels] and [T, H, splits] float32
    """Return memory for what each split of a window finds: mixed values, and log-sum-exps."""
    # with one split nobody writes or reads these
    shape = (num_tokens, heads, splits) if splits > 1 else (1, 1, 1)
    return (
        torch.empty(*shape, channels, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def partial_bytes(num_tokens: int, heads: int, splits: int, channels: int) -> int:
    """Return the bytes of `empty_partials`."""
    return sum(x.nbytes for x in empty_partials(num_tokens, heads, splits, channels, "meta"))


def tree_arguments(tree: TreeMask | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a window kernel's starts and bits; without a tree nobody reads what stands there."""
    if tree is None:
        return positions, positions
    assert tree.bits.shape == positions.shape, "every query has its bits"
    assert tree.start.stride(0) == tree.bits.stride(1) == 1, "a row's bits are contiguous"
    return tree.start, tree.bits


def prefill_tiles(
    segments: Sequence[PackedSegment],
    num_tokens: int,  # of a tile
    count: int | None = None,  # tiles to return, empty ones after those of the segments
) -> np.ndarray:  # [tiles, 4] int32: first token, token after the last, kv_start, offset
    """Cut segments into tiles, those with most keys first.

    Token t of a tile sees the flat reads `kv_start` to `t + offset`, both included.
    """
    parts = [np.zeros((0, 4), np.int64)]
    for q_start, q_end, kv_start, kv_end in segments:
        begin = np.arange(q_start, q_end, num_tokens)
        end = np.minimum(begin + num_tokens, q_end)
        constant = np.full_like(begin, kv_start), np.full_like(begin, kv_end - q_end)
        parts.append(np.stack([begin, end, *constant], axis=1))
    tiles = np.concatenate(parts)
    num_keys = tiles[:, 1] + tiles[:, 3] - tiles[:, 2]
    tiles = tiles[np.argsort(-num_keys, kind="stable")]
    if count is not None:
        tiles = np.concatenate([tiles, np.zeros((count - len(tiles), 4), np.int64)])
    return tiles.astype(np.int32)


def paged_prefill_attention(
    q: Tensor,  # [T, H, D], D contiguous
    pool: Tensor,  # [entries, 2, KVH, D], D contiguous
    kv_read: Tensor,  # [S_total] entries
    tiles: Tensor,  # [tiles, 4] int32, `prefill_tiles` of the tiling's block_m // (H / KVH) tokens
    scale: float,
    *,
    tiling: PrefillTiling | None = None,
) -> Tensor:  # [T, H, D] in q's dtype
    """Return causal attention of packed segments; as `paged_window_attention`."""
    heads, head_dim = q.shape[1:]
    kv_heads = pool.shape[2]
    group = heads // kv_heads
    _check(q, pool)
    if tiling is None:
        tiling = prefill_tiling(group, head_dim, q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _prefill_kernel[(kv_heads, tiles.shape[0])](
        q,
        pool,
        kv_read,
        tiles,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        pool.stride(1),
        pool.stride(2),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        PRECISION=_precision(q.dtype),
        num_warps=tiling.num_warps,
        **chained(q),
        num_stages=tiling.num_stages,
    )
    return out


def unsupported(head_dim: int, dtype: str) -> str | None:
    """Return which of head dim and dtype the kernels do not serve, None if they serve both."""
    if dtype not in DTYPES:
        return f"dtype {dtype} (want one of {', '.join(DTYPES)})"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} (want one of {', '.join(map(str, HEAD_DIMS))})"
    return None


def _check(q: Tensor, pool: Tensor) -> None:
    assert q.dtype == pool.dtype, f"queries of {q.dtype} over keys of {pool.dtype}"
    reason = unsupported(q.shape[2], str(q.dtype).removeprefix("torch."))
    assert reason is None, f"no kernel for {reason}"
    assert q.stride(2) == 1, "a query's channels are contiguous"
    assert pool.stride(3) == 1, "a key's channels are contiguous"


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
