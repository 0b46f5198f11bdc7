"""Prefill padded to rooms: the same as without padding, whatever padding and null memory hold."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from gapless.core.plan import PageCopy
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.runner import layout
from gapless.runner.layout import PrefillRoom
from gapless.runner.prefill import GPU_MODES, GPU_MODES_OF_RANKS, _rooms
from tests.runner.rig import (
    NAN,
    NUM_ROWS,
    PAGE_SIZE,
    SPARE_PAGE,
    Rig,
    assert_same,
    own_pages,
    sequence,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from gapless.core.plan import PrefillSegment
    from gapless.runner.prefill import PrefillRunner
    from tests.runner.rig import Running

TOKENS = [3 + 7 * i % 61 for i in range(30)]
OTHER = [5 + 11 * i % 53 for i in range(30)]
BUCKETS = (4, 24, 64)
DRAFTERS = {
    "none": {"speculative_algorithm": "none"},
    "ngram": {"speculative_algorithm": "ngram", "speculative_num_steps": 2},
    "mtp": {"speculative_num_steps": 2},
}


def padded_rig(checkpoint: Path | None, **options: Any) -> Rig:
    """A rig whose padded tokens are NaN, and which refuses to run without padding."""
    rig = Rig(checkpoint, prefill_buckets=BUCKETS, **options)
    model = rig.device.model
    forward, embed = model.forward, model.embed

    def poisoned(token_ids: Tensor, memory: Any, batch: Any) -> Tensor:
        def with_nan(ids: Tensor) -> Tensor:
            return embed(ids).masked_fill(~batch.live[:, None], NAN)

        model.embed = with_nan  # type: ignore[method-assign]
        hidden: Tensor = forward(token_ids, memory, batch)
        model.embed = embed  # type: ignore[method-assign]
        return hidden

    model.forward = poisoned  # type: ignore[method-assign]
    refuse(rig.runner._prefill)
    return rig


def refuse(prefill: PrefillRunner) -> None:
    """Make running without padding an error."""

    def exactly(segments: object) -> Any:
        raise AssertionError(f"not padded: {segments}")

    prefill._run_exactly = exactly  # type: ignore[method-assign]


def pair(checkpoint: Path | None, **options: Any) -> tuple[Rig, Rig]:
    exact, padded = Rig(checkpoint, **options), padded_rig(checkpoint, **options)
    for rig in (exact, padded):
        rig.poison(rows=set(), slots=set(), pages=set())
    return exact, padded


def run_both(rigs: tuple[Rig, Rig], segments: Sequence[PrefillSegment], **parts: Any) -> None:
    """Run a step on both, and compare all that a prefill leaves."""
    exact, padded = rigs
    wanted, found = exact.run(prefill=segments, **parts), padded.run(prefill=segments, **parts)
    assert found.prefill_tokens.tolist() == wanted.prefill_tokens.tolist()
    assert found.decode_tokens.tolist() == wanted.decode_tokens.tolist()
    if not parts:
        expected = exact.logits()
        assert_same({"": padded.logits()[: len(expected)]}, {"": expected})
    for segment in segments:
        decoded = {row.slot for row in parts.get("decode", ())}
        if segment.slot not in decoded:
            found_in, wanted_in = (r.prefilled(segment.slot, segment.end) for r in rigs[::-1])
            if not segment.is_last:
                # the window is set by what samples
                del found_in["window"], wanted_in["window"]
            assert_same(found_in, wanted_in)
        for snapshot in segment.snapshots:
            assert_same(
                padded.snapshot(snapshot.row, snapshot.position),
                exact.snapshot(snapshot.row, snapshot.position),
            )


def resumed_pair() -> tuple[Running, Running, list[PageCopy]]:
    """Slots 1 and 2 share positions of slot 0: ten, and two."""
    pages = own_pages(0)[: 10 // PAGE_SIZE]
    long = sequence(TOKENS[:10] + OTHER[10:20], 1, pages + own_pages(1)[len(pages) :])
    short = sequence(TOKENS[:2] + OTHER[2:6], 2, (SPARE_PAGE, *own_pages(2)[1:]))
    copies = [PageCopy(own_pages(0)[2], own_pages(1)[2]), PageCopy(own_pages(0)[0], SPARE_PAGE)]
    return long, short, copies


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_padded_equals_exact(drafter: str, tiny_model: Callable[[str], Path]) -> None:
    checkpoint = None if drafter == "mtp" else tiny_model("qwen3_5_moe")
    rigs = pair(checkpoint, **DRAFTERS[drafter])
    donor = sequence(TOKENS[:27], 0)
    run_both(rigs, [donor.segment(0, 27, snapshots={2: 9, 10: 10, 27: 11})])
    long, short, copies = resumed_pair()
    for rig in rigs:
        rig.run(copies=copies)
    segments = [
        long.segment(10, 20, resumed_row=10, snapshots={11: 7, 14: 3}),
        short.segment(2, 6, resumed_row=9, snapshots={3: 4}),
    ]
    run_both(rigs, segments)
    run_both(rigs, [sequence(OTHER[:24], 0).segment(0, 13, snapshots={3: 5})], decode=[long, short])
    run_both(rigs, [sequence(OTHER[:24], 0).segment(13, 24, is_first=False)], decode=[long])
    for _ in range(3):
        wanted, found = (rig.run(decode=[long, short]) for rig in rigs)
        assert found.decode_tokens.tolist() == wanted.decode_tokens.tolist()


def test_ngram_reads_a_padded_prompt(tiny_checkpoint: Path) -> None:
    rigs = pair(tiny_checkpoint, **DRAFTERS["ngram"])
    running = sequence([7, 8, 9, 7, 8, 9, 7, 8], 2)
    run_both(rigs, [running.segment(0, 5)])
    run_both(rigs, [running.segment(5, 8, is_first=False)])
    windows = [rig.device.table.window_tokens[2].tolist() for rig in rigs]
    assert windows[0] == windows[1]


@pytest.mark.parametrize("size", [1, 3, 4, 5, 24, 27])
def test_every_fill_of_a_room(size: int, tiny_checkpoint: Path) -> None:
    """A token alone, rooms that are full and rooms that lack one token."""
    rigs = pair(tiny_checkpoint)
    running = sequence(TOKENS[:27], 1)
    for start in range(0, 27, size):
        end = min(27, start + size)
        run_both(rigs, [running.segment(start, end, is_first=start == 0)])


def test_null_slot_and_zero_entries_stay(tiny_checkpoint: Path) -> None:
    rig = padded_rig(tiny_checkpoint)
    running = sequence(TOKENS[:9], 1)
    rig.run(prefill=[running.segment(0, 9, snapshots={4: 8})])
    geometry, columns = rig.device.geometry, rig.device.table.columns
    null = geometry.null_slot
    assert columns.seq_lens[null] == columns.checkpoint_len[null] == 0
    assert columns.done[null]
    assert (columns.page_table[null] == geometry.null_page).all()
    for memory in rig.device.pools.linear:
        assert (memory.conv_ring[:, geometry.conv_zero] == 0).all()
        assert (memory.replay.checkpoint[:, geometry.zero_row] == 0).all()


@pytest.mark.parametrize("planted", ["kv_write", "conv_write", "snapshot_rows"])
def test_planted_padding_that_is_not_null_is_found(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding that names real memory must show: of a slot, or of a row."""
    honest = layout._padded
    row = NUM_ROWS - 1

    def wrong(arrays: dict[str, Any], room: PrefillRoom, geometry: Any) -> dict[str, Any]:
        found = honest(arrays, room, geometry)
        target = {"kv_write": own_pages(0)[0] * PAGE_SIZE, "conv_write": 0}
        spare = found[planted].shape[0] - arrays[planted].shape[0]
        assert spare, "something is padded"
        found[planted][-spare:] = target.get(planted, row)
        return found

    _, padded = pair(None, **DRAFTERS["mtp"])
    padded.run(prefill=[sequence(TOKENS[:9], 0).segment(0, 9, snapshots={5: row})])
    monkeypatch.setattr(layout, "_padded", wrong)
    other = [sequence(OTHER[:9], 1).segment(0, 9)]
    before = padded.prefilled(0, 9) | padded.snapshot(row, 5)
    padded.run(prefill=other)
    after = padded.prefilled(0, 9) | padded.snapshot(row, 5)
    with pytest.raises(AssertionError):
        assert_same(after, before)


