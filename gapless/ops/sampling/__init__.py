"""Sampling with noise keyed by seed, position and token id, and what goes with it.

CUDA tensors go to the Triton kernels where those serve them, and to the torch definition
otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.fallback import log_fallback
from gapless.ops.sampling import masks, philox, ranking, reference, shards
from gapless.ops.sampling.edits import EditRows, edit_logits, edit_trees, edit_windows
from gapless.ops.sampling.logprobs import packed_logprobs
from gapless.ops.sampling.masks import MaskRows
from gapless.ops.sampling.reference import SamplingColumns, SamplingMode, SamplingRows
from gapless.ops.sampling.shards import ranked_of_all

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "EditRows",
    "MaskRows",
    "SamplingColumns",
    "SamplingMode",
    "SamplingRows",
    "best_of_all",
    "edit_logits",
    "edit_trees",
    "edit_windows",
    "gumbel_noise",
    "mask_logits",
    "packed_logprobs",
    "rank_tokens",
    "ranked_of_all",
    "sample",
    "shard_best",
    "shard_ranked",
]


def sample(
    logits: Tensor,  # [N, V] float32 or wider, bias and penalties applied; not modified
    positions: Tensor,  # [N] int64: position that the sampled token will occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
) -> Tensor:  # [N] int64
    """Return one token id per row; ties go to the lowest id. Contract: `reference.sample`."""
    if logits.is_cuda:
        from gapless.ops.sampling import triton

        reason = triton.unsupported(logits)
        if reason is None:
            return triton.sample(logits, positions, rows, mode=mode)
        log_fallback("sampling runs", reason)
    return reference.sample(logits, positions, rows, mode=mode)


def rank_tokens(
    logits: Tensor,  # [N, V] float32 or wider, bias and penalties applied; not modified
    positions: Tensor,  # [N] int64: position that the tokens would occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    count: int,
) -> tuple[Tensor, Tensor]:  # [N, count] int64 and logits' dtype
    """Return each row's likeliest tokens, `sample`'s own first. Contract: `ranking.rank_tokens`."""
    sampled = sample(logits, positions, rows, mode=mode)
    temperature, noise = rows.of(rows.columns.temperature), None
    if not mode.is_greedy:
        noise = gumbel_noise(rows.of(rows.columns.seeds), positions, logits.shape[1])
    return ranking.rank_tokens(logits, sampled, temperature, noise, count=count)


def shard_best(
    logits: Tensor,  # [N, C] float32 or wider: of C ids from `first` on; not modified
    positions: Tensor,  # [N] int64: position that the sampled token will occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    first: int,
) -> Tensor:  # [N, M, 2] logits' dtype
    """Return candidates for each row's token, as many of all shards of one size and number of rows.

    Contract: `shards.shard_best`.
    """
    if logits.is_cuda:
        from gapless.ops.sampling import triton

        reason = triton.unsupported(logits)
        if reason is None:
            return triton.shard_best(logits, positions, rows, mode=mode, first=first)
        log_fallback("sampling runs", reason)
    return shards.shard_best(logits, positions, rows, mode=mode, first=first)


def best_of_all(
    pairs: Tensor,  # [N, M, 2]: `shard_best` of all shards, in their order
    vocab_size: int,
) -> Tensor:  # [N] int64
    """Return each row's token, what `sample` returns for whole rows.

    Contract: `shards.best_of_all`.
    """
    if pairs.is_cuda and pairs.dtype is torch.float32:
        from gapless.ops.sampling import triton

        return triton.best_of_all(pairs, vocab_size)
    return shards.best_of_all(pairs, vocab_size)


def shard_ranked(
    logits: Tensor,  # [N, C] float32 or wider: of C ids from `first` on; not modified
    positions: Tensor,  # [N] int64: position that the tokens would occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    count: int,
    first: int,
) -> Tensor:  # [N, 2 * count + 1] logits' dtype
    """Return what `ranked_of_all` wants of a shard. Contract: `shards.shard_ranked`."""
    assert mode.is_plain, "the best of a shard say nothing about what filters and edits leave"
    temperature, noise = rows.of(rows.columns.temperature), None
    if not mode.is_greedy:
        noise = gumbel_noise(rows.of(rows.columns.seeds), positions, logits.shape[1], first)
    return shards.shard_ranked(logits, temperature, noise, count=count, first=first)


def mask_logits(
    logits: Tensor,  # [N, V] float32 or wider; not modified
    rows: MaskRows,
) -> Tensor:  # [N, V]
    """Return logits without the tokens that masks forbid. Contract: `masks.mask_logits`."""
    if logits.is_cuda:
        from gapless.ops.sampling import triton

        return triton.mask_logits(logits, rows)
    return masks.mask_logits(logits, rows)


def gumbel_noise(
    seeds: Tensor,  # [N] int64, all 64 bits used
    positions: Tensor,  # [N] int64
    num_ids: int,
    first: int = 0,
) -> Tensor:  # [N, num_ids] float32
    """Return the noise that `sample` adds to the logits of `num_ids` tokens from `first` on.

    Contract: `philox.gumbel_noise`.
    """
    if seeds.is_cuda:
        from gapless.ops.sampling import triton

        return triton.gumbel_noise(seeds, positions, num_ids, first)
    return philox.gumbel_noise(seeds, positions, num_ids, first)
