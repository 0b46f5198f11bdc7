"""Sides measured in turn, round by round, so that a drifting machine treats all of them alike."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gapless.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gapless.bench.decode import ServedTiming, Side, Timing
    from gapless.bench.prompts import PromptSet


@dataclass(frozen=True)
class Measurement:
    """One mode of one side in one round."""

    round: int
    """From 1."""
    side: str
    mode: str
    timing: Timing

    def to_json(self) -> dict[str, Any]:
        """Raw figures, for a JSON file."""
        return {"round": self.round, "side": self.side, "mode": self.mode, **asdict(self.timing)}


@dataclass(frozen=True)
class Metric:
    """A figure made of a timing."""

    label: str
    of: Callable[[Any], float]


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def maximum(self) -> float:
        """The largest value."""
        return max(self.values)


def _total_rate(timing: Timing) -> float:
    return timing.num_tokens / timing.seconds


def _decode_rate(timing: ServedTiming) -> float:
    _check_decoded(timing)
    return timing.decode_tokens / timing.decode_seconds


def _ms_per_token(timing: ServedTiming) -> float:
    _check_decoded(timing)
    return 1e3 * timing.decode_seconds / timing.decode_tokens


def _tokens_per_step(timing: ServedTiming) -> float:
    return timing.counters.accepted_len


def _check_decoded(timing: ServedTiming) -> None:
    if timing.decode_tokens == 0:
        raise InvalidRequest(
            f"all {timing.num_tokens} tokens came with the first ones, so decoding cannot be "
            "timed; raise output_len"
        )


def _first_token_ms(timing: ServedTiming) -> float:
    return 1e3 * timing.first_token_seconds


TOTAL_RATE = Metric("tokens/s with prefill", _total_rate)
DECODE_RATE = Metric("decode tokens/s", _decode_rate)
TOKENS_PER_STEP = Metric("tokens per request and step", _tokens_per_step)
MS_PER_TOKEN = Metric("decode ms per token", _ms_per_token)
FIRST_TOKEN_MS = Metric("time to first token, ms", _first_token_ms)

SERVED_METRICS = {
    "single": (DECODE_RATE, MS_PER_TOKEN, TOKENS_PER_STEP, FIRST_TOKEN_MS, TOTAL_RATE),
    "concurrent": (DECODE_RATE, TOTAL_RATE),
}
PEER_METRICS = {"single": (TOTAL_RATE,), "sequential": (TOTAL_RATE,), "batch": (TOTAL_RATE,)}


def run_rounds(
    sides: Sequence[Side],
    prompts: Sequence[PromptSet],
    *,
    num_warmup: int,
    report: Callable[[int], None] = lambda _: None,
) -> list[Measurement]:
    """Measure every side with each prompt set in turn; the first `num_warmup` are not kept.

    The order of the sides turns with the rounds. `report` is told each round before it starts;
    rounds count from 1, warm-up is below.
    """
    kept = []
    for index, prompt_set in enumerate(prompts):
        number = index - num_warmup + 1
        report(number)
        turn = index % len(sides)
        for side in (*sides[turn:], *sides[:turn]):
            timings = side.measure(prompt_set)
            if number >= 1:
                kept += [Measurement(number, side.name, mode, t) for mode, t in timings.items()]
    return kept


def spread(measurements: Sequence[Measurement], side: str, mode: str, metric: Metric) -> Spread:
    """Collect one figure of one side over the rounds."""
    found = sorted(
        (m for m in measurements if (m.side, m.mode) == (side, mode)), key=lambda m: m.round
    )
    return Spread(tuple(metric.of(m.timing) for m in found))


def ratio(above: Spread, below: Spread) -> Spread:
    """Divide round by round."""
    return Spread(tuple(a / b for a, b in zip(above.values, below.values, strict=True)))
