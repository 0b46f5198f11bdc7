"""What a model thinks before it answers, split from the answer as the text comes.

Thoughts stand between `<think>` and `</think>` at the beginning of an answer; many chat templates
write the first tag themselves, as the end of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str


class ReasoningSplitter:
    """Splits one answer; white space around the tags is dropped, and all else kept."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ends within thoughts."""
        self._is_open = is_open
        self._is_thinking: bool | None = None
        """None until the answer's beginning is known."""
        self._skips_space = False
        self._buffer = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return the thoughts and the answer that are certain now that `text` has come."""
        return self._split(text, is_last=False)

    def finish(self) -> tuple[str, str]:
        """Return what is left; thoughts that were never closed are thoughts."""
        return self._split("", is_last=True)

    def _split(self, text: str, *, is_last: bool) -> tuple[str, str]:
        self._buffer += text
        if self._is_thinking is None and not self._begin(is_last=is_last):
            return "", ""
        thoughts = self._thoughts(is_last=is_last) if self._is_thinking else ""
        if self._is_thinking:
            return thoughts, ""
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        answer, self._buffer = self._buffer, ""
        return thoughts, answer

    def _begin(self, *, is_last: bool) -> bool:
        """Find out whether the text begins with thoughts, if enough of it is there."""
        rest = self._buffer.lstrip()
        if not is_last and len(rest) < len(OPEN) and OPEN.startswith(rest):
            return False
        self._is_thinking = self._is_open or rest.startswith(OPEN)
        if self._is_thinking:
            self._buffer = rest.removeprefix(OPEN)
            self._skips_space = True
        return True

    def _thoughts(self, *, is_last: bool) -> str:
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
            self._skips_space = not self._buffer
        thoughts, close, rest = self._buffer.partition(CLOSE)
        if close:
            self._is_thinking, self._skips_space, self._buffer = False, True, rest
            return thoughts.rstrip()
        if is_last:
            self._buffer = ""
            return thoughts.rstrip()
        held = next(
            (n for n in range(len(CLOSE) - 1, 0, -1) if thoughts.endswith(CLOSE[:n])),
            0,
        )
        sure = thoughts[: len(thoughts) - held].rstrip()
        self._buffer = thoughts[len(sure) :]
        return sure


def thinks_at_end(prompt: str) -> bool:
    """Whether a prompt, or the last part of it, ends within thoughts."""
    return prompt.rstrip().endswith(OPEN)
