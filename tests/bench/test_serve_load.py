"""Arrivals, concurrency and conversations, against a scripted server."""

from __future__ import annotations

import asyncio
import math
import statistics
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gapless.bench.serve_client import Client, Endpoint, Record
from gapless.bench.serve_load import Load, Run, arrival_times, measure_words, run_load
from gapless.bench.serve_workloads import Job
from gapless.errors import RequestError
from tests.bench.stub_server import (
    Part,
    Reply,
    Stub,
    chat_end,
    chat_text,
    event,
    steady,
    stub_server,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gapless.bench.serve_client import Kind
    from tests.bench.stub_server import Body


def run(
    script: Callable[[Body], Reply], jobs: Sequence[Job], load: Load, kind: Kind = "chat"
) -> tuple[Run, Stub]:
    """Run jobs against a scripted server."""

    async def both() -> tuple[Run, Stub]:
        async with (
            stub_server(script) as stub,
            Client(Endpoint(stub.url, kind, "m", timeout=20.0)) as client,
        ):
            told: list[Record] = []
            found = await run_load(client, jobs, load, told.append)
        assert told == found.records
        return found, stub

    return asyncio.run(both())


def singles(count: int, output_len: int = 2) -> list[Job]:
    """Requests with a text of their own."""
    return [Job(f"text {i}", (output_len,)) for i in range(count)]


def test_arrivals_are_poisson() -> None:
    times = arrival_times(20_000, 8.0, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() > 0
    # an exponential's mean and deviation are equal; 5 standard errors of 20,000 draws
    assert gaps.mean() == pytest.approx(1 / 8, rel=5 / math.sqrt(20_000))
    assert gaps.std() == pytest.approx(1 / 8, rel=10 / math.sqrt(20_000))
    # Kolmogorov-Smirnov against the exponential, at one in a thousand
    ordered = np.sort(gaps)
    expected = 1 - np.exp(-8 * ordered)
    rank = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(rank - expected).max() < 1.95 / math.sqrt(len(gaps))
    # and memoryless: a gap says nothing about the next
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.05


def test_arrivals_reproduce() -> None:
    assert arrival_times(9, 2.0, seed=1) == arrival_times(9, 2.0, seed=1)
    assert arrival_times(9, 2.0, seed=1) != arrival_times(9, 2.0, seed=2)
    assert arrival_times(3, math.inf, seed=1) == [0.0, 0.0, 0.0]
    assert arrival_times(0, 2.0, seed=1) == []


def test_open_loop_does_not_wait_for_replies() -> None:
    found, stub = run(steady(1.0, 0.0), singles(12), Load(rate=40.0, seed=5))
    due = arrival_times(12, 40.0, seed=5)
    starts = {record.job: record.start for record in found.records}
    assert due[-1] < 0.5
    assert stub.most_at_once == 12
    # timers may round by a clock tick
    assert all(starts[job] > moment - 0.002 for job, moment in enumerate(due))
    assert statistics.median(record.lag for record in found.records) < 0.1
    assert [record.lag for record in found.records] == [
        pytest.approx(record.start - due[record.job]) for record in found.records
    ]
    assert found.seconds == max(record.end for record in found.records)


def test_closed_loop_keeps_its_number() -> None:
    found, stub = run(steady(0.05, 0.0), singles(11), Load(concurrency=3))
    assert stub.most_at_once == 3
    assert sorted(record.job for record in found.records) == list(range(11))
    # 11 requests by 3 are 4 rounds
    assert found.seconds >= 4 * 0.05
    assert statistics.median(record.lag for record in found.records) < 0.05


def test_all_at_once() -> None:
    found, stub = run(steady(0.5, 0.0), singles(20), Load())
    assert stub.most_at_once == 20
    assert all(record.due == 0.0 for record in found.records)


def test_turns_follow_replies() -> None:
    jobs = [Job("first", (2, 3, 1), ("second", "third"))]
    found, stub = run(steady(0.05, 0.0), jobs, Load())
    assert [record.turn for record in found.records] == [0, 1, 2]
    for before, after in zip(found.records, found.records[1:], strict=False):
        assert after.due >= before.end
    assert [body["max_tokens"] for body in stub.bodies] == [2, 3, 1]
    assert stub.bodies[2]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "t0 t1 "},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "t0 t1 t2 "},
        {"role": "user", "content": "third"},
    ]


def test_turns_of_texts_are_joined() -> None:
    def script(body: Body) -> Reply:
        text = event({"choices": [{"text": "reply", "finish_reason": "stop"}]})
        return Reply((Part(0.0, text),))

    jobs = [Job("first", (2, 3), ("second",), {"top_p": 0.5})]
    _, stub = run(script, jobs, Load(), kind="completions")
    assert [body["prompt"] for body in stub.bodies] == ["first", "firstreply\nsecond"]
    assert [body["top_p"] for body in stub.bodies] == [0.5, 0.5]


def test_failed_turn_ends_its_conversation_only() -> None:
    def script(body: Body) -> Reply:
        if "bad" in body["messages"][-1]["content"]:
            return Reply(status=503)
        return Reply((Part(0.0, chat_text("fine")), Part(0.0, chat_end(3, 1))))

    jobs = [Job("a", (1, 1, 1, 1), ("bad", "c", "d")), Job("x", (1, 1), ("y",))]
    found, _ = run(script, jobs, Load(concurrency=1))
    assert [(r.job, r.turn, r.failure) for r in found.records] == [
        (0, 0, None), (0, 1, "HTTP 503"), (1, 0, None), (1, 1, None),
    ]  # fmt: skip
    assert found.num_skipped == 2


def test_lag_of_a_busy_client_is_seen() -> None:
    import time

    def blocking(_: Record) -> None:
        time.sleep(0.3)

    async def both() -> Run:
        async with (
            stub_server(steady(0.0, 0.0)) as stub,
            Client(Endpoint(stub.url, "chat", "m")) as client,
        ):
            return await run_load(client, singles(2), Load(rate=20.0, seed=1), blocking)

    found = asyncio.run(both())
    assert max(found.loop_lags) > 0.2


def test_words_are_measured() -> None:
    async def ask(script: Callable[[Body], Reply]) -> tuple[float, float]:
        async with stub_server(script) as stub:
            words = await measure_words(Endpoint(stub.url, "chat", "m"))
        return words.tokens_per_word, words.overhead

    def double(body: Body) -> Reply:
        return Reply((Part(0.0, chat_text("a")), Part(0.0, chat_end(2 * words_of(body) + 9, 1))))

    assert asyncio.run(ask(double)) == (2.0, 9.0)
    with pytest.raises(RequestError, match=r"HTTP 401.*api_key"):
        asyncio.run(ask(lambda _: Reply(status=401)))
    bare = event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})
    with pytest.raises(RequestError, match="gives no usage"):
        asyncio.run(ask(lambda _: Reply((Part(0.0, bare),))))
