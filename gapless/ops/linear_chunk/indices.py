"""Where the tokens of packed segments lie in fixed-size chunks; host integers only."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class Cut(NamedTuple):
    """A place where a segment's state is wanted: right after a chunk that ends there."""

    round: int
    place: int
    """The segment's place in `ChunkPlan.order`."""
    number: int
    """Which of the segment's cuts it is."""


class ChunkPlan(NamedTuple):
    """Chunks ordered by (round, segment); round j holds chunk j of every segment that has one."""

    order: list[int]
    """Segments, most chunks first; equal counts keep their order."""
    active: tuple[int, ...]
    """Segments of `order` that have a chunk in round j: always its first so many."""
    gather: np.ndarray
    """[C, chunk] int64: packed token of every place; T, the number of tokens, for padding."""
    scatter: np.ndarray
    """[T] int64: place in the flattened chunks of every packed token; 0 for those of no segment."""
    cuts: list[Cut]
    """All cuts, by round."""

    @property
    def num_cuts(self) -> tuple[int, ...]:
        """Cuts after each round."""
        counts = Counter(cut.round for cut in self.cuts)
        return tuple(counts[j] for j in range(len(self.active)))


def plan_chunks(
    lengths: Sequence[int],
    chunk: int,
    cuts: Sequence[Sequence[int]] | None = None,
    *,
    num_tokens: int | None = None,
) -> ChunkPlan:
    """Lay segments of the given lengths, packed one after another, into chunks of `chunk` places.

    A segment of length 0 has no chunk and stays in `order`.

    Args:
        cuts: per segment, numbers of its tokens, ascending, 1 to its length, after which a chunk
            must end, which may then be shorter than the others.
        num_tokens: T, where tokens of no segment follow; else the segments' own.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    total = int(sizes.sum()) if num_tokens is None else num_tokens
    starts = np.cumsum(sizes) - sizes
    cuts = cuts or [()] * len(sizes)
    ends = [_chunk_ends(size, chunk, own) for size, own in zip(lengths, cuts, strict=True)]
    chunks_of = np.array([len(own) for own in ends], dtype=np.int64)
    order = np.argsort(-chunks_of, kind="stable")
    num_rounds = int(chunks_of.max(initial=0))
    active = tuple(int((chunks_of > j).sum()) for j in range(num_rounds))

    # one chunk: its segment, and the segment's tokens [begin, end)
    by_round = [(i, j) for j, n in enumerate(active) for i in order[:n]]
    segment = np.array([i for i, _ in by_round], dtype=np.int64)
    begin = np.array([ends[i][j - 1] if j else 0 for i, j in by_round], dtype=np.int64)
    end = np.array([ends[i][j] for i, j in by_round], dtype=np.int64)
    offset = begin[:, None] + np.arange(chunk, dtype=np.int64)
    is_token = offset < end[:, None]
    gather = np.where(is_token, starts[segment][:, None] + offset, total)
    scatter = np.zeros(total, dtype=np.int64)
    scatter[gather[is_token]] = np.flatnonzero(is_token)
    found = [
        Cut(ends[i].index(cut), place, number)
        for place, i in enumerate(order)
        for number, cut in enumerate(cuts[i])
    ]
    return ChunkPlan([int(i) for i in order], active, gather, scatter, sorted(found))


def _chunk_ends(length: int, chunk: int, cuts: Sequence[int]) -> list[int]:
    """Ends of a segment's chunks, which start anew at each cut."""
    borders = sorted({0, *cuts, length})
    return [
        end for low, high in pairwise(borders) for end in (*range(low + chunk, high, chunk), high)
    ]
