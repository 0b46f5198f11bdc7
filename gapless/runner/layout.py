"""Every index of a prefill chunk, laid out in numpy: what the host knows, no layer finds out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gapless.ops.linear_chunk import WavePlan, plan_chunks, plan_waves, wave_arrays
from gapless.runner.slot_table import admission_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.plan import PrefillSegment
    from gapless.ops.step_metadata import Geometry

# tokens whose intra-chunk terms are solved together in the linear layers
CHUNK_LEN = 64

Segments = tuple[tuple[int, int, int, int], ...]
"""`(q_start, q_end, kv_start, kv_end)` of each segment."""


@dataclass(frozen=True)
class PrefillLayout:
    """One chunk's arrays, and the integers that stay on the host."""

    arrays: dict[str, np.ndarray]
    segments: Segments
    shifted_segments: Segments
    active: tuple[int, ...]  # segments still running in each round of the chunked scan
    num_cuts: tuple[int, ...]  # snapshots after each round
    waves: WavePlan


def lay_out(
    segments: tuple[PrefillSegment, ...],
    geometry: Geometry,
    num_page_columns: int,
    with_past: Sequence[PrefillSegment] = (),
) -> PrefillLayout:
    """Decide every index of a prefill chunk on the host.

    Args:
        with_past: segments whose requests' earlier tokens are sent along.
    """
    lengths = [s.end - s.start for s in segments]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
    starts = np.repeat([s.start for s in segments], lengths)
    entries = [_entries(s, geometry) for s in segments]
    cuts = [[n.position - s.start for n in s.snapshots] for s in segments]
    plan = plan_chunks(lengths, CHUNK_LEN, cuts)
    waves = plan_waves(lengths, CHUNK_LEN, cuts)
    ordered = [segments[i] for i in plan.order]
    conv_keep, conv_write = _conv_kept(segments, bounds, geometry)
    shifted, shifted_segments = _shifted(segments, bounds, entries)
    arrays = {
        "token_ids": np.concatenate([s.request.token_ids[s.start : s.end] for s in segments]),
        "successors": np.concatenate([_successors(s) for s in segments]),
        "positions": positions,
        "slot_of_token": np.repeat([s.slot for s in segments], lengths),
        "kv_write": np.concatenate(
            [e[s.start : s.end] for s, e in zip(segments, entries, strict=True)]
        ),
        "kv_read": np.concatenate([e[: s.end] for s, e in zip(segments, entries, strict=True)]),
        "gather": plan.gather,
        "scatter": plan.scatter,
        "init_rows": np.array([_init_row(s, geometry) for s in ordered]),
        "final_rows": np.array([s.state_row for s in ordered]),
        "cut_places": np.array([cut.place for cut in plan.cuts]),
        "cut_rows": np.array([ordered[c.place].snapshots[c.number].row for c in plan.cuts]),
        **wave_arrays(
            waves,
            init_rows=[_init_row(s, geometry) for s in segments],
            final_rows=[s.state_row for s in segments],
            cut_rows=[[n.row for n in s.snapshots] for s in segments],
        ),
        "conv_prefix": _conv_prefix(segments, geometry),
        "conv_taps": _conv_taps(positions, starts, lengths, geometry),
        "conv_keep": conv_keep,
        "conv_write": conv_write,
        "last_token": bounds[1:][[s.is_last for s in segments]] - 1,
        "sampled_slots": np.array([s.slot for s in segments if s.is_last]),
        "sampled_end": np.array([s.end for s in segments if s.is_last]),
        **shifted,
        **_past(with_past),
        **_kept(segments, bounds),
    }
    integers = {name: array.astype(np.int64, copy=False) for name, array in arrays.items()}
    return PrefillLayout(
        arrays=integers | admission_arrays(segments, num_page_columns, geometry.null_page),
        segments=_bounds(lengths, [s.end for s in segments]),
        shifted_segments=shifted_segments,
        active=plan.active,
        num_cuts=plan.num_cuts,
        waves=waves,
    )


def _bounds(num_queries: Sequence[int], num_keys: Sequence[int]) -> Segments:
    """Pack queries and keys of each segment in a row."""
    q, kv = (np.cumsum([0, *counts]).tolist() for counts in (num_queries, num_keys))
    return tuple(zip(q, q[1:], kv, kv[1:], strict=False))


def _successors(segment: PrefillSegment) -> list[int]:
    """The token after each of the segment's; token 0 stands where there is none yet."""
    known = segment.request.token_ids[segment.start + 1 : segment.end + 1]
    return known + [0] * (segment.end - segment.start - len(known))


