"""Prefill in waves, for kernels that yield a segment's state at its end only.

Every segment is cut into pieces that end where its state is wanted. Wave j holds piece j of each
segment that has one, and starts from the states that wave j - 1 ended with; so without cuts there
is one wave. What can be computed without the states is computed for all pieces at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import Tensor


class WavePlan(NamedTuple):
    """Pieces ordered by (wave, segment), their tokens laid one piece after another."""

    order: list[int]
    """Segments, most pieces first; equal counts keep their order."""
    active: tuple[int, ...]
    """Segments of `order` that have a piece in wave j: always its first so many."""
    tokens: np.ndarray
    """[T] int64: packed token at each place."""
    bounds: np.ndarray
    """[N + 1] int64: first place of each piece, then T."""
    chunks: np.ndarray
    """[C, 2] int64: piece of each chunk, and the chunk's number in it."""
    num_chunks: tuple[int, ...]
    """Chunks of each wave."""

    @property
    def is_packed_order(self) -> bool:
        """Whether tokens lie as they are packed, as those of one segment or one wave do."""
        return bool((self.tokens[1:] > self.tokens[:-1]).all())


def plan_waves(
    lengths: Sequence[int], chunk: int, cuts: Sequence[Sequence[int]] | None = None
) -> WavePlan:
    """Cut segments of the given lengths, packed one after another, into pieces.

    A segment of length 0 is one piece without chunks.

    Args:
        chunk: places of a chunk; a piece's last one may hold fewer tokens.
        cuts: as `plan_chunks` takes them.
    """
    cuts = cuts or [()] * len(lengths)
    borders = [[0, *sorted({*own, length})] for length, own in zip(lengths, cuts, strict=True)]
    counts = np.array([len(own) - 1 for own in borders], np.int64)
    order = np.argsort(-counts, kind="stable")
    active = tuple(int((counts > j).sum()) for j in range(int(counts.max(initial=0))))
    ends = np.cumsum(np.asarray(lengths, np.int64))
    spans = [
        (ends[i] - lengths[i] + borders[i][j], ends[i] - lengths[i] + borders[i][j + 1])
        for j, num_active in enumerate(active)
        for i in order[:num_active]
    ]
    nothing = np.zeros(0, np.int64)
    sizes = np.array([end - begin for begin, end in spans], np.int64)
    piece_chunks = -(-sizes // chunk)
    firsts = np.cumsum(piece_chunks) - piece_chunks
    piece = np.repeat(np.arange(len(spans)), piece_chunks)
    waves = np.cumsum([0, *active])
    return WavePlan(
        order=order.tolist(),
        active=active,
        tokens=np.concatenate([nothing, *(np.arange(*span) for span in spans)]),
        bounds=np.cumsum([0, *sizes], dtype=np.int64),
        chunks=np.stack([piece, np.arange(len(piece)) - firsts[piece]], 1),
        num_chunks=tuple(int(piece_chunks[a:b].sum()) for a, b in pairwise(waves)),
    )


def wave_arrays(
    plan: WavePlan,
    *,
    init_rows: Sequence[int],
    final_rows: Sequence[int],
    cut_rows: Sequence[Sequence[int]],
) -> dict[str, np.ndarray]:
    """Return what `wave_indices` needs on the device, int64; rows are given by segment."""
    num_pieces = np.zeros(len(plan.order), np.int64)
    for num_active in plan.active:
        num_pieces[plan.order[:num_active]] += 1
    rows = [
        final_rows[i] if j == num_pieces[i] - 1 else cut_rows[i][j]
        for j, num_active in enumerate(plan.active)
        for i in plan.order[:num_active]
    ]
    at_end = [i for i, own in enumerate(cut_rows) if len(own) == num_pieces[i]]
    bounds, chunk_starts = _by_wave(plan)
    arrays = {
        "wave_tokens": plan.tokens if len(plan.active) > 1 else (),
        "wave_bounds": bounds,
        "wave_chunk_starts": chunk_starts,
        "piece_bounds": plan.bounds,
        "piece_chunks": plan.chunks,
        "piece_rows": rows,
        "wave_init_rows": [init_rows[i] for i in plan.order],
        "end_rows": [final_rows[i] for i in at_end],
        "end_cut_rows": [cut_rows[i][-1] for i in at_end],
    }
    return {name: np.asarray(values, np.int64) for name, values in arrays.items()}


def _by_wave(plan: WavePlan) -> tuple[np.ndarray, np.ndarray]:
    """Return each wave's bounds and first chunks, as `Wave` has them, in rows of even length.

    A kernel is compiled anew for pointers that are not multiples of 16 bytes; a row always is one.
    """
    width = max(plan.active, default=0) // 2 * 2 + 2
    bounds, chunk_starts = np.zeros((2, len(plan.active), width), np.int64)
    piece_chunks = np.bincount(plan.chunks[:, 0], minlength=len(plan.bounds) - 1)
    for wave, (begin, end) in enumerate(pairwise(np.cumsum([0, *plan.active]))):
        bounds[wave, : end - begin + 1] = plan.bounds[begin : end + 1]
        chunk_starts[wave, 1 : end - begin] = np.cumsum(piece_chunks[begin : end - 1])
    return bounds, chunk_starts


@dataclass(frozen=True)
class Wave:
    """The pieces that run together, P of them with C chunks."""

    places: slice
    """Its tokens' places."""
    tokens: Tensor
    """[n] int64: packed tokens at these; empty where there is but one wave."""
    bounds: Tensor
    """[P + 1] int64: first place of each piece, counted over all waves, then the end."""
    chunks: Tensor
    """[C, 2] int64: piece of each chunk, counted over all waves, and its number in the piece."""
    chunk_starts: Tensor
    """[P] int64: first of `chunks` of each piece."""
    rows: Tensor
    """[P] int64: checkpoint row of each piece's last state."""


@dataclass(frozen=True)
class WaveIndices:
    """A `WavePlan` with its state rows, on the device."""

    waves: tuple[Wave, ...]
    gather: Tensor | None
    """[T] int64: packed token at each place; None where they lie so already."""
    bounds: Tensor
    """[N + 1] int64: first place of each piece, then T."""
    chunks: Tensor
    """[C, 2] int64: those of all waves."""
    init_rows: Tensor
    """[S] int64: checkpoint row that each segment of the first wave starts from."""
    end_rows: Tensor
    """[E] int64: final rows that are wanted twice, since a cut lies at the segment's end."""
    end_cut_rows: Tensor
    """[E] int64: where they are wanted too."""


def wave_indices(arrays: Mapping[str, Tensor], plan: WavePlan) -> WaveIndices:
    """Give the device's copies of `wave_arrays` their names; done once per forward."""
    waves = []
    piece, chunk = 0, 0
    for j, (num_pieces, num_chunks) in enumerate(zip(plan.active, plan.num_chunks, strict=True)):
        places = slice(int(plan.bounds[piece]), int(plan.bounds[piece + num_pieces]))
        waves.append(
            Wave(
                places=places,
                tokens=arrays["wave_tokens"][places],
                bounds=arrays["wave_bounds"][j, : num_pieces + 1],
                chunks=arrays["piece_chunks"][chunk : chunk + num_chunks],
                chunk_starts=arrays["wave_chunk_starts"][j, :num_pieces],
                rows=arrays["piece_rows"][piece : piece + num_pieces],
            )
        )
        piece, chunk = piece + num_pieces, chunk + num_chunks
    return WaveIndices(
        waves=tuple(waves),
        gather=None if plan.is_packed_order else arrays["wave_tokens"],
        bounds=arrays["piece_bounds"],
        chunks=arrays["piece_chunks"],
        init_rows=arrays["wave_init_rows"],
        end_rows=arrays["end_rows"],
        end_cut_rows=arrays["end_cut_rows"],
    )


def run_waves(
    scan: Callable[[Wave, Tensor], tuple[Tensor, Tensor]],
    checkpoint: Tensor,  # [rows, HV, V, K] state dtype
    indices: WaveIndices,
    *,
    acc: torch.dtype,
) -> Tensor:  # [T, HV, V], tokens as they are packed
    """Carry the states through all waves and store them where they are wanted.

    Modified in place: the checkpoint's cut rows and final rows, once all `init_rows` are read.

    Args:
        scan: runs one wave from states `[P, HV, V, K]` of type `acc`, which it leaves alone, and
            returns its outputs `[n, HV, V]` in the order of places, and the states after it.
    """
    states = checkpoint.index_select(0, indices.init_rows).to(acc)
    parts: list[Tensor] = []
    for wave in indices.waves:
        part, states = scan(wave, states[: len(wave.rows)])
        checkpoint.index_copy_(0, wave.rows, states.to(checkpoint.dtype))
        parts.append(part)
    if len(indices.end_rows):
        ends = checkpoint.index_select(0, indices.end_rows)
        checkpoint.index_copy_(0, indices.end_cut_rows, ends)
    if len(parts) == 1:
        return parts[0]
    out = parts[0].new_empty(indices.waves[-1].places.stop, *parts[0].shape[1:])
    for wave, part in zip(indices.waves, parts, strict=True):
        out.index_copy_(0, wave.tokens, part)
    return out
