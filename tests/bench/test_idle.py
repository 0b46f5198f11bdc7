"""Shares of idle time, by hand."""

from __future__ import annotations

import pytest

from gapless.bench.idle import IdleShares, busy_time, idle_shares


def test_seams_lie_between_runs_and_gaps_inside() -> None:
    first, second, third = [(5.0, 9.0), (2.0, 4.0)], [(12.0, 14.0), (13.0, 20.0)], [(22.0, 23.0)]
    assert idle_shares([[first, second]]) == IdleShares(seam=0.3, gap=0.1)
    assert idle_shares([[first, second, third]]) == IdleShares(seam=0.25, gap=0.05)
    # nothing is known of the time between two stretches
    assert idle_shares([[first, second], [third]]) == idle_shares([[first, second]])


@pytest.mark.parametrize(
    "stretches", [[], [[]], [[[(0.0, 1.0)]]], [[[(0.0, 1.0)]], [[(2.0, 3.0)]]]]
)
def test_one_run_has_no_share(stretches: list[list[list[tuple[float, float]]]]) -> None:
    assert idle_shares(stretches) is None


def test_time_that_several_cover_counts_once() -> None:
    assert busy_time([]) == 0.0
    assert busy_time([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == 4.0