def test_what_does_not_fit_runs_without_padding(tiny_checkpoint: Path) -> None:
    rig = Rig(tiny_checkpoint, prefill_buckets=(8,))
    runs: list[int] = []
    honest = rig.runner._prefill._run_exactly

    def exactly(segments: tuple[PrefillSegment, ...]) -> Any:
        runs.append(len(segments))
        return honest(segments)

    rig.runner._prefill._run_exactly = exactly  # type: ignore[method-assign]

    def is_exact(running: Running, end: int) -> bool:
        before = len(runs)
        rig.run(prefill=[running.segment(0, end)])
        return len(runs) > before

    short, long = sequence(TOKENS[:8], 0), sequence(TOKENS[:9], 0)
    assert not is_exact(short, 8)
    assert is_exact(long, 9)
    assert not is_exact(long, 8)
    for params in (
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=0.0, prompt_logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
    ):
        assert is_exact(with_params(short, params), 8), params
    assert not is_exact(with_params(short, SamplingParams(temperature=1.0)), 8)


@pytest.mark.parametrize("tp", [1, 2])
def test_of_ranks_a_graph_of_its_own_serves_chunks_without_filters(
    tiny_checkpoint: Path, tp: int
) -> None:
    prefill = Rig(tiny_checkpoint, prefill_buckets=(8, 16)).runner._prefill
    # as on a GPU; without one nothing is captured, but the graphs are there
    prefill._is_on_gpu = True
    prefill._gpu_modes = GPU_MODES if tp == 1 else GPU_MODES_OF_RANKS
    assert not prefill._suits(prefill.rooms[0], ()), "nothing is captured once the engine is ready"
    prefill.capture()
    greedy = sequence(TOKENS[:8], 0)
    drawn = with_params(sequence(TOKENS[:4], 1), SamplingParams(temperature=1.0))
    filtered = with_params(sequence(TOKENS[:4], 2), SamplingParams(temperature=1.0, top_k=3))
    for room in prefill.rooms:
        whole = prefill.graph_for(room, (filtered.segment(0, 4),))
        assert whole is not None
        assert prefill.graph_for(room, (drawn.segment(0, 4), filtered.segment(0, 4))) is whole
        plain = prefill.graph_for(room, (drawn.segment(0, 4), greedy.segment(0, 8)))
        # what is sampled later asks for nothing
        assert prefill.graph_for(room, (filtered.segment(0, 3), greedy.segment(0, 8))) is plain
        assert plain is not None
        assert (plain is whole) == (tp == 1)


