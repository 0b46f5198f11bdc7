"""Where the tokens of packed segments lie in fixed-size chunks; host integers only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class ChunkPlan(NamedTuple):
    """Chunks ordered by (round, segment); round j holds chunk j of every segment that has one."""

    order: list[int]
    """Segments, longest first; equal lengths keep their order."""
    active: tuple[int, ...]
    """Segments of `order` that have a chunk in round j: always its first so many."""
    gather: np.ndarray
    """[C, chunk] int64: packed token of every place; T, the number of tokens, for padding."""
    scatter: np.ndarray
    """[T] int64: place in the flattened chunks of every packed token."""


def plan_chunks(lengths: Sequence[int], chunk: int) -> ChunkPlan:
    """Lay segments of the given lengths, packed one after another, into chunks of `chunk` places.

    A segment of length 0 has no chunk and stays in `order`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    total = int(sizes.sum())
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(-sizes, kind="stable")
    num_rounds = -(-int(sizes.max(initial=0)) // chunk)
    chunks_of = -(-sizes // chunk)
    active = tuple(int((chunks_of > j).sum()) for j in range(num_rounds))

    # one chunk: its segment, and how many tokens of that segment come before it
    segment = np.concatenate([order[:n] for n in active]) if active else order[:0]
    before = np.repeat(np.arange(num_rounds, dtype=np.int64) * chunk, active)
    offset = before[:, None] + np.arange(chunk, dtype=np.int64)
    is_token = offset < sizes[segment][:, None]
    gather = np.where(is_token, starts[segment][:, None] + offset, total)
    scatter = np.empty(total, dtype=np.int64)
    scatter[gather[is_token]] = np.flatnonzero(is_token)
    return ChunkPlan([int(i) for i in order], active, gather, scatter)
