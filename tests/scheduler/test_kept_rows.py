"""What the scheduler keeps from step to step is what it would find by looking at every request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gapless.scheduler.decode_rows import DecodeRows
from tests.scheduler.driver import run_program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.plan import DecodeRow, PrefillSegment
    from gapless.core.request import Request


def run_programs(window: int) -> None:
    for seed in range(60):
        run_program(seed, window=window)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Check whatever is kept; of each step that keeps rows, how many requests have outgrown."""
    find, take = DecodeRows.next_rows, DecodeRows.take_outgrown
    steps: list[int] = []

    def checked_rows(
        self: DecodeRows, prefill: Sequence[PrefillSegment] = ()
    ) -> tuple[DecodeRow, ...]:
        rows = self._kept
        if rows is not None and not prefill:
            self._kept = None
            assert find(self) == rows, "rows were kept too long"
            self._kept = rows
        return find(self, prefill)

    def checked_outgrown(self: DecodeRows) -> list[Request]:
        kept, outgrown = self._kept, take(self)
        if kept is not None:
            requests = [row.request for row in kept]
            wanted = [r for r in requests if r.committed_len > r.covered_len]
            outgrown_rows = [request for request in outgrown if request in self._running]
            assert outgrown_rows == wanted, "pages are missing, or the oldest is not the first"
            steps.append(len(wanted))
        return outgrown

    monkeypatch.setattr(DecodeRows, "next_rows", checked_rows)
    monkeypatch.setattr(DecodeRows, "take_outgrown", checked_outgrown)
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
    monkeypatch.setattr("gapless.scheduler.decode_rows.RUN_AHEAD", 0)
    with pytest.raises(AssertionError, match="kept too long"):
        run_programs(window)
