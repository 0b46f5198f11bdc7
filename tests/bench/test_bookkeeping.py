"""Host time per request grows far slower than the tree; the benchmark has the figures."""

from __future__ import annotations

from benchmarks.cache_bookkeeping import measure


def test_bookkeeping_grows_sublinearly_with_cached_nodes() -> None:
    small, large = measure(500, 150), measure(8000, 150)
    growth = large["nodes"] / small["nodes"]
    assert growth > 8
    assert large["us_per_request"] / small["us_per_request"] < growth / 2


def test_every_request_meets_what_is_measured() -> None:
    counters = measure(500, 150)["counters"]
    assert "0 rows and" not in counters
    assert "(0%)" not in counters