def with_params(running: Running, params: SamplingParams) -> Running:
    old = running.request
    request = Request(
        request_id=old.request_id, prompt_ids=old.prompt_ids, seed=0, stop_ids=(),
        params=params, limit_len=old.limit_len,
        wants_prompt_logprobs=params.prompt_logprobs is not None,
    )  # fmt: skip
    return replace(running, request=request)


def test_a_long_segment_alone_has_a_room_of_its_own() -> None:
    device: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    config: Any = SimpleNamespace(prefill_buckets=(64, 2048), max_running_requests=20)
    assert [(r.tokens, r.segments) for r in _rooms(device, config, None)] == [
        (64, 8), (2048, 1), (2048, 20),
    ]  # fmt: skip
    config.max_running_requests = 1
    assert [(r.tokens, r.segments) for r in _rooms(device, config, None)] == [(64, 1), (2048, 1)]


def test_room_counts_tokens_segments_and_snapshots() -> None:
    room = PrefillRoom(tokens=10, segments=2, snapshots=1)
    one, two = sequence(TOKENS, 0), sequence(OTHER, 1)
    assert room.holds([one.segment(0, 10)])
    assert room.holds([one.segment(5, 14, snapshots={9: 3}), two.segment(0, 1)])
    assert not room.holds([one.segment(0, 11)])
    assert not room.holds([one.segment(0, 2), two.segment(0, 2), two.segment(2, 4)])
    assert not room.holds([one.segment(0, 8, snapshots={2: 3, 4: 4})])
