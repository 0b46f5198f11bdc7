"""What a parser of tool calls says of a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Words for the reader."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call begins; what follows up to its end belongs to it."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments' JSON."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete, and its arguments are a JSON object."""


@dataclass(frozen=True)
class CallBroken:
    """The call that had begun is none; `source` is its whole text, to be shown as such."""

    source: str


ToolEvent = Text | CallBegin | CallArguments | CallEnd | CallBroken
