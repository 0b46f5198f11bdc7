"""A request that resumes from a snapshot goes on as if it had run its whole prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from gapless.core.plan import PageCopy, SlotSave
from tests.models import tiny
from tests.runner.rig import (
    PAGE_SIZE,
    SPARE_PAGE,
    Rig,
    Running,
    assert_same,
    own_pages,
    sequence,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gapless.core.plan import PrefillSegment
    from gapless.runner.runner import StepHandle

TOKENS = [int(t) for t in torch.randint(2, 256, (27,), generator=torch.Generator().manual_seed(3))]
OTHER = [t % 254 + 2 for t in TOKENS]
SNAPSHOT = 9


@pytest.fixture(scope="module")
def with_mtp(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with random MTP weights."""
    return tiny.hub_style(tiny_checkpoint, tmp_path_factory.mktemp("mtp") / "model")


@pytest.fixture(scope="module", params=["none", "mtp", "ngram"])
def make_rig(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, with_mtp: Path
) -> Callable[..., Rig]:
    checkpoint = with_mtp if request.param == "mtp" else tiny_checkpoint
    return lambda **options: Rig(checkpoint, speculative_algorithm=request.param, **options)


def _chunks(running: Running, start: int, chunk: int, resumed_row: int) -> list[PrefillSegment]:
    """Segments from `start` to the end of the tokens."""
    total = len(running.request.token_ids)
    first = running.segment(start, min(total, start + chunk), resumed_row=resumed_row)
    later = [
        running.segment(at, min(total, at + chunk), is_first=False)
        for at in range(start + chunk, total, chunk)
    ]
    return [first, *later]


def _decoded(rig: Rig, running: Running, steps: int) -> list[list[int]]:
    """What some decode steps emit, how many drafts they had, and the windows that follow."""
    found = []
    for _ in range(steps):
        result = rig.run(decode=[running])
        length = int(result.decode_lens[0])
        window = rig.device.table.window_tokens[running.slot].tolist()
        found.append([*result.decode_tokens[0, :length], int(result.decode_proposed[0]), *window])
    return found


