"""Token ids of one request to text, piece by piece, up to a stop string.

Joined, the pieces equal the full decode of the tokens, cut before the stop string. A piece never
ends inside a character and never holds the beginning of a stop string that may still be completed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# a character has at most 4 bytes, so at most 3 stand unfinished at the end of a decode
_MAX_UNFINISHED = 3
# the window is cut between whole characters, at boundaries at least this many tokens apart
_KEEP_TOKENS = 12
# and to its last _KEEP_TOKENS where this many bring no such boundary, which takes malformed bytes.
# Two decodes of a byte-level vocabulary that begin at different bytes agree after 3 common bytes,
# and their last 3 characters, of up to 9 bytes, must agree: 12 tokens are enough
_MAX_TOKENS = 3 * _KEEP_TOKENS


@dataclass(frozen=True)
class TextUpdate:
    """What tokens add to the text."""

    text: str
    """Final text, safe to send."""
    stop: str | None
    """The stop string that ended the text; it is not part of the text."""
    num_tokens: int
    """Tokens up to the one that completed the stop string; all of them without one."""


class Detokenizer:
    """Decodes one request's tokens as they come, all that come at once in one bounded window.

    With stop strings they are decoded one by one, to find the one that completes such a string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...],
        skip_special_tokens: bool,
        min_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._has_stops = bool(stop)
        self._matcher = _StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stop: str | None = None
        self._window: list[int] = []  # the newest tokens that give text
        self._given = 0  # characters of the window's text that the matcher has had
        self._boundary = 0  # index in the window where it will be cut next

    def push(self, token_ids: Sequence[int]) -> TextUpdate:
        """Add tokens and return the text that became final.

        A stop string counts if it is completed by the `min_tokens`-th token or a later one. Of
        those that one token completes, the one that begins first is taken, the shortest of several
        that begin there. After a stop, tokens add nothing and the stop is repeated.
        """
        if not self._has_stops:
            return TextUpdate(self._decode(token_ids), None, len(token_ids))
        text = ""
        for count, token_id in enumerate(token_ids):
            if self._stop is not None:
                return TextUpdate(text, self._stop, count)
            self._num_tokens += 1
            text += self._match(self._decode((token_id,)))
        return TextUpdate(text, self._stop, len(token_ids))

    def flush(self) -> str:
        """Return the text still held, at the end of the tokens; empty after a stop.

        Bytes of an unfinished character come out as U+FFFD.
        """
        if self._stop is not None:
            return ""
        fresh = self._window_text()[self._given :]
        self._given += len(fresh)
        return self._match(fresh) + self._matcher.release()

    def _match(self, fresh: str) -> str:
        """Return what may be sent once `fresh` has come, and note a stop string."""
        if self._num_tokens < self._min_tokens:
            return self._matcher.pass_by(fresh)
        text, self._stop = self._matcher.feed(fresh)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Append tokens to the window and return the text that they make final."""
        special, size = self._tokenizer.special_ids, self._tokenizer.vocab_size
        fresh_ids = [
            token_id
            for token_id in token_ids
            if token_id < size and not (self._skip_special_tokens and token_id in special)
        ]
        if not fresh_ids:
            return ""
        self._window += fresh_ids
        text = self._window_text()
        # bytes of an unfinished character decode to replacement characters; a byte-fallback
        # decoder makes so even of the whole characters right before it
        num_unfinished = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(self._window) >= _MAX_TOKENS:
            num_unfinished = min(num_unfinished, _MAX_UNFINISHED)
        end = len(text) - num_unfinished
        fresh = text[self._given : end]
        self._given = max(self._given, end)
        self._bound_window(num_unfinished)
        return fresh

    def _bound_window(self, num_unfinished: int) -> None:
        num_tokens = len(self._window)
        if num_unfinished == 0 and num_tokens - self._boundary >= _KEEP_TOKENS:
            self._window = self._window[self._boundary :]
            self._boundary = len(self._window)
        elif num_tokens >= _MAX_TOKENS:
            self._window = self._window[-_KEEP_TOKENS:]
            self._boundary = 0
        if len(self._window) < num_tokens:
            self._given = len(self._window_text()) - num_unfinished

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


class _StopMatcher:
    """Finds stop strings in a stream of text and holds back what may become one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""  # the longest end of the text that begins a stop string

    def feed(self, fresh: str) -> tuple[str, str | None]:
        """Add text; return what is safe to send and the stop string that was completed, if any."""
        text = self._held + fresh
        found = self._find(text, len(self._held))
        if found is not None:
            start, stop = found
            self._held = ""
            return text[:start], stop
        return self._hold(text), None

    def pass_by(self, fresh: str) -> str:
        """Add text in which a complete stop string is of no account."""
        return self._hold(self._held + fresh)

    def release(self) -> str:
        """Return the held text, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, old_len: int) -> tuple[int, str] | None:
        """Return the first match that ends after `old_len` characters."""
        matches = [
            (text.find(stop, max(0, old_len - len(stop) + 1)), len(stop), stop)
            for stop in self._stop
        ]
        start, _, stop = min((match for match in matches if match[0] >= 0), default=(-1, 0, ""))
        return None if start < 0 else (start, stop)

    def _hold(self, text: str) -> str:
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins, and is not all of, `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
