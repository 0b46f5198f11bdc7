"""A model's text as the parts of an answer: thoughts, words and tool calls."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gapless.text.reasoning import Reasoning
from gapless.text.tools import CallArguments, CallBegin, CallBroken, CallEnd, Text, ToolEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.text.reasoning import ReasoningSplitter
    from gapless.text.tools import ToolParser

Event = Reasoning | ToolEvent


class AnswerReader:
    """Reads the text of one choice as it comes."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None = None,
        parser: ToolParser | None = None,
        *,
        is_single: bool = False,
    ) -> None:
        """Without splitter and parser, all text is words; `is_single`: drop all after one call."""
        self._splitter = splitter
        self._parser = parser
        self._is_single = is_single
        self.has_calls = False
        """Whether a complete call has come."""

    def read(self, text: str, *, is_last: bool) -> list[Event]:
        """Return what is certain now that `text` has come."""
        thoughts, words = "", text
        if self._splitter is not None:
            thoughts, words = self._splitter.push(text)
            if is_last:
                more_thoughts, more_words = self._splitter.finish()
                thoughts, words = thoughts + more_thoughts, words + more_words
        events: list[Event] = [Reasoning(thoughts)] if thoughts else []
        if self._parser is None:
            return [*events, Text(words)] if words else events
        found = self._parser.push(words)
        if is_last:
            found += self._parser.finish()
        return events + list(self._allowed(found))

    def _allowed(self, events: list[ToolEvent]) -> Iterator[ToolEvent]:
        for event in events:
            if self.has_calls and self._is_single:
                return
            self.has_calls |= isinstance(event, CallEnd)
            yield event


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(eq=False)
class Block:
    """One part of an answer, in order."""

    kind: BlockKind
    name: str = ""
    """The function's, of a call."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    text: str = ""
    """Thoughts, words, or a call's arguments as JSON."""
    is_broken: bool = False
    """A call that turned out to be none; its text follows as words."""


@dataclass(frozen=True)
class Step:
    """A block begins, grows by `piece`, or ends."""

    what: Literal["begin", "grow", "end"]
    index: int
    block: Block
    piece: str = ""


class Blocks:
    """Events of one choice to blocks; at most one block is open."""

    def __init__(self) -> None:
        self._all: list[Block] = []
        self._is_open = False

    @property
    def whole(self) -> list[Block]:
        """All blocks but broken calls."""
        return [block for block in self._all if not block.is_broken]

    def add(self, events: list[Event]) -> list[Step]:
        """Take events in, and return what they do."""
        return [step for event in events for step in self._steps(event)]

    def finish(self) -> list[Step]:
        """End the block that is open."""
        return list(self._close())

    def _steps(self, event: Event) -> Iterator[Step]:
        match event:
            case Reasoning(piece):
                yield from self._grow("reasoning", piece)
            case Text(piece):
                yield from self._grow("text", piece)
            case CallBegin(name):
                yield from self._open(Block("call", name))
            case CallArguments(piece):
                yield from self._grow("call", piece)
            case CallEnd():
                yield from self._close()
            case CallBroken(source):
                self._all[-1].is_broken = True
                yield from self._close()
                yield from self._grow("text", source)

    def _open(self, block: Block) -> Iterator[Step]:
        yield from self._close()
        self._all.append(block)
        self._is_open = True
        yield Step("begin", len(self._all) - 1, block)

    def _grow(self, kind: BlockKind, piece: str) -> Iterator[Step]:
        if not self._is_open or self._all[-1].kind != kind:
            yield from self._open(Block(kind))
        block = self._all[-1]
        block.text += piece
        yield Step("grow", len(self._all) - 1, block, piece)

    def _close(self) -> Iterator[Step]:
        if self._is_open:
            self._is_open = False
            yield Step("end", len(self._all) - 1, self._all[-1])
