"""Segments in pieces that end where a state is wanted, for kernels that take packed sequences.

Pieces lie as their tokens are packed, and each has its own chunks, so what needs no state is
computed for all of them at once. The scan of a segment goes from piece to piece and stores the
state after each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class PieceRoom(NamedTuple):
    """Sizes to pad to, so that the arrays of any segments that fit have the same shapes."""

    tokens: int
    segments: int
    pieces: int
    """One per segment and one per cut."""


@dataclass(frozen=True)
class PieceIndices:
    """Pieces of packed segments on the device, all int64.

    Padding: tokens after the last segment are a piece without chunks, of no segment; padded pieces
    are empty and of no segment; a padded chunk is one of an empty piece; a padded segment has no
    piece.
    """

    bounds: Tensor
    """[P + 1]: first token of each piece, then the end."""
    chunks: Tensor
    """[C, 2]: piece of each chunk, and the chunk's number in it."""
    firsts: Tensor
    """[P]: first chunk of each piece."""
    rows: Tensor
    """[P]: checkpoint row of the state after each piece."""
    segments: Tensor
    """[S + 1]: first piece of each segment, then the end."""
    init_rows: Tensor
    """[S]: checkpoint row that each segment starts from."""


def piece_arrays(
    lengths: Sequence[int],
    chunk: int,
    *,
    init_rows: Sequence[int],
    final_rows: Sequence[int],
    cuts: Sequence[Sequence[int]] | None = None,
    cut_rows: Sequence[Sequence[int]] | None = None,
    room: PieceRoom | None = None,
) -> dict[str, np.ndarray]:
    """Cut segments of the given lengths, packed one after another; return int64 arrays.

    A cut at a segment's end is followed by an empty piece, since two rows want that state.

    Args:
        chunk: most tokens of a chunk; a piece's last one may hold fewer.
        cuts: per segment, numbers of its tokens, ascending, after which a state is wanted.
        cut_rows: their rows.
    """
    cuts, cut_rows = cuts or [()] * len(lengths), cut_rows or [()] * len(lengths)
    ends: list[int] = []
    rows: list[int] = []
    segments = [0]
    start = 0
    for i, length in enumerate(lengths):
        ends += [start + cut for cut in cuts[i]] + [start + length]
        rows += [*cut_rows[i], final_rows[i]]
        segments.append(len(ends))
        start += length
    bounds = np.array([0, *ends], np.int64)
    counts = -(-np.diff(bounds) // chunk)
    firsts = np.cumsum(counts) - counts
    piece = np.repeat(np.arange(len(ends)), counts)
    chunks = np.stack([piece, np.arange(len(piece)) - firsts[piece]], 1)
    inits = np.array(init_rows, np.int64)
    stored = np.array(rows, np.int64)
    first_pieces = np.array(segments, np.int64)
    if room is not None:
        # the tokens left over, and an empty piece at least for padded chunks
        num_pieces = room.pieces + 2
        num_chunks = room.tokens // chunk + room.pieces
        bounds = _padded(bounds, num_pieces + 1, room.tokens)
        chunks = np.concatenate(
            [chunks, np.tile([num_pieces - 1, 0], (num_chunks - len(chunks), 1))]
        )
        firsts, stored = _padded(firsts, num_pieces, 0), _padded(stored, num_pieces, 0)
        first_pieces = _padded(first_pieces, room.segments + 1, len(ends))
        inits = _padded(inits, room.segments, 0)
    return {
        "piece_bounds": bounds,
        "piece_chunks": chunks,
        "piece_firsts": firsts,
        "piece_rows": stored,
        "segment_pieces": first_pieces,
        "piece_init_rows": inits,
    }


def piece_indices(arrays: Mapping[str, Tensor]) -> PieceIndices:
    """Give the device's copies of `piece_arrays` their names."""
    return PieceIndices(
        bounds=arrays["piece_bounds"],
        chunks=arrays["piece_chunks"],
        firsts=arrays["piece_firsts"],
        rows=arrays["piece_rows"],
        segments=arrays["segment_pieces"],
        init_rows=arrays["piece_init_rows"],
    )


def _padded(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    return np.pad(array, (0, size - len(array)), constant_values=fill)
