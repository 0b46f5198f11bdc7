"""Captures on a GPU: stages past a seam, and graphs that nothing refers to any more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gapless.runner.graphs import Capture, StepGraph
from gapless.runner.stages import Stage

pytestmark = pytest.mark.gpu


def test_stages_past_a_seam_warm_up_on_indices_that_were_computed() -> None:
    table, place = torch.arange(8, device="cuda"), torch.full((4,), 3, device="cuda")
    stages = [
        Stage("first", lambda _: place + 1),
        Stage("second", lambda found: table.index_select(0, found), plan=lambda: None),
    ]
    # what the captured part's memory may hold, since it is given back right before
    torch.full((1 << 22,), 1 << 40, device="cuda")
    graph = StepGraph(stages, Capture())
    found: torch.Tensor = graph.launch()
    assert found.tolist() == [4] * 4
    place.fill_(1)
    assert graph.launch().tolist() == [2] * 4


def test_a_capture_outlives_the_graphs_of_others() -> None:
    """The last reference to one goes in the middle, while the collector is as eager as can be."""
    x = torch.ones(4, device="cuda")
    held = [StepGraph([Stage("plus one", lambda _: x + 1)], Capture())]

    def run(_: Any) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            # young, so that no full collection is needed
            lost: list[Any] = [held.pop()]
            lost.append(lost)
            del lost
        # each makes objects that the collector counts
        return torch.stack([x * number for number in range(200)]).sum(0)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        found = StepGraph([Stage("sum", run)], Capture())
    finally:
        gc.set_threshold(*before)
    assert not held
    assert found.launch().tolist() == [199 * 100] * 4
