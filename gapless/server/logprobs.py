"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from gapless.server.schemas import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gapless.core.messages import TokenLogprob
    from gapless.text.tokenizer import Tokenizer

# JSON has no infinity
LOWEST = -9999.0


def token_text(data: bytes) -> str:
    """Spell a token's bytes; those that are no whole characters as OpenAI does, `bytes:\\xe2`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return those of a chat's tokens."""

    def top(token_id: int, logprob: float) -> TopLogprob:
        data = tokenizer.token_bytes(token_id)
        return TopLogprob(token_text(data), max(logprob, LOWEST), list(data))

    content = []
    for entry in entries:
        own = top(entry.token_id, entry.logprob)
        tops = [top(*pair) for pair in entry.top]
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, tops))
    return ChatLogprobs(content)


class CompletionLogprobWriter:
    """Writes those of one completion, piece by piece, and keeps the place in its text."""

    def __init__(self, tokenizer: Tokenizer, *, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._silent = tokenizer.special_ids if skips_special_tokens else frozenset()
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprob | int]) -> CompletionLogprobs:
        """Return those of the next tokens; a bare id is a token without one, a prompt's first."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token_id = entry if isinstance(entry, int) else entry.token_id
            offsets.append(self._offset)
            tokens.append(self._spell(token_id))
            if token_id not in self._silent:
                data = self._tokenizer.token_bytes(token_id)
                self._offset += len(self._text.decode(data))
            if isinstance(entry, int):
                values.append(None)
                tops.append(None)
                continue
            values.append(max(entry.logprob, LOWEST))
            top = {self._spell(i): max(value, LOWEST) for i, value in entry.top}
            # the token itself is always there, beside as many as were asked for
            tops.append(top | {tokens[-1]: values[-1] or 0.0})
        return CompletionLogprobs(tokens, values, tops, offsets)

    def _spell(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id))
