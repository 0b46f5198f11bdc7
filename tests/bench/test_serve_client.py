"""Server-sent events cut anywhere, and requests to a scripted server."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.bench.serve_client import (
    Client,
    Endpoint,
    EventParser,
    Record,
    first_model,
    server_info,
)
from gapless.errors import ConfigError
from tests.bench.stub_server import Part, Reply, chat_end, chat_text, event, steady, stub_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.bench.serve_client import Kind
    from tests.bench.stub_server import Body

# no line ends, which would make other lines of them
LINE = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=8)
EVENT = st.lists(LINE, min_size=1, max_size=3)


@given(
    events=st.lists(EVENT, max_size=6),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    space=st.sampled_from([b" ", b""]),
    noise=st.sampled_from([b"", b": comment", b"id: 7", b"retry: 10", b"event: message"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_events_survive_any_cuts(
    events: list[list[str]], line_end: bytes, space: bytes, noise: bytes, cuts: list[int]
) -> None:
    stream = b""
    for lines in events:
        stream += noise + line_end if noise else b""
        for line in lines:
            # one blank after the colon is no data
            blank = b" " if line.startswith(" ") else space
            stream += b"data:" + blank + line.encode() + line_end
        stream += line_end
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parser = EventParser()
    found = [
        data for start, end in itertools.pairwise(bounds) for data in parser.feed(stream[start:end])
    ]
    assert found == ["\n".join(lines) for lines in events]


def test_event_ends_at_its_blank_line_only() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n\n\n") == ["a"]
    assert parser.feed(b": only a comment\n\nother: x\n\n") == []
    assert parser.feed(b"data: b\r") == []
    # the line feed belongs to the carriage return before it
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\r\n") == ["b"]


def send(
    script: Callable[[Body], Reply], kind: Kind = "chat", timeout: float = 30.0, tokens: int = 4
) -> Record:
    """Send one request to a scripted server."""
    return send_and_watch(script, kind, timeout, tokens)[0]


def send_and_watch(
    script: Callable[[Body], Reply], kind: Kind, timeout: float, tokens: int
) -> tuple[Record, list[float]]:
    """Send one request; return the client's record and the server's moments."""

    async def run() -> tuple[Record, list[float]]:
        async with stub_server(script) as stub:
            endpoint = Endpoint(stub.url, kind, "m", timeout=timeout)
            async with Client(endpoint) as client:
                record = Record(job=0, turn=0, due=0.0)
                await client.send(record, "one two", tokens, {})
        return record, stub.moments[0]

    return asyncio.run(run())


def test_times_are_those_of_the_script() -> None:
    record, (arrival, *sent) = send_and_watch(steady(0.3, 0.1), "chat", 30.0, tokens=5)
    assert record.failure is None
    # pauses are lower bounds; a busy machine lengthens them for the server and its client alike
    assert record.ttft >= 0.3
    assert record.ttft == pytest.approx(sent[0] - arrival, abs=0.05)
    gaps = [after - before for before, after in itertools.pairwise(sent[:5])]
    assert min(gaps) >= 0.099
    assert record.itls == pytest.approx(gaps, abs=0.03)
    assert record.e2e == pytest.approx(sent[-1] - arrival, abs=0.05)
    assert record.tpot == pytest.approx(sum(gaps) / 4, abs=0.02)
    assert record.text == "t0 t1 t2 t3 t4 "
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (9, 5, 2)


def test_events_without_text_are_no_tokens() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    script = Reply((Part(0.0, role), Part(0.2, chat_text("a")), Part(0.0, chat_end(1, 2))))
    record = send(lambda _: script)
    assert record.ttft > 0.19
    assert len(record.text_times) == 1


def test_empty_reply_has_its_end_for_a_first_token() -> None:
    record = send(lambda _: Reply((Part(0.1, chat_end(1, 1)),)))
    assert record.failure is None
    assert record.ttft > 0.09
    assert record.tpot is None


def test_texts_of_completions_and_of_reasoning() -> None:
    parts = [event({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})]
    parts += [event({"choices": [{"delta": {"reasoning_content": "b"}}]})]
    parts += [event({"choices": [{"text": "c", "finish_reason": "stop"}]})]
    record = send(lambda _: Reply(tuple(Part(0.0, part) for part in parts)), kind="completions")
    assert (record.text, record.finish_reason, record.failure) == ("abc", "stop", None)
    assert record.completion_tokens is None
    assert record.num_tokens == len(record.text_times) == 3


@pytest.mark.parametrize(
    ("reply", "failure", "detail"),
    [
        (Reply((Part(0.0, b'{"error": "busy"}'),), status=429), "HTTP 429", "busy"),
        (Reply((Part(0.0, event({"error": {"message": "x"}})),)), "error event", "x"),
        (Reply((Part(0.0, b"data: {oops\n\n"),)), "malformed event", "{oops"),
        (Reply((Part(0.0, event({"choices": [7]})),)), "malformed event", "7"),
        (Reply((Part(0.0, chat_text("a")), Part(0.0, b"data: [DONE]\n\n"))), "cut short", "before"),
        (Reply((Part(0.0, chat_text("a")),), is_cut=True), "connection lost", "Error"),
        (Reply((Part(9.0, chat_text("a")),)), "timeout", "0.3"),
    ],
)
def test_failures_have_kinds(reply: Reply, failure: str, detail: str) -> None:
    record = send(lambda _: reply, timeout=0.3)
    assert record.failure == failure
    assert detail in record.detail
    assert record.end > record.start


def test_nobody_listens() -> None:
    async def run() -> Record:
        async with stub_server(steady(0, 0)) as stub:
            url = stub.url
        record = Record(job=0, turn=0, due=0.0)
        async with Client(Endpoint(url, "chat", "m")) as client:
            await client.send(record, "one", 1, {})
        assert await server_info(url, None) is None
        with pytest.raises(ConfigError, match="start the server"):
            await first_model(url, None)
        return record

    assert asyncio.run(run()).failure == "not connected"


def test_bodies_are_openai_s() -> None:
    chat = Endpoint("http://h:1/", "chat", "m", fields={"temperature": 0.5})
    assert chat.url == "http://h:1/v1/chat/completions"
    body = chat.body("hi", 3, {"temperature": 1, "n": 1})
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "temperature": 1,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = Endpoint("https://h/v1", "completions", "m")
    assert text.url == "https://h/v1/completions"
    assert text.body("hi", 3, {})["prompt"] == "hi"
    with pytest.raises(ConfigError, match="takes no messages"):
        text.body(({"role": "user", "content": "hi"},), 3, {})


def test_key_is_sent() -> None:
    async def run() -> list[str | None]:
        async with stub_server(steady(0, 0)) as stub:
            for key in ("secret", None):
                async with Client(Endpoint(stub.url, "chat", "m", key)) as client:
                    await client.send(Record(job=0, turn=0, due=0.0), "one", 1, {})
        return stub.keys

    assert asyncio.run(run()) == ["Bearer secret", None]
