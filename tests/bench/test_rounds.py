"""Interleaving, warm-up, figures and ratios."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from gapless.bench.decode import ServedTiming, Timing
from gapless.bench.prompts import PromptSet
from gapless.bench.rounds import (
    DECODE_RATE,
    FIRST_TOKEN_MS,
    MS_PER_TOKEN,
    TOKENS_PER_STEP,
    TOTAL_RATE,
    Measurement,
    Spread,
    ratio,
    run_rounds,
    spread,
)
from gapless.core.counters import DecodeCounters
from gapless.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

SETS = [PromptSet(single=str(i), batch=()) for i in range(4)]


class FakeSide:
    """Writes down what it is asked to do."""

    def __init__(self, name: str, calls: list[str], seconds: float = 1.0) -> None:
        self.name = name
        self._calls = calls
        self._seconds = seconds

    def measure(self, prompts: PromptSet) -> Mapping[str, Timing]:
        """Take longer with each set."""
        self._calls.append(self.name + prompts.single)
        return {"single": Timing(12, self._seconds * (1 + int(prompts.single)))}


def test_sides_take_turns_on_the_same_prompts() -> None:
    calls: list[str] = []
    rounds: list[int] = []
    sides = [FakeSide("A", calls), FakeSide("B", calls)]
    found = run_rounds(sides, SETS, num_warmup=1, report=rounds.append)
    assert calls == ["A0", "B0", "B1", "A1", "A2", "B2", "B3", "A3"]
    assert rounds == [0, 1, 2, 3]
    assert [(m.round, m.side) for m in found] == [
        (1, "B"), (1, "A"), (2, "A"), (2, "B"), (3, "B"), (3, "A"),
    ]  # fmt: skip


def test_each_side_is_first_in_turn() -> None:
    calls: list[str] = []
    run_rounds([FakeSide(n, calls) for n in "ABC"], SETS, num_warmup=0)
    assert calls[::3] == ["A0", "B1", "C2", "A3"]
    assert sorted(calls[3:6]) == ["A1", "B1", "C1"]


def test_ratio_is_taken_within_rounds() -> None:
    calls: list[str] = []
    sides = [FakeSide("A", calls, seconds=1.0), FakeSide("B", calls, seconds=0.5)]
    found = run_rounds(sides, SETS, num_warmup=1)
    above, below = (spread(found, side, "single", TOTAL_RATE) for side in "BA")
    assert below.values == (6.0, 4.0, 3.0)
    assert ratio(above, below) == Spread((2.0, 2.0, 2.0))


def test_spread() -> None:
    found = Spread((5.0, 1.0, 2.0, 9.0))
    assert (found.median, found.minimum, found.maximum) == (3.5, 1.0, 9.0)


def test_figures_of_a_served_run() -> None:
    counters = DecodeCounters(num_steps=4, num_emitted=10)
    timing = ServedTiming(12, 5.0, 1.0, 8, counters)
    metrics = (TOTAL_RATE, DECODE_RATE, MS_PER_TOKEN, FIRST_TOKEN_MS, TOKENS_PER_STEP)
    figures = [metric.of(timing) for metric in metrics]
    assert figures == pytest.approx([2.4, 2.0, 500.0, 1000.0, 2.5])
    assert Measurement(2, "A", "single", timing).to_json() == {
        "round": 2, "side": "A", "mode": "single", "num_tokens": 12, "seconds": 5.0,
        "first_token_seconds": 1.0, "decode_tokens": 8, "counters": asdict(counters),
    }  # fmt: skip


def test_what_came_with_the_first_tokens_cannot_be_timed() -> None:
    timing = ServedTiming(4, 5.0, 5.0, 0, DecodeCounters())
    for metric in (DECODE_RATE, MS_PER_TOKEN):
        with pytest.raises(InvalidRequest, match="raise output_len"):
            metric.of(timing)
