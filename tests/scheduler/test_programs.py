"""Random programs against the hash model: joins, chunks, run-ahead, retraction, aborts, chats.

Prompts share prefixes, branch off and go on, so the prefix cache is used throughout.
"""

from __future__ import annotations

import pytest

from gapless.core.counters import WaitReason
from gapless.core.draft_shape import TreeShape
from tests.scheduler.driver import run_program


@pytest.mark.parametrize("window", [1, 2, 4])
def test_programs(window: int) -> None:
    first = 1000 * window
    drivers = [run_program(seed, window=window) for seed in range(first, first + 120)]
    # the programs are worth something only if they meet what is hard
    counters = [driver.scheduler.cache_counters for driver in drivers]
    assert sum(counter.num_retractions for counter in counters) > 35
    assert sum(counter.num_hits for counter in counters) > 70
    assert sum(counter.num_rows_evicted for counter in counters) > 35
    assert sum(counter.num_leaves_evicted for counter in counters) > 70
    waits = [reason for counter in counters for reason in counter.waits]
    assert set(waits) == set(WaitReason)
    reasons = {final.finish_reason for driver in drivers for final in driver.finals.values()}
    assert len(reasons) == 4


@pytest.mark.parametrize(
    ("window", "tree", "count"),
    [
        (6, TreeShape(3, 2), 40),
        (5, TreeShape(2, 4), 40),
        (8, TreeShape(7, 3), 40),
        pytest.param(16, TreeShape(4, 4), 1000, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_programs_with_trees(window: int, tree: TreeShape, count: int) -> None:
    drivers = [run_program(seed, window=window, tree=tree) for seed in range(2000, 2000 + count)]
    accepted = sum(driver.scheduler.counters.num_accepted for driver in drivers)
    assert accepted > 5 * count
    assert sum(driver.scheduler.cache_counters.num_hits for driver in drivers) > count // 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 8])
def test_many_programs(window: int) -> None:
    for seed in range(10_000, 12_000):
        run_program(seed, window=window)
