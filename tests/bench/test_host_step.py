"""What the host does for each row of a decode step, counted; the benchmark has the times."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import host_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# so many steps take whole pages of each row, one token a step or three
STEPS = 16


def calls_per_step(num_rows: int, num_drafts: int) -> Counter[str]:
    """Calls of Python functions of an engine's step, by the part of the package they are in."""
    llm = host_step.decoding_engine(num_rows, num_drafts)
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, _arg: object) -> None:
        if event == "call":
            counts[frame.f_code.co_filename.rpartition("gapless/")[2].partition("/")[0]] += 1

    run_profiled(count, lambda: [llm.engine.step() for _ in range(STEPS)])
    return counts


def run_profiled(profile: Callable[[Any, str, Any], object], run: Callable[[], object]) -> None:
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_steady_row_costs_few_calls(num_drafts: int) -> None:
    few, many = calls_per_step(8, num_drafts), calls_per_step(24, num_drafts)
    many.subtract(few)
    per_row = {part: count / 16 / STEPS for part, count in many.items()}
    assert sum(per_row.values()) < 16, per_row
    # what stands between two launches, the text left out
    del per_row["text"]
    assert sum(per_row.values()) < 9, per_row
    assert per_row["runner"] == 0, "rows that were there before cost nothing to name again"


def test_the_table_holds_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    monkeypatch.setattr(host_step, "NUM_STEPS", 20)
    monkeypatch.setattr(sys, "argv", ["", "--rows", "2", "--steps", "3", "--output", str(path)])
    host_step.main()
    found = json.loads(path.read_text())["us_per_step"]["k=3"]
    assert {part.strip() for part in found} == {
        "whole step", "schedule", "launch", "copy up", "copy down", "commit", "text and messages",
    }  # fmt: skip
    assert min(us["tenth"] for us in found.values()) > 0
