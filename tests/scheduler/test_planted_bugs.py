"""Each invariant of the design, broken on purpose: some program must then go wrong.

The same programs are right unbroken, so it is the rule that the failures are about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gapless.cache.pages import largest_reserved_len, reserved_len
from tests.scheduler.driver import run_program
from tests.scheduler.hash_device import Flaw

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.core.request import Request

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
            run_program(seed, window=window, run_ahead=run_ahead, flaws=flaws)
        except AssertionError:
            return True
    return False


def reserved_len_less(tokens: int) -> Callable[[int, int, int], int]:
    """`reserved_len` that many tokens short, the cap as it is."""

    def shortened(committed_len: int, max_window: int, limit_len: int) -> int:
        wanted = committed_len + 3 * max_window - 1 - tokens
        return min(wanted, largest_reserved_len(max_window, limit_len))

    return shortened


@every_window
def test_unbroken(window: int) -> None:
    assert not goes_wrong(window)


@every_window
def test_reservation_one_token_short(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.cache.manager.reserved_len", reserved_len_less(1))
    assert goes_wrong(window)


@every_window
def test_reservation_cap_one_token_short(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(committed_len: int, max_window: int, limit_len: int) -> int:
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

    monkeypatch.setattr("gapless.scheduler.scheduler.committed_len", total_len)
    assert goes_wrong(window)


@every_window
def test_run_ahead_of_two(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert goes_wrong(window, run_ahead=2), "the scheduler asserts a run-ahead of 1"
    monkeypatch.setattr("gapless.scheduler.scheduler.RUN_AHEAD", 2)
    assert goes_wrong(window, run_ahead=2), "the reservation is for a run-ahead of 1"
    monkeypatch.setattr("gapless.cache.manager.reserved_len", reserved_len_less(-window))
    assert not goes_wrong(window, run_ahead=2)


@every_window
def test_readmitted_before_its_step_is_read(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown one step further ahead, with the reservation that it takes.

    With a run-ahead of 1 a request could be readmitted too early only in the call that retracts
    it, and there the pages that it gave up are taken.
    """
    monkeypatch.setattr("gapless.scheduler.scheduler.RUN_AHEAD", 2)
    monkeypatch.setattr("gapless.cache.manager.reserved_len", reserved_len_less(-window))
    assert not goes_wrong(window, run_ahead=2, num_programs=60)
    monkeypatch.setattr("gapless.scheduler.scheduler.is_read", lambda _request: True)
    assert goes_wrong(window, run_ahead=2, num_programs=60)
