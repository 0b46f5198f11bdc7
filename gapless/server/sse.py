"""Answers that are streams of server-sent events."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from gapless.engine.client import EngineGone
from gapless.errors import RequestError
from gapless.server.errors import ApiError, ClientGone, as_api_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from starlette.types import Receive, Scope, Send

    from gapless.server.running import Running
    from gapless.server.schemas import StreamOptions, Usage

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # proxies must not collect events
    (b"x-accel-buffering", b"no"),
]


def event(value: msgspec.Struct) -> bytes:
    """Return a value as an event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(name: str, value: Mapping[str, object]) -> bytes:
    """Return a value as an event with a name, which is also its `type`."""
    data = msgspec.json.encode({"type": name, **value})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def openai_error_event(error: ApiError) -> bytes:
    """Return an error as the event with which OpenAI's streams end early."""
    return b"data: " + error.body + b"\n\n" + DONE


def usage_of_chunk(
    options: StreamOptions | None, so_far: Usage, *, is_last: bool
) -> Usage | msgspec.UnsetType | None:
    """Return what a chunk says of usage: nothing unless asked for."""
    if options is None:
        return msgspec.UNSET
    if options.continuous_usage_stats or (options.include_usage and is_last):
        return so_far
    return None if options.include_usage else msgspec.UNSET


class EventStream:
    """A response that sends events as they are made, and lets go of the work at its end.

    Work that ends early ends the stream with an event that holds the error.
    """

    def __init__(
        self,
        running: Running,
        events: AsyncGenerator[bytes, None],
        *,
        last: bytes = DONE,
        say_error: Callable[[ApiError], bytes] = openai_error_event,
    ) -> None:
        """`last` is sent after all events, or what `say_error` makes of an error."""
        self._running = running
        self._events = events
        self._last = last
        self._say_error = say_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as an ASGI application."""
        del scope, receive
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async with aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = self._last
        except ClientGone:
            return
        except (ApiError, EngineGone, RequestError) as error:
            found = error if isinstance(error, ApiError) else as_api_error(error)
            last = self._say_error(found)
        finally:
            self._running.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})