def _entries(segment: PrefillSegment, geometry: Geometry) -> np.ndarray:
    """KV entries of positions 0 to `end`, both included, of a segment's request."""
    position = np.arange(segment.end + 1)
    # without drafts no page needs to exist for the token that is sampled
    pages = np.array([*segment.pages, geometry.null_page], np.int64)
    return (
        pages[position // geometry.page_size] * geometry.page_size + position % geometry.page_size
    )


def _init_row(segment: PrefillSegment, geometry: Geometry) -> int:
    if segment.resumed_row is not None:
        return segment.resumed_row
    return segment.state_row if segment.start else geometry.zero_row


def _shifted(
    segments: tuple[PrefillSegment, ...], bounds: np.ndarray, entries: list[np.ndarray]
) -> tuple[dict[str, np.ndarray], Segments]:
    """The chunk one position later, as `ShiftedChunk` has it; a drafter's KV begins at index 1."""
    resumed = [s for s in segments if s.resumed_row is not None]
    total = int(bounds[-1])
    extra = iter(range(total, total + len(resumed)))
    order: list[np.ndarray] = []
    firsts: list[int] = []
    for i, segment in enumerate(segments):
        own = np.arange(bounds[i], bounds[i + 1])
        is_resumed = segment.resumed_row is not None
        order.append(np.insert(own, 0, next(extra)) if is_resumed else own)
        firsts.append(segment.start if is_resumed else segment.start + 1)
    lengths = [len(own) for own in order]
    return {
        "shifted_order": np.concatenate(order),
        "shifted_positions": np.concatenate(
            [np.arange(first, s.end + 1) for s, first in zip(segments, firsts, strict=True)]
        ),
        "shifted_write": np.concatenate(
            [own[first:] for own, first in zip(entries, firsts, strict=True)]
        ),
        "shifted_read": np.concatenate([own[1:] for own in entries]),
        "shifted_last": np.cumsum(lengths)[[s.is_last for s in segments]] - 1,
        "resumed_rows": np.array([s.resumed_row for s in resumed]),
        "resumed_ids": np.array([s.request.token_ids[s.start] for s in resumed]),
    }, _bounds(lengths, [s.end for s in segments])


def _past(segments: Sequence[PrefillSegment]) -> dict[str, np.ndarray]:
    nothing = np.zeros(0, np.int64)
    return {
        "past_slots": np.repeat([s.slot for s in segments], [s.start for s in segments])
        if segments
        else nothing,
        "past_positions": np.concatenate([nothing, *(np.arange(s.start) for s in segments)]),
        "past_ids": np.concatenate([nothing, *(s.request.token_ids[: s.start] for s in segments)]),
    }


def _kept(segments: tuple[PrefillSegment, ...], bounds: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens whose hidden states outlive the chunk, as `KeptTokens` has them."""
    snapshots = [
        (bounds[i] + snapshot.position - segment.start - 1, snapshot.row)
        for i, segment in enumerate(segments)
        for snapshot in segment.snapshots
    ]
    return {
        "ends": bounds[1:] - 1,
        "snapshot_tokens": np.array([token for token, _ in snapshots]),
        "snapshot_rows": np.array([row for _, row in snapshots]),
    }


def _conv_prefix(segments: tuple[PrefillSegment, ...], geometry: Geometry) -> np.ndarray:
    """Entries of the taps before each segment's start, then the zero entry."""
    distance = np.arange(geometry.conv_width - 1, 0, -1)
    parts = []
    for segment in segments:
        position = segment.start - distance
        if segment.resumed_row is None:
            entry = segment.slot * geometry.conv_ring_len + position % geometry.conv_ring_len
        else:
            entry = np.array(geometry.conv_tail(segment.resumed_row))
        parts.append(np.where(position < 0, geometry.conv_zero, entry))
    return np.concatenate([*parts, [geometry.conv_zero]])


def _conv_taps(
    positions: np.ndarray, starts: np.ndarray, lengths: list[int], geometry: Geometry
) -> np.ndarray:
    """Source row of each tap of each token: the chunk's inputs, or the prefix that follows them."""
    total, before = len(positions), geometry.conv_width - 1
    distance = np.arange(before, -1, -1)[:, None]
    tapped = positions - distance
    segment = np.repeat(np.arange(len(lengths)), lengths)
    # the prefix holds `before` rows per segment, the last one right before its start
    in_prefix = total + segment * before + before - (starts - tapped)
    return np.where(tapped >= starts, np.arange(total) - distance, in_prefix)


def _conv_kept(
    segments: tuple[PrefillSegment, ...], bounds: np.ndarray, geometry: Geometry
) -> tuple[np.ndarray, np.ndarray]:
    """Source rows, as in `_conv_taps`, that outlive the chunk, and the entries that they go to.

    A chunk may be shorter than the taps reach, so a resumed segment's ring takes over what it
    needs of the snapshot's tail, and a tail may begin before the segment does.
    """
    before, ring_len = geometry.conv_width - 1, geometry.conv_ring_len
    keep: list[np.ndarray] = []
    write: list[np.ndarray] = []
    for i, segment in enumerate(segments):
        prefix_end = bounds[-1] + (i + 1) * before
        first = segment.start if segment.resumed_row is None else segment.start - before
        position = np.arange(max(0, first, segment.end - ring_len), segment.end)
        kept = [(position, segment.slot * ring_len + position % ring_len)]
        for snapshot in segment.snapshots:
            position = np.arange(max(0, snapshot.position - before), snapshot.position)
            tail = geometry.conv_tail(snapshot.row)
            kept.append((position, tail.stop + position - snapshot.position))
        for position, entry in kept:
            after_start = position - segment.start
            in_chunk = after_start >= 0
            keep.append(np.where(in_chunk, bounds[i], prefix_end) + after_start)
            write.append(entry)
    return np.concatenate(keep), np.concatenate(write)
