"""Each invariant of the design, broken on purpose: some program must then go wrong.

The same programs are right unbroken, so it is the rule that the failures are about.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from gapless.cache.device import DeviceTier
from gapless.cache.host import HostTier
from gapless.cache.manager import CacheManager
from gapless.cache.pages import largest_reserved_len, reserved_len
from gapless.cache.prefix import PrefixCache
from gapless.core.draft_shape import TreeShape
from gapless.core.request import Request
from gapless.scheduler.unread import UnreadSteps
from tests.scheduler.driver import run_program
from tests.scheduler.hash_device import Flaw

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.cache.radix import Node
    from gapless.core.plan import SlotSave

NUM_PROGRAMS = 40
WINDOWS = (1, 2, 4)

every_window = pytest.mark.parametrize("window", WINDOWS)


def goes_wrong(
    window: int, *, run_ahead: int = 1, flaw: Flaw | None = None, num_programs: int = NUM_PROGRAMS
) -> bool:
    """Whether a program among the first `num_programs` fails a check."""
    flaws = frozenset() if flaw is None else frozenset({flaw})
    for seed in range(num_programs):
        try:
            run_program(
                seed,
                window=window,
                run_ahead=run_ahead,
                flaws=flaws,
                # what a slot still can give is derived for a run-ahead of 1
                uses_prefix_cache=run_ahead == 1,
            )
        except AssertionError:
            return True
    return False


def reserved_len_less(tokens: int) -> Callable[[int, int, int, None], int]:
    """`reserved_len` that many tokens short, the cap as it is."""

    def shortened(committed_len: int, max_window: int, limit_len: int, tree: None) -> int:
        wanted = committed_len + 3 * max_window - 1 - tokens
        return min(wanted, largest_reserved_len(max_window, limit_len))

    return shortened


@every_window
def test_unbroken(window: int) -> None:
    assert not goes_wrong(window)


TREES = {6: TreeShape(3, 2), 5: TreeShape(2, 4)}


def trees_go_wrong(window: int, *flaws: Flaw) -> bool:
    """Whether a program over trees among the first few fails a check."""
    for seed in range(NUM_PROGRAMS):
        try:
            run_program(seed, window=window, tree=TREES[window], flaws=frozenset(flaws))
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("window", TREES)
@pytest.mark.parametrize(
    "flaw", [None, Flaw.PATH_IS_LEFT_WHERE_IT_IS, Flaw.PATH_MOVES_ENTRY_BY_ENTRY]
)
def test_paths_are_closed_up(window: int, flaw: Flaw | None) -> None:
    assert trees_go_wrong(window, *filter(None, [flaw])) == (flaw is not None)


@pytest.mark.parametrize("window", TREES)
@pytest.mark.parametrize("is_cap", [False, True])
def test_reservation_of_trees_one_token_short(
    window: int, monkeypatch: pytest.MonkeyPatch, *, is_cap: bool
) -> None:
    def shortened(committed_len: int, max_window: int, limit_len: int, tree: TreeShape) -> int:
        cap = largest_reserved_len(max_window, limit_len, tree)
        wanted = reserved_len(committed_len, max_window, limit_len + 1000, tree)
        return min(wanted, cap - 1) if is_cap else min(wanted - 1, cap)

    monkeypatch.setattr("gapless.cache.manager.reserved_len", shortened)
    assert trees_go_wrong(window)


@every_window
def test_reservation_one_token_short(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.cache.manager.reserved_len", reserved_len_less(1))
    assert goes_wrong(window)


@every_window
def test_reservation_cap_one_token_short(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(committed_len: int, max_window: int, limit_len: int, tree: None) -> int:
        cap = largest_reserved_len(max_window, limit_len) - 1
        return min(reserved_len(committed_len, max_window, limit_len), cap)

    monkeypatch.setattr("gapless.cache.manager.reserved_len", shortened)
    assert goes_wrong(window)


@every_window
def test_replay_ring_too_short(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row starts at most L - 1 + W past its checkpoint, and a window is W more."""
    needed = "gapless.core.architecture.ring_capacity"
    monkeypatch.setattr(needed, lambda replay_len, max_window: replay_len + 2 * max_window - 1)
    assert not goes_wrong(window), "L + 2 W has one entry to spare"
    monkeypatch.setattr(needed, lambda replay_len, max_window: replay_len + 2 * max_window - 2)
    assert goes_wrong(window)


@every_window
def test_conv_ring_one_short(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gapless.core.architecture.conv_ring_capacity",
        lambda conv_width, max_window: conv_width - 2 + max_window,
    )
    assert goes_wrong(window)


@pytest.mark.parametrize("flaw", [Flaw.DONE_ROW_FOLDS, Flaw.DONE_ROW_RUNS])
@every_window
def test_done_row_keeps_its_slot(window: int, flaw: Flaw) -> None:
    assert goes_wrong(window, flaw=flaw)


@every_window
def test_stop_is_not_counted(window: int) -> None:
    assert goes_wrong(window, flaw=Flaw.STOP_IS_NOT_COUNTED)


