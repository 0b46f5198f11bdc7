"""The figures of a run, against arithmetic done another way."""

from __future__ import annotations

import json
import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.serve_client import Record
from gapless.bench.serve_load import Run
from gapless.bench.serve_plot import latency_svg, ticks
from gapless.bench.serve_report import (
    Slo,
    Spread,
    latency_rows,
    notes,
    records_json,
    summarize,
    total_rows,
)
from gapless.errors import ConfigError

SECONDS = st.floats(1e-6, 1e3)


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between the two ranks around share * (n - 1)."""
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


@given(st.lists(st.none() | SECONDS, max_size=40))
def test_percentiles(values: list[float | None]) -> None:
    found = Spread.of(values)
    there = [value for value in values if value is not None]
    assert found.count == len(there)
    if not there:
        assert math.isnan(found.p50)
        return
    assert found.mean == pytest.approx(math.fsum(there) / len(there))
    for own, share in ((found.p50, 0.5), (found.p90, 0.9), (found.p99, 0.99)):
        assert own == pytest.approx(percentile(there, share))


@st.composite
def records(draw: st.DrawFn) -> Record:
    """A request with times in order."""
    moments = sorted(draw(st.lists(SECONDS, min_size=3, max_size=8)))
    due, start, *texts = moments
    failure = draw(st.sampled_from([None, None, "timeout", "HTTP 500"]))
    return Record(
        job=draw(st.integers(0, 9)), turn=0, due=due, start=start, end=texts[-1],
        text_times=[] if failure == "HTTP 500" else texts,
        prompt_tokens=draw(st.none() | st.integers(0, 99)),
        completion_tokens=draw(st.none() | st.integers(1, 99)),
        cached_tokens=draw(st.none() | st.integers(0, 9)),
        failure=failure,
    )  # fmt: skip


@given(
    found=st.lists(records(), max_size=12),
    limits=st.dictionaries(st.sampled_from(["ttft", "tpot", "e2e"]), st.floats(1.0, 1e5)),
)
def test_figures_are_those_counted_by_hand(found: list[Record], limits: dict[str, float]) -> None:
    summary = summarize(Run(found, seconds=4.0), Slo(limits))
    good = tokens = failed = uncounted = 0
    ttfts, gaps = [], []
    for record in found:
        if record.failure is not None:
            failed += 1
            continue
        count = record.completion_tokens
        uncounted += count is None
        count = len(record.text_times) if count is None else count
        tokens += count
        first, last = record.text_times[0], record.end
        ttfts.append(1e3 * (first - record.start))
        gaps += [
            1e3 * (record.text_times[i] - record.text_times[i - 1])
            for i in range(1, len(record.text_times))
        ]
        own = {"ttft": first - record.start, "e2e": last - record.start}
        own["tpot"] = (last - first) / (count - 1) if count > 1 else 0.0
        good += all(own[name] * 1e3 <= limit for name, limit in limits.items())
    assert summary.goodput == good / 4.0
    assert summary.output_tokens == tokens
    assert (summary.num_failed, sum(summary.failures.values())) == (failed, failed)
    assert summary.num_completed == len(found) - failed
    assert summary.num_uncounted == uncounted
    assert summary.output_token_rate == tokens / 4.0
    if ttfts:
        assert summary.latencies["ttft"].p90 == pytest.approx(percentile(ttfts, 0.9))
        assert summary.latencies["itl"].count == len(gaps)
    json.loads(json.dumps(summary.to_json(), allow_nan=False))
    json.dumps(records_json(found), allow_nan=False)
    assert len(latency_rows(summary)) == 7
    assert ["requests failed", str(failed)] in total_rows(summary)


def test_limits() -> None:
    assert Slo.parse("ttft:200, e2e:5e3").limits == {"ttft": 200.0, "e2e": 5000.0}


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:0", "ttft:-1", "itl:5", "ttft:1,ttft:2", "ttft:nan", "1"]
)
def test_wrong_limits(text: str) -> None:
    with pytest.raises(ConfigError, match="in milliseconds"):
        Slo.parse(text)


def sample(ttft: float, lag: float = 0.0) -> Record:
    """A request of three tokens."""
    return Record(
        job=0, turn=0, due=1.0, start=1.0 + lag, end=2.0 + lag,
        text_times=[1.0 + lag + ttft, 1.5 + lag, 2.0 + lag], prompt_tokens=4, completion_tokens=3,
        cached_tokens=1,
    )  # fmt: skip


def test_empty_run() -> None:
    summary = summarize(Run(), Slo({"ttft": 1.0}))
    assert (summary.request_rate, summary.goodput) == (0.0, 0.0)
    assert latency_rows(summary)[1][1:] == ["-"] * 4
    assert notes(summary) == []
    assert summary.to_json()["latencies"]["ttft"]["p50"] is None


def test_late_client_is_named() -> None:
    assert notes(summarize(Run([sample(0.1)], 3.0, [0.001]))) == []
    for run in (Run([sample(0.1, lag=0.05)], 3.0, [0.0]), Run([sample(0.1)], 3.0, [0.05])):
        (note,) = notes(summarize(run))
        assert "50.0 ms late (p99), beside 100.0 ms" in note


def test_missing_usage_is_named() -> None:
    record = sample(0.1)
    record.completion_tokens = None
    (note,) = notes(summarize(Run([record], 3.0)))
    assert note.startswith("1 replies came without usage")


def test_plot_shows_every_request() -> None:
    failed = sample(0.2)
    failed.failure = "timeout"
    svg = latency_svg([sample(0.1), sample(0.3), failed], "a < b & c")
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    # two dots for a reply, one for a failure, three in the legend
    assert len(root.findall(f"{space}circle")) == 2 * 2 + 1 + 3
    texts = [element.text for element in root.findall(f"{space}text")]
    assert "a < b & c" in texts
    assert any("time to first token: 2" in (text or "") for text in texts)
    for circle in root.findall(f"{space}circle"):
        assert 0 <= float(circle.get("cx")) <= 960
        assert 0 <= float(circle.get("cy")) <= 640


def test_plot_of_nothing() -> None:
    ElementTree.fromstring(latency_svg([], "nothing"))


@given(st.floats(1e-3, 1e7))
def test_ticks_are_round_and_few(highest: float) -> None:
    found = ticks(highest)
    assert 3 <= len(found) <= 7
    assert found[0] == 0.0
    assert found[-1] <= highest * (1 + 1e-6)
    leading = found[1] / 10.0 ** math.floor(math.log10(found[1]) + 1e-9)
    assert leading == pytest.approx(round(leading))
