"""Figures of a load run: latencies, throughput, goodput, failures, and the client's own lag."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gapless.bench.serve_client import Record
    from gapless.bench.serve_load import Run

_SLO_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Spread:
    """A quantity over requests or events; all NaN where there was none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Summarise what is there. Percentiles are interpolated linearly between ranks."""
        found = np.array([value for value in values if value is not None])
        if not found.size:
            return cls(0, *[float("nan")] * 4)
        p50, p90, p99 = (float(p) for p in np.percentile(found, (50, 90, 99)))
        return cls(found.size, float(found.mean()), p50, p90, p99)


@dataclass(frozen=True)
class Slo:
    """Limits that a request must keep to count for goodput, in milliseconds."""

    limits: Mapping[str, float]
    """Any of `ttft`, `tpot`, `e2e`."""

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `ttft:200,tpot:50,e2e:5000`, or some of these.

        Raises:
            ConfigError: `text` is not of that form.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if name not in _SLO_NAMES or name in limits or not limit > 0:
                raise ConfigError(
                    f"slo={text!r}: {part!r} is not a limit; want each of {', '.join(_SLO_NAMES)} "
                    "at most once, in milliseconds: ttft:200,tpot:50"
                )
            limits[name] = limit
        return cls(limits)

    def is_met(self, record: Record) -> bool:
        """Whether a reply ended as it should, within the limits.

        A reply of one token has no time per further token, and keeps any limit on it.
        """
        if record.failure is not None:
            return False
        found = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
        return all(1e3 * (found[name] or 0.0) <= limit for name, limit in self.limits.items())


@dataclass(frozen=True)
class Summary:
    """A run's figures; milliseconds, and rates per second of the run."""

    latencies: Mapping[str, Spread]
    """ttft, tpot, itl, e2e; of replies that ended as they should."""
    client_lags: Mapping[str, Spread]
    """`send`: how late requests left; `loop`: how late the client's timers were."""
    seconds: float
    num_completed: int
    num_failed: int
    num_skipped: int
    failures: Mapping[str, int]
    """Failed requests by kind."""
    prompt_tokens: int
    """Of completed requests, as the server counts; 0 where it does not."""
    cached_tokens: int
    output_tokens: int
    num_uncounted: int
    """Completed requests for which the server gave no usage: events stand for their tokens."""
    request_rate: float
    prompt_token_rate: float
    output_token_rate: float
    goodput: float | None
    """Requests within the limits; None where no limits were given."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a JSON file; None where there is no figure."""
        return {name: _without_nan(value) for name, value in asdict(self).items()}


def summarize(run: Run, slo: Slo | None = None) -> Summary:
    """Reduce a run to its figures."""
    done = [record for record in run.records if record.failure is None]
    failures = Counter(record.failure for record in run.records if record.failure is not None)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done)
    output_tokens = sum(record.num_tokens for record in done)
    # a run of nothing has rates of 0
    seconds = run.seconds or float("inf")
    return Summary(
        latencies={
            "ttft": Spread.of(_ms(record.ttft for record in done)),
            "tpot": Spread.of(_ms(record.tpot for record in done)),
            "itl": Spread.of(_ms(itl for record in done for itl in record.itls)),
            "e2e": Spread.of(_ms(record.e2e for record in done)),
        },
        client_lags={
            "send": Spread.of(_ms(record.lag for record in run.records)),
            "loop": Spread.of(_ms(run.loop_lags)),
        },
        seconds=run.seconds,
        num_completed=len(done),
        num_failed=len(run.records) - len(done),
        num_skipped=run.num_skipped,
        failures=dict(sorted(failures.items())),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(record.cached_tokens or 0 for record in done),
        output_tokens=output_tokens,
        num_uncounted=sum(record.completion_tokens is None for record in done),
        request_rate=len(done) / seconds,
        prompt_token_rate=prompt_tokens / seconds,
        output_token_rate=output_tokens / seconds,
        goodput=None if slo is None else sum(map(slo.is_met, done)) / seconds,
    )


def latency_rows(summary: Summary) -> list[list[str]]:
    """Cells of the table of latencies, a row each, after a row of heads."""
    labels = {
        "time to first token, ms": summary.latencies["ttft"],
        "time per further token, ms": summary.latencies["tpot"],
        "between events, ms": summary.latencies["itl"],
        "whole request, ms": summary.latencies["e2e"],
        "client: sent late by, ms": summary.client_lags["send"],
        "client: timers late by, ms": summary.client_lags["loop"],
    }
    rows = [["", "mean", "p50", "p90", "p99"]]
    for label, own in labels.items():
        figures = (own.mean, own.p50, own.p90, own.p99)
        rows.append([label, *("-" if own.count == 0 else f"{figure:.2f}" for figure in figures)])
    return rows


def total_rows(summary: Summary) -> list[list[str]]:
    """Cells of the table of totals."""
    rows = [
        ["seconds", f"{summary.seconds:.2f}"],
        ["requests completed", str(summary.num_completed)],
        ["requests failed", str(summary.num_failed)],
        *([f"  {kind}", str(count)] for kind, count in summary.failures.items()),
        ["requests/s", f"{summary.request_rate:.3f}"],
        ["prompt tokens", str(summary.prompt_tokens)],
        ["  of them cached", str(summary.cached_tokens)],
        ["output tokens", str(summary.output_tokens)],
        ["prompt tokens/s", f"{summary.prompt_token_rate:.1f}"],
        ["output tokens/s", f"{summary.output_token_rate:.1f}"],
    ]
    if summary.num_skipped:
        rows.insert(3, ["turns not sent after a failure", str(summary.num_skipped)])
    if summary.goodput is not None:
        rows.append(["requests/s within the limits", f"{summary.goodput:.3f}"])
    return rows


def notes(summary: Summary) -> list[str]:
    """Lines on what limits the figures."""
    found = []
    lag, ttft = summary.client_lags, summary.latencies["ttft"]
    late = max(lag["send"].p99, lag["loop"].p99)
    # NaN, where there was nothing, is not above anything
    if late > 0.1 * ttft.p50 and late > 5.0:
        found.append(
            f"The client itself was up to {late:.1f} ms late (p99), beside {ttft.p50:.1f} ms to "
            "the first token (p50): run it on an idle machine, or ask for less load."
        )
    if summary.num_uncounted:
        found.append(
            f"{summary.num_uncounted} replies came without usage: their events are counted as "
            "tokens, and their prompts not at all."
        )
    return found


def records_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Every request's raw figures, in seconds to the microsecond, in the order they were due."""
    ordered = sorted(records, key=lambda record: (record.due, record.job))
    return [
        {
            "job": record.job,
            "turn": record.turn,
            "due": round(record.due, 6),
            "start": round(record.start, 6),
            "end": round(record.end, 6),
            "text_times": [round(moment, 6) for moment in record.text_times],
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "finish_reason": record.finish_reason,
            "failure": record.failure,
            "detail": record.detail,
        }
        for record in ordered
    ]


def _ms(seconds: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else 1e3 * value for value in seconds]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
