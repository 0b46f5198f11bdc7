"""What the scheduler keeps from step to step is what it would find by looking at every request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gapless.scheduler.scheduler import Scheduler
from tests.scheduler.driver import run_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.plan import DecodeRow, PageEntry, PrefillSegment


def run_programs(window: int) -> None:
    for seed in range(60):
        run_program(seed, window=window)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check whatever is kept; of each step that keeps rows, how many requests have outgrown."""
    find, grow = Scheduler._decode_rows, Scheduler._grow_decode_rows
    steps: list[int] = []

    def checked_rows(
        self: Scheduler, prefill: Sequence[PrefillSegment] = ()
    ) -> tuple[DecodeRow, ...]:
        rows = self._kept_rows
        if rows is not None and not prefill:
            self._kept_rows = None
            assert find(self) == rows, "rows were kept too long"
            self._kept_rows = rows
        return find(self, prefill)

    def checked_growth(self: Scheduler) -> tuple[PageEntry, ...]:
        if self._kept_rows is not None:
            requests = [row.request for row in self._kept_rows]
            wanted = [r for r in requests if r.committed_len > r.covered_len]
            outgrown = [request for request in self._outgrown if request in self._running]
            assert outgrown == wanted, "pages are missing, or the oldest is not the first"
            steps.append(len(wanted))
        return grow(self)

    monkeypatch.setattr(Scheduler, "_decode_rows", checked_rows)
    monkeypatch.setattr(Scheduler, "_grow_decode_rows", checked_growth)
    return steps


@pytest.mark.parametrize("window", [1, 2, 4])
def test_what_is_kept_is_what_would_be_found(window: int, kept: list[int]) -> None:
    run_programs(window)
    assert len(kept) > 300
    assert sum(kept) > 30


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.usefixtures("kept")
def test_a_row_that_nears_its_limit_is_looked_at(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gapless.scheduler.scheduler.RUN_AHEAD", 0)
    with pytest.raises(AssertionError, match="kept too long"):
        run_programs(window)