def _resumed(position: int, tokens: list[int]) -> tuple[Running, list[PageCopy], set[int]]:
    """Slot 1 shares what slot 0's pages hold of `[0, position)`; the last one is copied."""
    shared = own_pages(0)[: position // PAGE_SIZE]
    pages = shared + own_pages(1)[len(shared) :]
    copies = []
    if position % PAGE_SIZE:
        copies = [PageCopy(own_pages(0)[len(shared)], pages[len(shared)])]
    return sequence(tokens, 1, pages), copies, {*pages, *own_pages(0)}


@pytest.mark.parametrize(
    ("chunk", "positions"), [(1, (3, 9, 18)), (3, (1, 4, 8, 22)), (64, (2, 5, 7, 12))]
)
def test_resumed_equals_cold(
    make_rig: Callable[..., Rig], chunk: int, positions: tuple[int, ...]
) -> None:
    cold, rig = make_rig(), make_rig()
    for position in positions:
        tokens = TOKENS[:position] + OTHER[position:23]
        for each in (cold, rig):
            each.poison(rows=set(), slots=set(), pages=set())
        alone = sequence(tokens, 1)
        cold.run(prefill=[alone.segment(0, len(tokens))])
        expected = cold.logits()[position:]

        donor = sequence(TOKENS[:24], 0)
        rig.run(prefill=[donor.segment(0, 24, snapshots={position: SNAPSHOT})])
        running, copies, pages = _resumed(position, tokens)
        rig.poison(rows={SNAPSHOT}, slots=set(), pages=pages)
        logits = []
        for segment in _chunks(running, position, chunk, SNAPSHOT):
            rig.run(prefill=[segment], copies=copies)
            logits.append(rig.logits())
            rig.poison(rows={1}, slots={1}, pages=pages)
            copies = []
        assert (torch.cat(logits) - expected).abs().max() <= 1e-10
        end = len(tokens)
        assert_same(rig.prefilled(1, end), cold.prefilled(1, end))
        assert _decoded(rig, running, 4) == _decoded(cold, alone, 4)


def test_several_requests_resume_in_one_chunk(make_rig: Callable[..., Rig]) -> None:
    """Beside a cold one, with snapshots of their own, from rows that others take over."""
    rig, cold = make_rig(), make_rig()
    rig.run(prefill=[sequence(TOKENS, 0).segment(0, 27, snapshots={2: 9, 10: 10})])
    running, copies, _ = _resumed(10, TOKENS[:10] + OTHER[10:20])
    # positions 0 and 1 stand on a page of slot 0 that is copied to a spare one
    short = sequence(TOKENS[:2] + OTHER[2:6], 2, (SPARE_PAGE, *own_pages(2)[1:]))
    fresh = sequence(OTHER, 0, (SPARE_PAGE + 1, *own_pages(0)[3:], *own_pages(2)[:1]))
    copies = [*copies, PageCopy(own_pages(0)[0], SPARE_PAGE)]
    segments = [
        running.segment(10, 20, resumed_row=10, snapshots={11: 9, 14: 3}),
        short.segment(2, 6, resumed_row=9, snapshots={3: 10}),
        fresh.segment(0, 27, snapshots={1: 4, 27: 5}),
    ]
    rig.run(prefill=segments, copies=copies)
    alone = [sequence(r.request.token_ids, r.slot) for r in (running, short, fresh)]
    for each, wanted in zip(alone, ({11: 9, 14: 3}, {3: 10}, {1: 4, 27: 5}), strict=True):
        end = len(each.request.token_ids)
        cold.run(prefill=[each.segment(0, end, snapshots=wanted)])
        assert_same(rig.prefilled(each.slot, end), cold.prefilled(each.slot, end))
        for position, row in wanted.items():
            assert_same(rig.snapshot(row, position), cold.snapshot(row, position))


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_snapshots_on_the_way_equal_separate_runs(make_rig: Callable[..., Rig], chunk: int) -> None:
    positions = {1: 3, 2: 4, 3: 5, 5: 6, 17: 7, 18: 8, 24: 9}
    rig = make_rig()
    running = sequence(TOKENS[:24], 0)
    for start in range(0, 24, chunk):
        end = min(24, start + chunk)
        wanted = {p: row for p, row in positions.items() if start < p <= end}
        segment = running.segment(start, end, snapshots=wanted, is_first=start == 0)
        rig.run(prefill=[segment])
    alone = make_rig()
    for position, row in positions.items():
        alone.poison(rows=set(), slots=set(), pages=set())
        alone.run(
            prefill=[sequence(TOKENS[:position], 1).segment(0, position, snapshots={position: 11})]
        )
        assert_same(rig.snapshot(row, position), alone.snapshot(11, position))
        # the slot's own state, conv inputs and hidden state are the same ones
        alone.run(saves=[SlotSave(1, position, 1)])
        assert_same(rig.snapshot(row, position), alone.snapshot(1, position))


@pytest.mark.parametrize("replay_len", [1, 4, 16])
def test_saves_equal_a_cold_prefill(make_rig: Callable[..., Rig], replay_len: int) -> None:
    """Also with one more step launched than the host has read, which moved the slot on."""
    options = {"linear_replayssm_cache_len": replay_len}
    rig, cold = make_rig(**options), make_rig(**options)
    runs = [sequence(TOKENS[:7], 0), sequence(TOKENS[:2], 1), sequence(TOKENS[:11], 2)]
    first = rig.run(prefill=[r.segment(0, len(r.request.token_ids)) for r in runs])
    texts = [
        [*r.request.token_ids, int(t)] for r, t in zip(runs, first.prefill_tokens, strict=True)
    ]
    before, unread = rig.launch(decode=runs), rig.launch(decode=runs)
    for step in range(4):
        _append(texts, before)
        # into other rows, so that the slots can go on
        saves = [SlotSave(r.slot, len(t) - 1, 3 + r.slot) for r, t in zip(runs, texts, strict=True)]
        before, unread = unread, rig.launch(saves=saves, decode=runs)
        for save, text in zip(saves, texts, strict=True):
            _assert_cold(cold, rig, save, text, SNAPSHOT + step % 2)
    _append(texts, before)
    saves = [SlotSave(r.slot, len(t) - 1, r.slot) for r, t in zip(runs, texts, strict=True)]
    rig.run(saves=saves)
    for save, text in zip(saves, texts, strict=True):
        _assert_cold(cold, rig, save, text, SNAPSHOT)


def _append(texts: list[list[int]], step: StepHandle) -> None:
    result = step.wait()
    for text, tokens, count in zip(texts, result.decode_tokens, result.decode_lens, strict=True):
        text.extend(tokens[:count].tolist())


def _assert_cold(cold: Rig, rig: Rig, save: SlotSave, text: list[int], row: int) -> None:
    """Compare with a prefill of `cold`, which keeps nothing of what it ran before."""
    position = save.position
    cold.poison(rows=set(), slots=set(), pages=set())
    alone = sequence(text[:position], 0)
    cold.run(prefill=[alone.segment(0, position, snapshots={position: row})])
    assert_same(rig.snapshot(save.row, position), cold.snapshot(row, position))


def test_saves_after_accepted_drafts_and_a_resumed_drafter() -> None:
    """The bundled model, whose drafts are mostly right where a text repeats itself."""
    prompt = [40, 50, 60, 70] * 4
    rig, cold = Rig(None), Rig(None)
    running = sequence(prompt, 0)
    text = [*prompt, int(rig.run(prefill=[running.segment(0, 16)]).prefill_tokens[0])]
    before, unread = rig.launch(decode=[running]), rig.launch(decode=[running])
    lens = []
    for _ in range(3):
        result = before.wait()
        lens.append(int(result.decode_lens[0]))
        text += result.decode_tokens[0, : lens[-1]].tolist()
        save = SlotSave(0, len(text) - 1, SNAPSHOT)
        before, unread = unread, rig.launch(saves=[save], decode=[running])
        _assert_cold(cold, rig, save, text, 3)
    assert max(lens) > 2
    unread.wait()

    cold.poison(rows=set(), slots=set(), pages=set())
    turn = [*text, 40, 50, 60, 70]
    alone, position = sequence(turn, 1), save.position
    cold.run(prefill=[alone.segment(0, len(turn))])
    resumed, copies, _ = _resumed(position, turn)
    segment = resumed.segment(position, len(turn), resumed_row=SNAPSHOT)
    rig.run(copies=copies, prefill=[segment])
    assert_same(rig.prefilled(1, len(turn)), cold.prefilled(1, len(turn)))
    assert _decoded(rig, resumed, 5) == _decoded(cold, alone, 5)


def test_save_from_a_checkpoint_of_length_0(tiny_checkpoint: Path) -> None:
    rig, cold = Rig(tiny_checkpoint), Rig(tiny_checkpoint)
    running = sequence(TOKENS[:1], 0)
    rig.run(prefill=[running.segment(0, 1)])
    table = rig.device.table
    table.columns.seq_lens[0] = table.columns.checkpoint_len[0] = 0
    rig.poison(rows=set(), slots=set(), pages=set())
    for token in TOKENS[:5]:
        table.window_tokens[0, 0] = token
        rig.run(decode=[running])
    assert table.columns.checkpoint_len[0] == 0
    for position in (5, 4, 2):
        save = SlotSave(0, position, 3)
        rig.run(saves=[save])
        if position == 5:
            _assert_cold(cold, rig, save, TOKENS, SNAPSHOT)


def test_saves_and_resume_in_one_step(make_rig: Callable[..., Rig]) -> None:
    """A slot's row is saved, its pages and the slot itself go on to the next turn at once."""
    rig, cold = make_rig(), make_rig()
    first = sequence(TOKENS[:9], 1)
    text = [*TOKENS[:9], int(rig.run(prefill=[first.segment(0, 9)]).prefill_tokens[0])]
    for _ in range(3):
        result = rig.run(decode=[first])
        text += result.decode_tokens[0, : result.decode_lens[0]].tolist()
    position = len(text) - 1
    turn = [*text, *OTHER[:6]]
    page = position // PAGE_SIZE
    pages = (*first.pages[:page], SPARE_PAGE, *first.pages[page + 1 :])
    second = sequence(turn, 1, pages)
    copies = [PageCopy(first.pages[page], SPARE_PAGE)] if position % PAGE_SIZE else []
    rig.run(
        saves=[SlotSave(1, position, 1)],
        copies=copies,
        prefill=[second.segment(position, len(turn), resumed_row=1)],
        decode=[second],
    )
    alone = sequence(turn, 1)
    cold.run(prefill=[alone.segment(0, len(turn))], decode=[alone])
    assert _decoded(rig, second, 3) == _decoded(cold, alone, 3)


def test_more_saves_than_are_folded_at_once(tiny_checkpoint: Path) -> None:
    rig, cold = Rig(tiny_checkpoint), Rig(tiny_checkpoint)
    rig.run(prefill=[sequence(TOKENS, 0).segment(0, 27)])
    rig.run(saves=[SlotSave(0, 27, row) for row in range(1, 12)])
    cold.run(prefill=[sequence(TOKENS, 0).segment(0, 27, snapshots={27: 3})])
    for row in range(1, 12):
        assert_same(rig.snapshot(row, 27), cold.snapshot(3, 27))


def test_pages_are_all_read_before_any_is_written(with_mtp: Path) -> None:
    rig = Rig(with_mtp)
    rig.run(prefill=[sequence(TOKENS, 0).segment(0, 27)])
    pools = rig.device.pools.kv
    assert sum(pool.shape[0] for pool in pools) == 1 + 1, "the MTP layer's KV is pooled with others"
    before = [pool.view(pool.shape[0], -1, PAGE_SIZE, *pool.shape[2:]).clone() for pool in pools]
    a, b, c = own_pages(0)[:3]
    rig.run(copies=[PageCopy(a, b), PageCopy(b, c), PageCopy(c, SPARE_PAGE)])
    for pool, old in zip(pools, before, strict=True):
        new = pool.view(old.shape)
        moved = {a: a, b: a, c: b, SPARE_PAGE: c}
        for page in range(old.shape[1]):
            source = old[:, moved.get(page, page)]
            assert torch.equal(new[:, page].nan_to_num(), source.nan_to_num())


def test_requests_without_linear_layers_resume_by_pages_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    _, model = tiny.build("qwen3", scaled=True, seed=tiny.VETTED_SEED)
    checkpoint = tiny.save(model, tmp_path_factory.mktemp("qwen3"))
    for algorithm in ("none", "ngram"):
        rig, cold = (Rig(checkpoint, speculative_algorithm=algorithm) for _ in range(2))
        # so that something is found in the cached part
        tokens = [*TOKENS[:12], *TOKENS[1:5]]
        rig.run(prefill=[sequence(TOKENS, 0).segment(0, 27)])
        running, copies, _ = _resumed(11, tokens)
        rig.run(prefill=[running.segment(11, 14)], copies=copies)
        rig.run(prefill=[running.segment(14, 16, is_first=False)])
        alone = sequence(tokens, 1)
        cold.run(prefill=[alone.segment(0, 16)])
        assert_same(rig.prefilled(1, 16), cold.prefilled(1, 16))
        assert _decoded(rig, running, 4) == _decoded(cold, alone, 4)


def test_a_step_without_saves_and_copies_sends_nothing_for_them(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tiny_checkpoint)
    monkeypatch.setattr(rig.runner, "_saver", None)
    running = sequence(TOKENS, 0)
    rig.run(prefill=[running.segment(0, 27)], decode=[running])


def test_zero_entries_stay_zero(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.run(prefill=[sequence(TOKENS, 0).segment(0, 27, snapshots={1: 11, 20: 3})])
    rig.run(saves=[SlotSave(0, 27, 11)])
    rig.run(prefill=[sequence(TOKENS, 1).segment(1, 27, resumed_row=11)])
    geometry = rig.device.geometry
    for memory in rig.device.pools.linear:
        assert (memory.conv_ring[:, geometry.conv_zero] == 0).all()
        assert (memory.replay.checkpoint[:, geometry.zero_row] == 0).all()
        assert (memory.replay.d_ring[:, geometry.ring_zero] == 0).all()
