"""An OpenAI endpoint that answers by script, at scripted times: HTTP/1.1 over asyncio streams."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Body = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Bytes to send after a pause in seconds."""

    pause: float
    data: bytes


@dataclass(frozen=True)
class Reply:
    """What one request gets."""

    parts: tuple[Part, ...] = ()
    status: int = 200
    is_cut: bool = False
    """Close the connection in the middle of the body."""


@dataclass
class Stub:
    """Where the server listens and what it was asked."""

    port: int = 0
    bodies: list[Any] = field(default_factory=list)
    """Of posts, in the order of their arrival."""
    keys: list[str | None] = field(default_factory=list)
    moments: list[list[float]] = field(default_factory=list)
    """For each post when it had arrived, and when each part was sent."""
    most_at_once: int = 0

    @property
    def url(self) -> str:
        """Its base."""
        return f"http://127.0.0.1:{self.port}"


def event(value: object) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(value)}\n\n".encode()


def chat_text(text: str) -> bytes:
    """An event with text."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def chat_end(prompt: int, completion: int, cached: int = 0) -> bytes:
    """The events that end a chat reply."""
    finish = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return finish + event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


def words_of(body: Body) -> int:
    """The number of words of a request's prompt."""
    texts = [m["content"] for m in body["messages"]] if "messages" in body else [body["prompt"]]
    return sum(len(text.split()) for text in texts)


def steady(ttft: float, itl: float) -> Callable[[Body], Reply]:
    """A script: `max_tokens` words of text, the first after `ttft` seconds, then each `itl`."""

    def script(body: Body) -> Reply:
        count = body["max_tokens"]
        parts = [Part(ttft if i == 0 else itl, chat_text(f"t{i} ")) for i in range(count)]
        return Reply((*parts, Part(0.0, chat_end(words_of(body) + 7, count, cached=2))))

    return script


@asynccontextmanager
async def stub_server(script: Callable[[Body], Reply]) -> AsyncIterator[Stub]:
    """Answer posts by `script`, and a list of models to anything that is got."""
    stub = Stub()
    active = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal active
        try:
            while head := await _read_head(reader):
                body = await reader.readexactly(int(head.get("content-length", "0")))
                if head["method"] == "GET":
                    _send_json(writer, {"data": [{"id": "stub"}]})
                    continue
                stub.bodies.append(json.loads(body))
                stub.keys.append(head.get("authorization"))
                active += 1
                stub.most_at_once = max(stub.most_at_once, active)
                try:
                    stub.moments.append([time.perf_counter()])
                    await _answer(writer, script(stub.bodies[-1]), stub.moments[-1])
                finally:
                    active -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()


async def _read_head(reader: asyncio.StreamReader) -> dict[str, str]:
    """Return the headers in lower case and the method; nothing at the end of the connection."""
    first = (await reader.readline()).decode()
    head = {"method": first.split(" ")[0]} if first else {}
    while first and (line := (await reader.readline()).decode().strip()):
        name, _, value = line.partition(":")
        head[name.lower()] = value.strip()
    return head


def _send_json(writer: asyncio.StreamWriter, value: object) -> None:
    data = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)


async def _answer(writer: asyncio.StreamWriter, reply: Reply, moments: list[float]) -> None:
    writer.write(
        b"HTTP/1.1 %d Scripted\r\ncontent-type: text/event-stream\r\n"
        b"transfer-encoding: chunked\r\n\r\n" % reply.status
    )
    for part in reply.parts:
        await asyncio.sleep(part.pause)
        moments.append(time.perf_counter())
        writer.write(b"%x\r\n%s\r\n" % (len(part.data), part.data))
        await writer.drain()
    if reply.is_cut:
        raise ConnectionResetError
    writer.write(b"0\r\n\r\n")
    await writer.drain()
