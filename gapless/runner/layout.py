"""Every index of a prefill chunk, laid out in numpy: what the host knows, no layer finds out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gapless.ops.linear_chunk import ScanRoom, plan_chunks, scan_arrays
from gapless.ops.paged_attention import PackedSegment
from gapless.runner.slot_table import admission_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.plan import PrefillSegment
    from gapless.ops.step_metadata import Geometry

# tokens whose intra-chunk terms are solved together in the linear layers
CHUNK_LEN = 64


@dataclass(frozen=True)
class PrefillRoom:
    """Sizes that a chunk is padded to, so that all chunks that fit have arrays of one shape.

    Padding reads and writes null entries, rows and slots only, and what comes of it reaches nothing
    else.
    """

    tokens: int
    segments: int
    snapshots: int

    def holds(self, segments: Sequence[PrefillSegment]) -> bool:
        """Whether a chunk of these segments fits."""
        return (
            sum(s.end - s.start for s in segments) <= self.tokens
            and len(segments) <= self.segments
            and sum(len(s.snapshots) for s in segments) <= self.snapshots
        )


@dataclass(frozen=True)
class PrefillLayout:
    """One chunk's arrays, and the integers that stay on the host."""

    arrays: dict[str, np.ndarray]
    """Of shapes that the room decides, where there is one."""
    kv_entries: np.ndarray
    """KV entries of positions 0 to `end`, both included, of each segment in a row."""
    admission: dict[str, np.ndarray]
    """For the slot table; shapes follow from the segments."""
    segments: tuple[PackedSegment, ...]
    """Keys are numbers of `kv_entries`."""
    shifted_segments: tuple[PackedSegment, ...]
    active: tuple[int, ...]  # segments still running in each round of the chunked scan
    num_cuts: tuple[int, ...]  # snapshots after each round


def lay_out(
    segments: tuple[PrefillSegment, ...],
    geometry: Geometry,
    num_page_columns: int,
    *,
    with_past: Sequence[PrefillSegment] = (),
    has_rounds: bool = True,
    room: PrefillRoom | None = None,
) -> PrefillLayout:
    """Decide every index of a prefill chunk on the host.

    Args:
        with_past: segments whose requests' earlier tokens are sent along.
        has_rounds: whether the torch definition of the linear layers' scan will read its indices.
        room: that holds the segments, of which there may then be none; without, nothing is padded.
    """
    lengths = [s.end - s.start for s in segments]
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    total = int(bounds[-1]) if room is None else room.tokens
    num_prefixes = len(segments) if room is None else room.segments
    entries = [_entries(s, geometry) for s in segments]
    kv_starts = np.cumsum([0, *(len(own) for own in entries)]).tolist()
    shifted, shifted_lengths = _shifted(segments, bounds, total, entries)
    arrays = {
        **_tokens(segments, lengths, entries),
        **_sampled(segments, bounds, total),
        **_convolution(segments, bounds, total, num_prefixes, geometry),
        **shifted,
        **_past(with_past),
        **_kept(segments, bounds),
    }
    if room is not None:
        arrays = _padded(arrays, room, geometry)
    scan, active, num_cuts = _scan(
        segments, lengths, total, geometry, has_rounds=has_rounds, room=room
    )
    integers = {name: array.astype(np.int64, copy=False) for name, array in arrays.items()}
    live = {} if room is None else _live(room, int(bounds[-1]), sum(shifted_lengths))
    ends = [s.end for s in segments]
    return PrefillLayout(
        arrays=integers | scan | live,
        # a captured chunk knows the address, which an empty array has not
        kv_entries=np.concatenate([*entries, [geometry.null_page * geometry.page_size]]),
        admission=admission_arrays(segments, num_page_columns, geometry.null_page)
        if segments
        else {},
        segments=_bounds(lengths, kv_starts, ends),
        shifted_segments=_bounds(shifted_lengths, [start + 1 for start in kv_starts], ends),
        active=active,
        num_cuts=num_cuts,
    )


def _bounds(
    num_queries: Sequence[int], kv_starts: Sequence[int], num_keys: Sequence[int]
) -> tuple[PackedSegment, ...]:
    """Pack the queries of each segment in a row."""
    q = np.cumsum([0, *num_queries]).tolist()
    return tuple(
        PackedSegment(start, end, kv, kv + keys)
        for start, end, kv, keys in zip(q, q[1:], kv_starts, num_keys, strict=False)
    )


