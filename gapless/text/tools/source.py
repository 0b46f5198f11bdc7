"""A text that comes in pieces, and what readers of it have in common."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

from gapless.text.tools.events import CallBegin

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from gapless.text.tools.events import ToolEvent

# both styles put these around a call
CALL, CALL_END = "<tool_call>", "</tool_call>"


class Malformed(Exception):
    """What was read is no call."""


class Source:
    """The text as far as it has come and was not read, and the events of what was.

    A reader is a generator: a bare `yield` waits for more of the text, or for its end.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.is_ended = False
        self.events: list[ToolEvent] = []
        self.has_begun = False
        """Whether the call under way has a name."""
        self.taken: list[str] = []
        """What the call under way has consumed."""

    def take_events(self) -> list[ToolEvent]:
        """Hand over what has been found since the last time."""
        events, self.events = self.events, []
        return events

    def expect(self, *tags: str) -> Generator[None, None, str | None]:
        """Consume white space and a tag, and return it; None, with nothing consumed, if it is
        none of `tags`."""
        while True:
            rest = self.buffer.lstrip()
            for tag in tags:
                if rest.startswith(tag):
                    self.take(len(self.buffer) - len(rest) + len(tag))
                    return tag
            if self.is_ended or not any(tag.startswith(rest) for tag in tags):
                return None
            yield

    def begin(self, name: str) -> None:
        """Say that a call has begun."""
        self.has_begun = True
        self.events.append(CallBegin(name))

    def take(self, count: int) -> str:
        """Consume so many characters."""
        text, self.buffer = self.buffer[:count], self.buffer[count:]
        self.taken.append(text)
        return text


def refuse() -> NoReturn:
    """Say that what is being read is no call."""
    raise Malformed


def overlap(text: str, ends: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `ends`."""
    longest = min(len(text), max(map(len, ends)) - 1)
    for length in range(longest, 0, -1):
        if any(end.startswith(text[-length:]) for end in ends):
            return length
    return 0


def parse_json(text: str) -> object:
    """Parse JSON, without the constants that only Python knows."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
