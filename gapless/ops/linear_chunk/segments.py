"""Packed segments for kernels: their chunks, and where on the way their states are stored.

Chunks lie on each segment's own grid wherever states are wanted, so a segment's outputs and final
state do not depend on that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class ScanRoom(NamedTuple):
    """Sizes to pad to, so that the arrays of any segments that fit have the same shapes."""

    tokens: int
    segments: int
    cuts: int


@dataclass(frozen=True)
class ScanIndices:
    """Segments on the device, N of them with padding, S without; all int64.

    A segment's *stops* are its cuts, then its end. Padding: tokens after the last segment are a
    segment without chunks, later ones are empty, and none of them has stops; a padded chunk is one
    of an empty segment.
    """

    bounds: Tensor
    """[N + 1]: first token of each segment, then the end."""
    chunks: Tensor
    """[C, 2]: segment of each chunk, and the chunk's number in it."""
    firsts: Tensor
    """[S]: first chunk of each segment."""
    init_rows: Tensor
    """[S]: checkpoint row that each segment starts from."""
    first_stops: Tensor
    """[S + 1]: first stop of each segment, then their number."""
    stop_tokens: Tensor
    """[P]: tokens of the segment before each stop, ascending in a segment."""
    stop_rows: Tensor
    """[P]: checkpoint row of the state there."""


def scan_arrays(
    lengths: Sequence[int],
    chunk: int,
    *,
    init_rows: Sequence[int],
    final_rows: Sequence[int],
    cuts: Sequence[Sequence[int]] | None = None,
    cut_rows: Sequence[Sequence[int]] | None = None,
    room: ScanRoom | None = None,
) -> dict[str, np.ndarray]:
    """Lay out segments of the given lengths, packed one after another; return int64 arrays.

    Args:
        chunk: most tokens of a chunk; a segment's last one may hold fewer.
        cuts: per segment, numbers of its tokens, ascending, 1 to its length, after which a state
            is wanted.
        cut_rows: their rows.
    """
    cuts, cut_rows = cuts or [()] * len(lengths), cut_rows or [()] * len(lengths)
    sizes = np.array(lengths, np.int64)
    num_chunks = -(-sizes // chunk)
    firsts = np.cumsum(num_chunks) - num_chunks
    owner = np.repeat(np.arange(len(sizes)), num_chunks)
    stops = [[*own, length] for own, length in zip(cuts, lengths, strict=True)]
    rows = [[*own, last] for own, last in zip(cut_rows, final_rows, strict=True)]
    found = {
        "scan_bounds": np.cumsum([0, *lengths], dtype=np.int64),
        "scan_chunks": np.stack([owner, np.arange(len(owner)) - firsts[owner]], 1),
        "scan_firsts": firsts,
        "scan_init_rows": np.array(init_rows, np.int64),
        "first_stops": np.cumsum([0, *(len(own) for own in stops)], dtype=np.int64),
        "stop_tokens": np.array([token for own in stops for token in own], np.int64),
        "stop_rows": np.array([row for own in rows for row in own], np.int64),
    }
    return found if room is None else _padded(found, chunk, room)


def _padded(arrays: dict[str, np.ndarray], chunk: int, room: ScanRoom) -> dict[str, np.ndarray]:
    # the tokens left over, and an empty segment at least for padded chunks
    num_bounds = room.segments + 3
    num_stops = room.segments + room.cuts
    sizes = {
        "scan_bounds": (num_bounds, room.tokens),
        "scan_firsts": (room.segments, 0),
        "scan_init_rows": (room.segments, 0),
        "first_stops": (room.segments + 1, len(arrays["stop_tokens"])),
        "stop_tokens": (num_stops, 0),
        "stop_rows": (num_stops, 0),
    }
    padded = {name: _filled(arrays[name], *size) for name, size in sizes.items()}
    chunks = arrays["scan_chunks"]
    filler = np.array([[num_bounds - 2, 0]], np.int64)
    spare = room.tokens // chunk + room.segments - len(chunks)
    return padded | {"scan_chunks": np.concatenate([chunks, np.tile(filler, (spare, 1))])}


def _filled(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    assert len(array) <= size, f"{len(array)} in room for {size}"
    found = np.full(size, fill, np.int64)
    found[: len(array)] = array
    return found


def scan_indices(arrays: Mapping[str, Tensor]) -> ScanIndices:
    """Give the device's copies of `scan_arrays` their names."""
    return ScanIndices(
        bounds=arrays["scan_bounds"],
        chunks=arrays["scan_chunks"],
        firsts=arrays["scan_firsts"],
        init_rows=arrays["scan_init_rows"],
        first_stops=arrays["first_stops"],
        stop_tokens=arrays["stop_tokens"],
        stop_rows=arrays["stop_rows"],
    )