def _joined(parts: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
    """Concatenate integers, also of no part."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _repeated(values: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """Repeat integers, also none."""
    return np.repeat(np.array(values, np.int64), np.array(counts, np.int64))


def _tokens(
    segments: tuple[PrefillSegment, ...],
    lengths: Sequence[int],
    entries: Sequence[np.ndarray],
) -> dict[str, np.ndarray]:
    """What each token is, and where it goes."""
    return {
        "token_ids": _joined([s.request.token_ids[s.start : s.end] for s in segments]),
        "successors": _joined([_successors(s) for s in segments]),
        "positions": _joined([np.arange(s.start, s.end) for s in segments]),
        "slot_of_token": _repeated([s.slot for s in segments], lengths),
        "kv_write": _joined([e[s.start : s.end] for s, e in zip(segments, entries, strict=True)]),
    }


def _successors(segment: PrefillSegment) -> list[int]:
    """The token after each of the segment's; token 0 stands where there is none yet."""
    known = segment.request.token_ids[segment.start + 1 : segment.end + 1]
    return known + [0] * (segment.end - segment.start - len(known))


def _sampled(
    segments: tuple[PrefillSegment, ...], bounds: np.ndarray, total: int
) -> dict[str, np.ndarray]:
    """Segments that sample a token; and of each token where its successor is: sampled ones last."""
    last = bounds[1:][[s.is_last for s in segments]] - 1
    source = np.arange(total)
    source[last] = total + np.arange(len(last))
    return {
        "next_source": source,
        "last_token": last,
        "sampled_slots": np.array([s.slot for s in segments if s.is_last]),
        "sampled_start": np.array([s.end - 1 for s in segments if s.is_last]),
        "sampled_end": np.array([s.end for s in segments if s.is_last]),
    }


def _scan(
    segments: tuple[PrefillSegment, ...],
    lengths: Sequence[int],
    total: int,
    geometry: Geometry,
    *,
    has_rounds: bool,
    room: PrefillRoom | None,
) -> tuple[dict[str, np.ndarray], tuple[int, ...], tuple[int, ...]]:
    """How states go through the linear layers, for the kernels and for the torch definition."""
    cuts = [[n.position - s.start for n in s.snapshots] for s in segments]
    init_rows = [_init_row(s, geometry) for s in segments]
    final_rows = [s.state_row for s in segments]
    cut_rows = [[n.row for n in s.snapshots] for s in segments]
    scan_room = None
    if room is not None:
        scan_room = ScanRoom(room.tokens, room.segments, room.snapshots)
    found = scan_arrays(
        lengths, CHUNK_LEN, init_rows=init_rows, final_rows=final_rows, cuts=cuts,
        cut_rows=cut_rows,
        room=scan_room,
    )  # fmt: skip
    if not has_rounds:
        written = {*final_rows, *(row for own in cut_rows for row in own)}
        resumed = {s.resumed_row for s in segments}
        assert not resumed & written, "the cache locks rows that a step reads: kernels mix them"
        return found, (), ()
    plan = plan_chunks(lengths, CHUNK_LEN, cuts, num_tokens=total)
    rows = [cut_rows[plan.order[cut.place]][cut.number] for cut in plan.cuts]
    rounds = {
        "gather": plan.gather,
        "scatter": plan.scatter,
        "init_rows": np.array([init_rows[i] for i in plan.order]),
        "final_rows": np.array([final_rows[i] for i in plan.order]),
        "cut_places": np.array([cut.place for cut in plan.cuts]),
        "cut_rows": np.array(rows),
    }
    rounds = {name: array.astype(np.int64, copy=False) for name, array in rounds.items()}
    return found | rounds, plan.active, plan.num_cuts


def _live(room: PrefillRoom, num_tokens: int, num_shifted: int) -> dict[str, np.ndarray]:
    """Which tokens are of a segment."""
    return {
        "live": np.arange(room.tokens) < num_tokens,
        "shifted_live": np.arange(room.tokens + room.segments) < num_shifted,
    }


def _padded(
    arrays: dict[str, np.ndarray], room: PrefillRoom, geometry: Geometry
) -> dict[str, np.ndarray]:
    """Fill arrays up along their last axis with what names null memory, or is not looked at."""
    tokens, segments, snapshots = room.tokens, room.segments, room.snapshots
    shifted = tokens + segments
    before = geometry.conv_width - 1
    null_entry = geometry.null_page * geometry.page_size
    # the zero entry that follows the prefixes
    zero_input = tokens + segments * before
    num_kept = segments * geometry.conv_ring_len + snapshots * before
    first_end = int(arrays["ends"][0]) if len(arrays["ends"]) else 0
    sizes = {
        "token_ids": (tokens, 0), "successors": (tokens, 0), "positions": (tokens, 0),
        "slot_of_token": (tokens, geometry.null_slot), "kv_write": (tokens, null_entry),
        "next_source": (tokens, 0), "last_token": (segments, 0),
        "sampled_slots": (segments, geometry.null_slot),
        "sampled_start": (segments, 0), "sampled_end": (segments, 0),
        "conv_prefix": (segments * before + 1, geometry.conv_zero),
        "conv_taps": (tokens, zero_input), "conv_keep": (num_kept, zero_input),
        "conv_write": (num_kept, geometry.null_slot * geometry.conv_ring_len),
        "shifted_order": (shifted, 0), "shifted_positions": (shifted, 0),
        "shifted_write": (shifted, null_entry), "shifted_last": (segments, 0),
        "resumed_rows": (segments, geometry.null_row), "resumed_ids": (segments, 0),
        "past_slots": (0, 0), "past_positions": (0, 0), "past_ids": (0, 0),
        # written twice is as good as once
        "ends": (segments, first_end),
        "snapshot_tokens": (snapshots, 0), "snapshot_rows": (snapshots, geometry.null_row),
    }  # fmt: skip
    return {name: _filled(array, *sizes[name]) for name, array in arrays.items()}


def _filled(array: np.ndarray, size: int, fill: int) -> np.ndarray:
    used = array.shape[-1]
    assert used <= size, f"{used} in room for {size}"
    found = np.full((*array.shape[:-1], size), fill, np.int64)
    found[..., :used] = array
    return found


def _entries(segment: PrefillSegment, geometry: Geometry) -> np.ndarray:
    """KV entries of positions 0 to `end`, both included, of a segment's request."""
    # without drafts no page needs to exist for the token that is sampled
    pages = np.array([*segment.pages, geometry.null_page], np.int64)
    entries = pages[:, None] * geometry.page_size + np.arange(geometry.page_size)
    return entries.reshape(-1)[: segment.end + 1]


def _init_row(segment: PrefillSegment, geometry: Geometry) -> int:
    if segment.resumed_row is not None:
        return segment.resumed_row
    return segment.state_row if segment.start else geometry.zero_row


def _shifted(
    segments: tuple[PrefillSegment, ...],
    bounds: np.ndarray,
    total: int,
    entries: Sequence[np.ndarray],
) -> tuple[dict[str, np.ndarray], list[int]]:
    """The chunk one position later, as `ShiftedChunk` has it; a drafter's KV begins at index 1."""
    resumed = [s for s in segments if s.resumed_row is not None]
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
        "shifted_order": _joined(order),
        "shifted_positions": _joined(
            [np.arange(first, s.end + 1) for s, first in zip(segments, firsts, strict=True)]
        ),
        "shifted_write": _joined([own[first:] for own, first in zip(entries, firsts, strict=True)]),
        "shifted_last": np.cumsum(lengths, dtype=np.int64)[[s.is_last for s in segments]] - 1,
        "resumed_rows": np.array([s.resumed_row for s in resumed]),
        "resumed_ids": np.array([s.request.token_ids[s.start] for s in resumed]),
    }, lengths


