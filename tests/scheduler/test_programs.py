"""Random programs against the hash model: joins, chunks, run-ahead, retraction, aborts."""

from __future__ import annotations

import pytest

from tests.scheduler.driver import run_program


@pytest.mark.parametrize("window", [1, 2, 4])
def test_programs(window: int) -> None:
    drivers = [run_program(seed, window=window) for seed in range(1000, 1100)]
    # the programs are worth something only if they meet what is hard
    assert sum(driver.scheduler.num_retractions for driver in drivers) > 20
    reasons = {final.finish_reason for driver in drivers for final in driver.finals.values()}
    assert len(reasons) == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 8])
def test_many_programs(window: int) -> None:
    for seed in range(10_000, 13_000):
        run_program(seed, window=window)
