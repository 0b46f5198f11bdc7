"""One streamed request to an OpenAI endpoint, and when its parts arrived."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import httpx2

from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gapless.bench.serve_workloads import Messages

Kind = Literal["completions", "chat"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAX_DETAIL = 300
# where servers put text; the last two hold a model's reasoning
_TEXT_KEYS = ("content", "reasoning_content", "reasoning")


class EventParser:
    """Server-sent events out of bytes cut anywhere (WHATWG HTML, section 9.2.6).

    Only their data is kept; comments, ids, names and retry times are not.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._ended_with_cr = False

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of each event that `chunk` completes."""
        if not chunk:
            return []
        # the second half of a CR LF that was cut in two
        if self._ended_with_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._ended_with_cr = False
            if not chunk:
                return []
        self._ended_with_cr = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))


@dataclass
class Record:
    """One request as its client saw it. Times are seconds since the start of the run."""

    job: int
    """Index of its conversation."""
    turn: int
    """Index in the conversation."""
    due: float
    """When it should have been sent."""
    start: float = 0.0
    """When it was sent."""
    end: float = 0.0
    """When the reply had ended, or failed."""
    text_times: list[float] = field(default_factory=list)
    """Arrival of each event that brought text, or the end of a reply without any."""
    text: str = ""
    prompt_tokens: int | None = None
    """As the server counts; None where it does not say."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the server took from its prefix cache."""
    finish_reason: str | None = None
    failure: str | None = None
    """The kind of failure; None for a reply that ended as it should."""
    detail: str = ""
    """What the server or the connection said about it."""

    @property
    def lag(self) -> float:
        """How late the client was, in seconds."""
        return self.start - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None where there was none."""
        return self.text_times[0] - self.start if self.text_times else None

    @property
    def e2e(self) -> float:
        """Seconds from the request to the end of its reply."""
        return self.end - self.start

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply; events with text where the server does not count."""
        return len(self.text_times) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds from the first text to the end, per further token; None where there is none."""
        if self.ttft is None or self.num_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between events with text. With speculation an event brings several tokens."""
        return [b - a for a, b in pairwise(self.text_times)]


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what all of them ask for."""

    base_url: str
    """Scheme, host and port, with or without `/v1`."""
    kind: Kind
    model: str
    api_key: str | None = None
    timeout: float = 600.0
    """Most seconds of one request."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every body."""

    @property
    def url(self) -> str:
        """The address that requests are posted to."""
        path = "chat/completions" if self.kind == "chat" else "completions"
        return f"{api_root(self.base_url)}/{path}"

    def body(
        self, prompt: str | Messages, max_tokens: int, fields: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a request's body, streamed, with usage at the end.

        Raises:
            ConfigError: `prompt` is a chat, and the endpoint takes texts.
        """
        if self.kind == "chat":
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            what: dict[str, Any] = {"messages": list(messages)}
        elif isinstance(prompt, str):
            what = {"prompt": prompt}
        else:
            raise ConfigError("endpoint='completions' takes no messages; want endpoint='chat'")
        return {
            "model": self.model,
            **what,
            "max_tokens": max_tokens,
            **self.fields,
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Client:
    """Sends requests and notes when replies arrive. Connections are kept and not limited."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._origin = time.perf_counter()
        self._http = http_client(endpoint.api_key)

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.perf_counter() - self._origin

    def restart_clock(self) -> None:
        """Let the run start now."""
        self._origin = time.perf_counter()

    async def send(
        self, record: Record, prompt: str | Messages, max_tokens: int, fields: Mapping[str, Any]
    ) -> None:
        """Post one request and fill `record` until the reply has ended or failed."""
        body = self.endpoint.body(prompt, max_tokens, fields)
        record.start = self.now()
        try:
            async with asyncio.timeout(self.endpoint.timeout):
                await self._stream(record, body)
        except TimeoutError:
            record.failure = "timeout"
            record.detail = f"no end after {self.endpoint.timeout:g} s"
        except httpx2.ConnectError as error:
            record.failure, record.detail = "not connected", str(error)
        except httpx2.HTTPError as error:
            record.failure, record.detail = "connection lost", f"{type(error).__name__}: {error}"
        record.end = self.now()

    async def _stream(self, record: Record, body: dict[str, Any]) -> None:
        async with self._http.stream("POST", self.endpoint.url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                record.failure = f"HTTP {response.status_code}"
                record.detail = response.text[:_MAX_DETAIL]
                return
            parser = EventParser()
            async for chunk in response.aiter_bytes():
                now = self.now()
                for data in parser.feed(chunk):
                    if data != "[DONE]" and record.failure is None:
                        _take(record, data, now)
        if record.failure is None and record.finish_reason is None:
            record.failure = "cut short"
            record.detail = "the stream ended before a finish_reason"


def http_client(api_key: str | None) -> httpx2.AsyncClient:
    """Return a client without limits of its own, for `async with`."""
    return httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=None,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(base_url: str, api_key: str | None) -> str:
    """Return the first model that the server lists.

    Raises:
        ConfigError: it does not answer, or lists none.
    """
    url = f"{api_root(base_url)}/models"
    try:
        async with http_client(api_key) as http:
            response = await http.get(url)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{url} gives no model ({type(error).__name__}: {error}); start the server, correct "
            "base_url or api_key, or give the model"
        ) from error


async def server_info(base_url: str, api_key: str | None) -> object:
    """Return what `/server_info` says, which engines other than gapless may not have; else None."""
    url = f"{api_root(base_url).removesuffix('/v1')}/server_info"
    try:
        async with http_client(api_key) as http:
            response = await http.get(url)
        return response.json() if response.status_code == 200 else None
    except (httpx2.HTTPError, ValueError):
        return None


def api_root(base_url: str) -> str:
    """Return `base_url` ending in `/v1`."""
    root = base_url.rstrip("/")
    return root if root.endswith("/v1") else f"{root}/v1"


def _take(record: Record, data: str, now: float) -> None:
    """Note what one event says."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        record.failure, record.detail = "malformed event", data[:_MAX_DETAIL]
        return
    if event.get("error"):
        record.failure, record.detail = "error event", json.dumps(event["error"])[:_MAX_DETAIL]
        return
    try:
        for choice in event.get("choices") or ():
            _take_choice(record, choice, now)
        usage = event.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            record.prompt_tokens = usage.get("prompt_tokens")
            record.completion_tokens = usage.get("completion_tokens")
            record.cached_tokens = details.get("cached_tokens")
    # JSON of another shape than the API's
    except (AttributeError, TypeError):
        record.failure, record.detail = "malformed event", data[:_MAX_DETAIL]


def _take_choice(record: Record, choice: dict[str, Any], now: float) -> None:
    delta = choice.get("delta") or {}
    texts = [choice.get("text"), *(delta.get(key) for key in _TEXT_KEYS)]
    text = "".join(filter(None, texts))
    record.text += text
    record.finish_reason = choice.get("finish_reason") or record.finish_reason
    # an end without text: the reply is empty, or its only tokens show nothing
    if text or (record.finish_reason and not record.text_times):
        record.text_times.append(now)