def _past(segments: Sequence[PrefillSegment]) -> dict[str, np.ndarray]:
    starts = [s.start for s in segments]
    return {
        "past_slots": _repeated([s.slot for s in segments], starts),
        "past_positions": _joined([np.arange(start) for start in starts]),
        "past_ids": _joined([s.request.token_ids[: s.start] for s in segments]),
    }


def _kept(segments: tuple[PrefillSegment, ...], bounds: np.ndarray) -> dict[str, np.ndarray]:
    """Tokens whose hidden states outlive the chunk, as `KeptTokens` has them."""
    snapshots = [
        (first + snapshot.position - segment.start - 1, snapshot.row)
        for first, segment in zip(bounds.tolist(), segments, strict=False)
        for snapshot in segment.snapshots
    ]
    return {
        "ends": bounds[1:] - 1,
        "snapshot_tokens": np.array([token for token, _ in snapshots]),
        "snapshot_rows": np.array([row for _, row in snapshots]),
    }


def _convolution(
    segments: tuple[PrefillSegment, ...],
    bounds: np.ndarray,
    total: int,
    num_prefixes: int,
    geometry: Geometry,
) -> dict[str, np.ndarray]:
    """Indices of the convolutions, which read the chunk's inputs and, after those, the prefixes."""
    keep, write = _conv_kept(segments, bounds, total, geometry)
    return {
        "conv_prefix": _conv_prefix(segments, num_prefixes, geometry),
        "conv_taps": _conv_taps(segments, bounds, total, geometry),
        "conv_keep": keep,
        "conv_write": write,
    }


