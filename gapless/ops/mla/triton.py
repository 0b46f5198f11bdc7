"""Attention over pages of latents on a GPU, the functions of `reference.py` without gathering.

As in `ops/paged_attention/triton.py`: a running softmax in float32, and windows whose rows are
split over programs where their length alone says. All heads attend to the same entries, so the
queries of a product are window tokens times heads, and each program reads an entry once, for scores
and for values. With more queries than one program holds, several read it, one from memory and the
others from the L2 cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.mla.kernels import _prefill_kernel, _window_combine_kernel, _window_kernel
from gapless.ops.mla.tuning import prefill_tiling, window_tiling
from gapless.ops.paged_attention.triton import (
    DTYPES,
    LOG2_E,
    MIN_ROWS,
    empty_partials,
    partial_bytes,
    tree_arguments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.draft_tree import TreeMask
    from gapless.ops.mla.tuning import LatentTiling
    from gapless.ops.paged_attention.triton import PrefillTiling

# with more, three blocks of entries and the queries do not fit the shared memory
MAX_RANK, MAX_ROPE_DIM = 512, 64


def heads_per_program(heads: int, block_m: int) -> int:
    """Return how many heads of a token go to one program, which holds `block_m` queries."""
    programs = -(-heads // block_m)
    return -(-heads // programs)


def tokens_per_tile(heads: int, block_m: int) -> int:
    """Return how many tokens a prefill program takes, for `prefill_tiles`."""
    return block_m // heads_per_program(heads, block_m)


def paged_window_latent_attention(
    q: Tensor,  # [B * W, H, C], absorbed, C contiguous
    pool: Tensor,  # [entries, C], C contiguous
    slots: Tensor,  # [B]
    positions: Tensor,  # [B, W], ascending in a row
    page_table: Tensor,  # [slots + 1, P]
    scale: float,
    *,
    value_dim: int,  # R
    page_size: int,
    kv_len: int,
    first: int = 0,
    tree: TreeMask | None = None,
    tiling: LatentTiling | None = None,
) -> Tensor:  # [B * W, H, R] in q's dtype
    """Return the mixed latents of every window token over its row's positions `first` to its own.

    With `tree`, a token's positions are instead those that the mask names, from `first` on and up
    to the row's last. `kv_len` bounds every row's length, window included. A row without any
    position gives zeros. Entries that no token of a row sees are never read. Softmax and sums in
    float32; float32 operands are multiplied in IEEE arithmetic.
    """
    num_rows, window = positions.shape
    num_tokens, heads, _ = q.shape
    queries = window * heads
    channels = _channels(q, pool, value_dim)
    if tiling is None:
        tiling = window_tiling(queries, q.dtype)
    splits = tiling.most_splits(kv_len - first)
    out = torch.empty(num_tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    partial, partial_lse = empty_partials(num_tokens, heads, splits, value_dim, q.device)
    shared: dict[str, Any] = {
        "WINDOW": window,
        "MIN_SPLIT": tiling.min_split,
        "FEW_SPLITS": tiling.few_splits,
        "FULL_SPLIT": tiling.full_split,
        "MAX_SPLITS": tiling.max_splits,
    }
    _window_kernel[(triton.cdiv(queries, tiling.block_m), splits, num_rows)](
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
        positions.stride(0),
        positions.stride(1),
        0 if tree is None else tree.bits.stride(0),
        page_table.stride(0),
        HEADS=heads,
        PAGE_SIZE=page_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        HAS_TREE=tree is not None,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        **chained(q),
        num_stages=tiling.num_stages,
        **channels,
        **shared,
    )
    if splits > 1:
        _window_combine_kernel[(num_tokens, heads)](
            partial,
            partial_lse,
            positions,
            out,
            splits,
            first,
            positions.stride(0),
            positions.stride(1),
            RANK=value_dim,
            BLOCK_C=channels["BLOCK_C"],
            num_warps=8,
            **chained(q),
            **shared,
        )
    return out


def window_bytes(
    num_tokens: int,  # B * W
    window: int,  # W
    heads: int,
    value_dim: int,  # R
    dtype: torch.dtype,
    *,
    kv_len: int,
) -> int:
    """Return the bytes `paged_window_latent_attention` takes beside its arguments and result."""
    splits = window_tiling(window * heads, dtype).most_splits(kv_len)
    return partial_bytes(num_tokens, heads, splits, value_dim)


def paged_prefill_latent_attention(
    q: Tensor,  # [T, H, C], absorbed, C contiguous
    pool: Tensor,  # [entries, C], C contiguous
    kv_read: Tensor,  # [S_total] entries
    tiles: Tensor,  # [tiles, 4] int32, `prefill_tiles` of `tokens_per_tile` tokens
    scale: float,
    *,
    value_dim: int,  # R
    tiling: PrefillTiling | None = None,
) -> Tensor:  # [T, H, R] in q's dtype
    """Return causal attention of packed segments; as `paged_window_latent_attention`."""
    num_tokens, heads, _ = q.shape
    channels = _channels(q, pool, value_dim)
    if tiling is None:
        tiling = prefill_tiling(q.dtype)
    group = heads_per_program(heads, tiling.block_m)
    out = torch.empty(num_tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    _prefill_kernel[(triton.cdiv(heads, group), tiles.shape[0])](
        q,
        pool,
        kv_read,
        tiles,
        out,
        scale * LOG2_E,
        q.stride(0),
        q.stride(1),
        pool.stride(0),
        HEADS=heads,
        GROUP=group,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        **chained(q),
        num_stages=tiling.num_stages,
        **channels,
    )
    return out


def unsupported(rank: int, rope_dim: int, dtype: str) -> str | None:
    """Return which of latent, rotated key and dtype the kernels do not serve; None: all served."""
    if dtype not in DTYPES:
        return f"dtype {dtype} (want one of {', '.join(DTYPES)})"
    if rank > MAX_RANK:
        return f"kv_lora_rank {rank} (want at most {MAX_RANK})"
    if rope_dim > MAX_ROPE_DIM:
        return f"rope_dim {rope_dim} (want at most {MAX_ROPE_DIM})"
    return None


def _channels(q: Tensor, pool: Tensor, rank: int) -> dict[str, Any]:
    """What both kernels are told about an entry's channels."""
    assert q.dtype == pool.dtype, f"queries of {q.dtype} over latents of {pool.dtype}"
    assert q.shape[2] == pool.shape[1], f"queries of {q.shape[2]} over entries of {pool.shape[1]}"
    rope_dim = pool.shape[1] - rank
    reason = unsupported(rank, rope_dim, str(q.dtype).removeprefix("torch."))
    assert reason is None, f"no kernel for {reason}"
    assert q.stride(2) == 1, "a query's channels are contiguous"
    assert pool.stride(1) == 1, "an entry's channels are contiguous"
    return {
        "RANK": rank,
        "ROPE": rope_dim,
        "BLOCK_C": max(MIN_ROWS, triton.next_power_of_2(rank)),
        "BLOCK_R": max(MIN_ROWS, triton.next_power_of_2(rope_dim)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
