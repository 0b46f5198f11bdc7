"""Choosing tokens from logits that lie in shards, one per rank.

Where a token is that of the largest perturbed logit, ranks exchange the best of their shards and
settle on the same; whole rows are gathered only for those that filters or edits make depend on
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.sampling import (
    best_of_all,
    rank_tokens,
    ranked_of_all,
    sample,
    shard_best,
    shard_ranked,
)

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.layers.logits import LogitShard
    from gapless.ops.sampling import SamplingMode, SamplingRows


def choose(
    logits: LogitShard,  # of N rows
    positions: Tensor,  # [N] int64: position that the sampled token will occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
) -> Tensor:  # [N] int64
    """Return what `sample` does for whole rows, on every rank."""
    if logits.is_whole or not mode.is_plain:
        return sample(logits.whole(), positions, rows, mode=mode)
    found = shard_best(logits.own, positions, rows, mode=mode, first=logits.first)
    gathered = logits.communicator.all_gather(found.flatten(1))
    return best_of_all(gathered.unflatten(1, (-1, 2)), logits.vocab_size)


def rank(
    logits: LogitShard,  # of N rows
    positions: Tensor,  # [N] int64: position that the tokens would occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    count: int,
) -> tuple[Tensor, Tensor]:  # [N, count] int64 and logits' dtype
    """Return what `rank_tokens` does for whole rows, save for rounding; alike on every rank."""
    if logits.is_whole or not mode.is_plain:
        return rank_tokens(logits.whole(), positions, rows, mode=mode, count=count)
    found = shard_ranked(logits.own, positions, rows, mode=mode, count=count, first=logits.first)
    gathered = logits.communicator.all_gather(found)
    shards = gathered.unflatten(1, (-1, found.shape[1]))
    return ranked_of_all(shards, logits.vocab_size, count=count)