def _conv_prefix(
    segments: tuple[PrefillSegment, ...], num_prefixes: int, geometry: Geometry
) -> np.ndarray:
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
    num_zeros = (num_prefixes - len(segments)) * len(distance) + 1
    return _joined([*parts, [geometry.conv_zero] * num_zeros])


def _conv_taps(
    segments: tuple[PrefillSegment, ...], bounds: np.ndarray, total: int, geometry: Geometry
) -> np.ndarray:
    """Source row of each tap of each token: the chunk's inputs, or the prefix that follows them."""
    before = geometry.conv_width - 1
    distance = np.arange(before, -1, -1)[:, None]
    token = np.arange(bounds[-1])
    first = np.repeat(bounds[:-1], np.diff(bounds))
    segment = np.repeat(np.arange(len(segments)), np.diff(bounds))
    tapped = token - distance
    # the prefix holds `before` rows per segment, the last one right before its start
    in_prefix = total + segment * before + before - (first - tapped)
    return np.where(tapped >= first, tapped, in_prefix)


def _conv_kept(
    segments: tuple[PrefillSegment, ...], bounds: np.ndarray, total: int, geometry: Geometry
) -> tuple[np.ndarray, np.ndarray]:
    """Source rows, as in `_conv_taps`, that outlive the chunk, and the entries that they go to.

    A chunk may be shorter than the taps reach, so a resumed segment's ring takes over what it
    needs of the snapshot's tail, and a tail may begin before the segment does.
    """
    before, ring_len = geometry.conv_width - 1, geometry.conv_ring_len
    starts = np.array([s.start for s in segments], np.int64)
    firsts = starts - before * np.array([s.resumed_row is not None for s in segments], np.int64)
    slots = np.array([s.slot for s in segments], np.int64)
    every = np.arange(len(segments))
    snapshots = [(i, n) for i, segment in enumerate(segments) for n in segment.snapshots]
    owner = np.array([i for i, _ in snapshots], np.int64)
    tails = np.array([geometry.conv_tail(n.row).start for _, n in snapshots], np.int64)

    def source(segment: np.ndarray, position: np.ndarray) -> np.ndarray:
        after_start = position - starts[segment, None]
        prefix_end = total + (segment[:, None] + 1) * before
        return np.where(after_start >= 0, bounds[segment, None], prefix_end) + after_start

    # all of them at once: a snapshot costs no call of its own
    in_ring = np.array([s.end for s in segments], np.int64)[:, None] + np.arange(-ring_len, 0)
    in_tail = np.array([n.position for _, n in snapshots], np.int64)[:, None]
    in_tail = in_tail + np.arange(-before, 0)
    of_ring, of_tail = in_ring >= np.maximum(firsts, 0)[:, None], in_tail >= 0
    ring_entries = slots[:, None] * ring_len + in_ring % ring_len
    tail_entries = tails[:, None] + np.arange(before)
    return (
        _joined([source(every, in_ring)[of_ring], source(owner, in_tail)[of_tail]]),
        _joined([ring_entries[of_ring], tail_entries[of_tail]]),
    )