@every_window
def test_drafts_after_a_stop_are_counted(window: int) -> None:
    """Bites with speculation only: a window of 1 has no drafts."""
    assert goes_wrong(window, flaw=Flaw.COUNTS_PAST_STOP) == (window > 1)


@every_window
def test_newest_token_is_committed(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def total_len(request: Request) -> int:
        return len(request.token_ids)

    monkeypatch.setattr(Request, "committed_len", property(total_len, lambda _self, _len: None))
    assert goes_wrong(window)


@every_window
def test_run_ahead_of_two(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert goes_wrong(window, run_ahead=2), "the scheduler asserts a run-ahead of 1"
    monkeypatch.setattr("gapless.scheduler.unread.RUN_AHEAD", 2)
    assert goes_wrong(window, run_ahead=2), "the reservation is for a run-ahead of 1"
    monkeypatch.setattr("gapless.cache.manager.reserved_len", reserved_len_less(-window))
    assert not goes_wrong(window, run_ahead=2)


# of 400 programs each, most of them right
@pytest.mark.parametrize(
    "window", [pytest.param(w, marks=pytest.mark.slow) if w < max(WINDOWS) else w for w in WINDOWS]
)
def test_readmitted_before_its_step_is_read(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown one step further ahead, with the reservation that it takes.

    With a run-ahead of 1 a request could be readmitted too early only in the call that retracts
    it, and there the pages that it gave up are taken.
    """
    monkeypatch.setattr("gapless.scheduler.unread.RUN_AHEAD", 2)
    monkeypatch.setattr("gapless.cache.manager.reserved_len", reserved_len_less(-window))
    assert not goes_wrong(window, run_ahead=2, num_programs=400)
    monkeypatch.setattr(UnreadSteps, "names", lambda _self, _request: False)
    assert goes_wrong(window, run_ahead=2, num_programs=400)


@pytest.mark.parametrize(
    "flaw", [Flaw.SAVES_COME_LATE, Flaw.PAGES_ARE_NOT_COPIED, Flaw.TAIL_IS_NOT_SAVED]
)
@every_window
def test_snapshot_is_incomplete(window: int, flaw: Flaw) -> None:
    assert goes_wrong(window, flaw=flaw)


@pytest.mark.parametrize("flaw", [Flaw.HIDDEN_IS_NOT_SAVED, Flaw.FIRST_MTP_KV_IS_KEPT])
@every_window
def test_mtp_state_is_not_of_the_prefix(window: int, flaw: Flaw) -> None:
    """Bites with speculation only."""
    assert goes_wrong(window, flaw=flaw) == (window > 1)


@every_window
def test_planned_rows_are_not_locked(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceTier, "lock_row", lambda _self, _node: None)
    monkeypatch.setattr(DeviceTier, "unlock_row", lambda _self, _node: None)
    assert goes_wrong(window)


@every_window
def test_prefix_is_resumed_by_the_step_that_computes_it(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CacheManager._store

    def early(
        self: CacheManager, request: Request, position: int, row: int, *, is_written: bool
    ) -> bool:
        del is_written
        return store(self, request, position, row, is_written=True)

    monkeypatch.setattr(CacheManager, "_store", early)
    assert goes_wrong(window, num_programs=200)


@every_window
def test_snapshot_stands_under_a_shorter_key(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CacheManager._store

    def shorter(
        self: CacheManager, request: Request, position: int, row: int, *, is_written: bool
    ) -> bool:
        return store(self, request, max(1, position - 1), row, is_written=is_written)

    monkeypatch.setattr(CacheManager, "_store", shorter)
    assert goes_wrong(window)


@every_window
def test_state_is_saved_at_another_position(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    release = CacheManager.release

    def late(self: CacheManager, request: Request, position: int) -> SlotSave | None:
        save = release(self, request, position)
        return save and replace(save, position=max(1, save.position - 1))

    monkeypatch.setattr(CacheManager, "release", late)
    assert goes_wrong(window)


@every_window
def test_host_copies_are_loaded_late(window: int) -> None:
    assert goes_wrong(window, flaw=Flaw.LOADS_COME_LATE, num_programs=200)


@every_window
def test_host_copies_count_before_they_arrive(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    end_stores = PrefixCache.end_stores

    def early(self: PrefixCache, num_stored: int) -> None:
        end_stores(self, max(num_stored, self._counters.num_stores))

    monkeypatch.setattr(PrefixCache, "end_stores", early)
    assert goes_wrong(window, num_programs=200)


@every_window
def test_what_is_being_copied_is_not_locked(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicted under the copy, in spite of the locks that it took."""
    make, may_leave = HostTier.__init__, DeviceTier._may_leave
    tiers: list[HostTier] = []

    def recorded(self: HostTier, *args: Any, **sizes: Any) -> None:
        make(self, *args, **sizes)
        tiers.append(self)

    def loose(self: DeviceTier, node: Node) -> bool:
        storing = [stored for tier in tiers[-1:] for stored in tier.storing]
        if not any(node in stored.path() for stored in storing):
            return may_leave(self, node)
        return node.is_warm and not node.num_warm_children

    monkeypatch.setattr(HostTier, "__init__", recorded)
    monkeypatch.setattr(DeviceTier, "_may_leave", loose)
    assert goes_wrong(window, num_programs=200)
