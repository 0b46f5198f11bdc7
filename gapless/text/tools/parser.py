"""Reads an answer: text, and the calls in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gapless.text.tools import hermes, qwen3_coder
from gapless.text.tools.events import CallBroken, Text
from gapless.text.tools.source import CALL, Malformed, Source, overlap

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from gapless.text.tools.events import ToolEvent

ToolStyle = Literal["hermes", "qwen3_coder"]


def style_of_template(source: str) -> ToolStyle | None:
    """Return the style that a chat template teaches, None where it teaches neither."""
    if "tools" not in source or CALL not in source:
        return None
    return "qwen3_coder" if qwen3_coder.FUNCTION in source else "hermes"


class ToolParser:
    """Reads one answer. White space before a call, and after the last one, is dropped."""

    def __init__(
        self,
        style: ToolStyle,
        tools: Sequence[Mapping[str, object]],
        *,
        begins_in_call: bool = False,
    ) -> None:
        """`tools` are functions: `name`, and `parameters` as a JSON schema.

        The style `qwen3_coder` writes every value as plain text, so the schema decides its type.
        `begins_in_call`: the text is a call from its first character, without an opening tag.
        """
        self._begins_in_call = begins_in_call
        self._style = style
        self._schemas = {str(tool["name"]): tool.get("parameters") for tool in tools}
        self._openers = (CALL,) if style == "hermes" else (CALL, qwen3_coder.FUNCTION)
        self._source = Source()
        self._has_calls = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> list[ToolEvent]:
        """Return what is certain now that `text` has come."""
        if text:
            self._source.buffer += text
            next(self._reading)
        return self._source.take_events()

    def finish(self) -> list[ToolEvent]:
        """Return what is left, the text being at its end."""
        self._source.is_ended = True
        next(self._reading, None)
        return self._source.take_events()

    def _read(self) -> Generator[None, None, None]:
        """Work through the buffer; a bare `yield` waits for more of it, or for the end."""
        source = self._source
        yield
        opener = CALL if self._begins_in_call else (yield from self._text())
        while opener is not None:
            source.has_begun = False
            try:
                if self._style == "hermes":
                    yield from hermes.read_call(source)
                else:
                    yield from qwen3_coder.read_call(source, opener, self._schemas)
            except Malformed:
                words = "".join(source.taken)
                source.events.append(CallBroken(words) if source.has_begun else Text(words))
            else:
                self._has_calls = True
            opener = yield from self._text()

    def _text(self) -> Generator[None, None, str | None]:
        """Pass text on up to a call, whose opening is consumed; None at the end."""
        source = self._source
        while True:
            places = [(i, o) for o in self._openers if (i := source.buffer.find(o)) >= 0]
            if places:
                place, opener = min(places)
                words = source.buffer[:place].rstrip()
                self._say(words)
                source.taken = []
                source.buffer = source.buffer[len(words) :]
                source.take(place - len(words) + len(opener))
                return opener
            held = 0 if source.is_ended else overlap(source.buffer, self._openers)
            words = source.buffer[: len(source.buffer) - held]
            if not source.is_ended or self._has_calls:
                words = words.rstrip()
            self._say(words)
            source.buffer = source.buffer[len(words) :]
            if source.is_ended:
                return None
            yield

    def _say(self, words: str) -> None:
        if words:
            self._source.events.append(Text(words))
