"""However memory is divided, it holds, one request fits, and nothing of use is left over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.config.budget import (
    CACHED_REQUESTS,
    CACHED_SNAPSHOTS,
    SHORTEST_REQUEST,
    Demand,
    Division,
    divide,
)
from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.footprint import Footprint
from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.feed_forward import MlpSpec
from gapless.core.specs.linear import LinearSpec, Recurrence
from gapless.errors import ConfigError

ATTENTION = LayerSpec(
    AttentionSpec(4, 1, 8, 8, 1e4, has_qk_norm=True, has_output_gate=True), MlpSpec(16)
)
LINEAR = LayerSpec(LinearSpec(Recurrence.GATED_DELTA, 1, 2, 8, 12, 4), MlpSpec(16))


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """Sizes of small models: hybrid, dense, linear alone, with and without MTP."""
    kinds = draw(st.lists(st.sampled_from([ATTENTION, LINEAR]), min_size=1, max_size=5))
    spec = Architecture(
        model_type="any", vocab_size=64, hidden_size=16, layers=tuple(kinds), norm_eps=1e-6,
        ties_embeddings=False, max_position=500,
        num_mtp_layers=draw(st.integers(0, 1)) if ATTENTION in kinds else 0,
    )  # fmt: skip
    return Footprint(
        architecture=spec, device="cpu", dtype="float32", ssm_dtype="float32",
        page_size=draw(st.sampled_from([1, 3, 16])), replay_len=draw(st.sampled_from([1, 16])),
        max_window=draw(st.sampled_from([1, 4])),
    )  # fmt: skip


@st.composite
def demands(draw: st.DrawFn, footprint: Footprint) -> Demand:
    """Budgets from far too small to more than can be used."""
    running = draw(st.integers(1, 12))
    most = footprint.pool_bytes(num_requests=running, num_pages=600, num_snapshots=200)
    return Demand(
        budget_bytes=draw(st.integers(0, footprint.weight_bytes + 2 * most)),
        max_running=running,
        max_model_len=draw(st.integers(SHORTEST_REQUEST, 200)),
        keeps_len=draw(st.booleans()),
        uses_prefix_cache=draw(st.booleans()),
        snapshot_fraction=draw(st.floats(0.01, 0.99)),
    )


def divided(footprint: Footprint, demand: Demand) -> Division | None:
    try:
        return divide(footprint, demand)
    except ConfigError:
        return None


def bytes_of(footprint: Footprint, demand: Demand, requests: int, pages: int, rows: int) -> int:
    """Bytes beyond the budget that so much would take; at most 0 where it fits."""
    pools = footprint.pool_bytes(num_requests=requests, num_pages=pages, num_snapshots=rows)
    return footprint.weight_bytes + pools - demand.budget_bytes


@given(data=st.data())
def test_it_holds_and_nothing_of_use_is_left_over(data: st.DataObject) -> None:
    footprint = data.draw(footprints())
    demand = data.draw(demands(footprint))
    found = divided(footprint, demand)
    full = footprint.num_pages(demand.max_model_len)
    if found is None:
        pages = full if demand.keeps_len else footprint.num_pages(SHORTEST_REQUEST)
        assert bytes_of(footprint, demand, 1, pages, 0) > 0
        return
    running, pages, snapshots = found.max_running, found.num_pages, found.num_snapshots

    def excess(requests: int = 0, more_pages: int = 0, rows: int = 0) -> int:
        return bytes_of(footprint, demand, running + requests, pages + more_pages, snapshots + rows)

    assert excess() <= 0
    assert sum(part.num_bytes for part in found.parts) == demand.budget_bytes
    assert found.parts[-1].num_bytes == -excess()
    # one request of the length that is promised fits
    assert SHORTEST_REQUEST <= found.max_model_len <= demand.max_model_len
    assert footprint.num_pages(found.max_model_len) <= pages
    assert found.max_model_len == demand.max_model_len or not demand.keeps_len
    assert 1 <= running <= demand.max_running
    # fewer run only where one more would not leave the pages of one at full length
    if running < demand.max_running and demand.keeps_len:
        assert bytes_of(footprint, demand, running + 1, full, 0) > 0
    # nothing beyond use
    sets = CACHED_REQUESTS if found.uses_prefix_cache else 1
    useful = sets * running * footprint.num_pages(found.max_model_len)
    assert pages <= useful
    assert snapshots <= CACHED_SNAPSHOTS * running
    assert pages == useful or excess(more_pages=1) > 0
    if found.uses_prefix_cache and footprint.row_bytes:
        assert snapshots >= 1
        if pages == useful:
            assert snapshots == CACHED_SNAPSHOTS * running or excess(rows=1) > 0
    else:
        assert snapshots == 0
    assert demand.uses_prefix_cache or not found.uses_prefix_cache


@given(data=st.data())
def test_more_memory_takes_nothing_away(data: st.DataObject) -> None:
    footprint = data.draw(footprints())
    demand = data.draw(demands(footprint))
    more = data.draw(st.integers(0, 2 * footprint.pool_bytes(num_requests=1, num_pages=20)))
    low = divided(footprint, demand)
    high = divided(footprint, replace(demand, budget_bytes=demand.budget_bytes + more))
    if low is None:
        return
    assert high is not None
    assert high.max_running >= low.max_running
    if high.max_running == low.max_running:
        assert high.num_snapshots >= low.num_snapshots
        # a row costs pages, and is a step in memory that pages fill only up to it
        row_pages = -(-footprint.row_bytes // max(1, footprint.page_bytes))
        lost = low.num_pages - high.num_pages
        assert lost <= row_pages * (high.num_snapshots - low.num_snapshots)


@given(data=st.data())
def test_snapshots_get_their_share_beside_one_request(data: st.DataObject) -> None:
    footprint = data.draw(footprints())
    demand = replace(data.draw(demands(footprint)), uses_prefix_cache=True)
    found = divided(footprint, demand)
    row = footprint.row_bytes
    if found is None or row == 0:
        return
    left = demand.budget_bytes - footprint.weight_bytes
    left -= footprint.pool_bytes(num_requests=found.max_running, num_pages=0)
    share = int(left * demand.snapshot_fraction) // row
    if demand.keeps_len:
        one = footprint.num_pages(demand.max_model_len) * footprint.page_bytes
    else:
        one = footprint.num_pages(SHORTEST_REQUEST) * footprint.page_bytes
    owed = min(share, CACHED_SNAPSHOTS * found.max_running, (left - one) // row)
    assert found.num_snapshots >= owed


HYBRID = Footprint(
    architecture=Architecture(
        model_type="hybrid", vocab_size=64, hidden_size=16, layers=(ATTENTION, LINEAR),
        norm_eps=1e-6, ties_embeddings=False, max_position=10_000,
    ),
    device="cpu", dtype="float32", ssm_dtype="float32", page_size=16, replay_len=16, max_window=1,
)  # fmt: skip


def _demand(left: int, **changes: Any) -> Demand:
    """A demand with `left` bytes beyond weights and fixed parts."""
    fixed = HYBRID.weight_bytes + HYBRID.fixed_bytes
    defaults: dict[str, Any] = {
        "max_running": 1000, "max_model_len": 10_000, "keeps_len": False,
        "uses_prefix_cache": False,
    }  # fmt: skip
    return Demand(budget_bytes=fixed + left, **{**defaults, **changes})


def test_a_length_nobody_asked_for_leaves_half_to_running_requests() -> None:
    left = 20 * HYBRID.request_bytes
    found = divide(HYBRID, _demand(left))
    assert found.max_running == 10
    assert found.num_pages == 10 * HYBRID.request_bytes // HYBRID.page_bytes
    # the same length, asked for, comes first
    asked = divide(HYBRID, _demand(left, max_model_len=found.max_model_len, keeps_len=True))
    assert asked.max_running == 10
    longer = divide(
        HYBRID, _demand(left, max_model_len=found.max_model_len * 3 // 2, keeps_len=True)
    )
    assert 1 <= longer.max_running < 10


def test_a_length_nobody_asked_for_gives_way_to_snapshots() -> None:
    left = HYBRID.request_bytes + 400 * HYBRID.page_bytes
    changes = {"uses_prefix_cache": True, "max_running": 1}
    found = divide(HYBRID, _demand(left, **changes))
    assert found.num_snapshots == min(16, 100 * HYBRID.page_bytes // HYBRID.row_bytes)
    assert 300 <= found.num_pages < 400
    assert found.uses_prefix_cache
    asked = divide(HYBRID, _demand(left, max_model_len=400 * 16, keeps_len=True, **changes))
    assert asked.num_pages == 400
    assert not asked.uses_prefix_cache


@pytest.mark.parametrize("fraction", [0.01, 0.99])
def test_what_one_share_has_no_use_for_goes_to_the_other(fraction: float) -> None:
    full = HYBRID.num_pages(100)
    left = 2 * HYBRID.request_bytes + 4 * full * HYBRID.page_bytes + 32 * HYBRID.row_bytes
    found = divide(
        HYBRID,
        _demand(
            left, max_running=2, max_model_len=100, keeps_len=True, uses_prefix_cache=True,
            snapshot_fraction=fraction,
        ),
    )  # fmt: skip
    assert (found.num_pages, found.num_snapshots) == (4 * full, 32)
    assert found.parts[-1].num_bytes == 0


@pytest.mark.parametrize("fraction", [0.5, 0.99])
def test_snapshots_leave_the_pages_of_the_shortest_request(fraction: float) -> None:
    for rows in range(1, 5):
        # a byte too few for one more row
        left = HYBRID.request_bytes + HYBRID.page_bytes + rows * HYBRID.row_bytes - 1
        changes = {"uses_prefix_cache": True, "max_running": 1, "snapshot_fraction": fraction}
        found = divide(HYBRID, _demand(left, **changes))
        assert found.max_model_len >= 2
        assert found.num_pages >= 1


def test_rows_smaller_than_a_page_do_not_come_and_go() -> None:
    dense = replace(
        HYBRID, max_window=4,
        architecture=replace(HYBRID.architecture, layers=(ATTENTION,), num_mtp_layers=1),
    )  # fmt: skip
    assert dense.row_bytes * 4 < dense.page_bytes
    least = dense.weight_bytes + dense.pool_bytes(num_requests=2, num_pages=20)
    demand = _demand(0, max_running=2, uses_prefix_cache=True, snapshot_fraction=0.02)
    found = [
        divide(dense, replace(demand, budget_bytes=size))
        for size in range(least, least + 4 * dense.page_bytes, dense.row_bytes // 2)
    ]
    counts = [one.num_snapshots for one in found]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] < 32
