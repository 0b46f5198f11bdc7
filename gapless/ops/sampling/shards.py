"""Tokens from logits that lie in shards: what each finds, and what follows from all; the CPU path.

The token of a row without filters and edits is that of the largest perturbed logit, which is the
largest of what the shards find: so a few numbers of each take the place of whole rows. Shards hold
consecutive ids and come in their order. Ids travel as floating point numbers, beside values. What
a lost rank should have sent may be anything: an id of the vocabulary is made of it all the same,
since what reads it would fail beyond.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.sampling.philox import gumbel_noise
from gapless.ops.sampling.ranking import largest, perturb

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.sampling.reference import SamplingMode, SamplingRows

# integers below it are exact in float32
MAX_IDS = 1 << 24


def shard_best(
    logits: Tensor,  # [N, C] float32 or wider: of C ids from `first` on; not modified
    positions: Tensor,  # [N] int64: position that the sampled token will occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    first: int,
) -> Tensor:  # [N, M, 2] logits' dtype: perturbed logits and ids
    """Return what may be a row's best, of runs of ids in their order; here of all as one run."""
    assert mode.is_plain, "the best of a shard says nothing about what filters and edits leave"
    assert first + logits.shape[1] <= MAX_IDS, "ids are exact in float32"
    temperature, noise = rows.of(rows.columns.temperature), None
    if not mode.is_greedy:
        noise = gumbel_noise(rows.of(rows.columns.seeds), positions, logits.shape[1], first)
    # of several equal ones the first
    value, index = perturb(logits, temperature, noise).max(-1)
    return torch.stack((value, (index + first).to(value.dtype)), dim=1)[:, None]


def best_of_all(
    pairs: Tensor,  # [N, M, 2]: `shard_best` of all shards, in their order
    vocab_size: int,
) -> Tensor:  # [N] int64
    """Return each row's token: of equal values the lowest id."""
    values, ids = pairs.unbind(-1)
    return _tokens(ids.gather(1, values.argmax(1, keepdim=True))[:, 0], vocab_size)


def shard_ranked(
    logits: Tensor,  # [N, C] float32 or wider: of C ids from `first` on; not modified
    temperature: Tensor,  # [N] float32; 0 is greedy
    noise: Tensor | None,  # [N, C] float32, not added to greedy rows; None if all are greedy
    *,
    count: int,
    first: int,
) -> Tensor:  # [N, 2 * count + 1] logits' dtype
    """Return a shard's largest perturbed logits, best first, their ids, and its log-sum-exp."""
    assert first + logits.shape[1] <= MAX_IDS, "ids are exact in float32"
    perturbed = perturb(logits, temperature, noise)
    total = perturbed.logsumexp(-1, keepdim=True)
    ids, values = largest(perturbed.clone() if noise is None else perturbed, count)
    return torch.cat((values, (ids + first).to(values.dtype), total), dim=1)


def ranked_of_all(
    found: Tensor,  # [N, S, 2 * count + 1]: `shard_ranked` of S shards, in their order
    vocab_size: int,
    *,
    count: int,
) -> tuple[Tensor, Tensor]:  # [N, count] int64 and found's dtype
    """Return each row's likeliest tokens, best first, and log-softmax of their perturbed logits.

    The same as `ranking.rank_tokens` of whole rows, save for rounding.
    """
    values, ids, totals = found.split((count, count, 1), dim=-1)
    # a stable sort: of equal values the lower id is before the higher
    ranked = values.flatten(1).sort(dim=1, descending=True, stable=True)
    tokens = _tokens(ids.flatten(1).gather(1, ranked.indices[:, :count]), vocab_size)
    return tokens, ranked.values[:, :count] - totals[:, :, 0].logsumexp(-1, keepdim=True)


def _tokens(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.where((ids >= 0) & (ids < vocab_size), ids, 0).to(torch.int64)
