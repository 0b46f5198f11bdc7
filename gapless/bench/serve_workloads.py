"""What `gapless bench serve` sends: conversations drawn from a seed, or read from a file.

Texts are strings of common words. How many words make a token differs by tokenizer, so `Words` is
told, and lengths are met in the mean only; what was really sent is in the server's own counts.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from gapless.assets import heldout
from gapless.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Messages = tuple[dict[str, Any], ...]

_NUM_WORDS = 1000
# of a line in a file: the endpoint, the load and the reading of replies decide these
_OWN_FIELDS = {"prompt", "messages", "model", "stream", "stream_options"}
_OWN_FIELDS |= {"max_tokens", "max_completion_tokens"}


@dataclass(frozen=True)
class Job:
    """A conversation: one request, then one more for each further turn of the user."""

    opening: str | Messages
    """A text, or a chat that ends with the user's turn."""
    output_lens: tuple[int, ...]
    """Most tokens of the reply, for each request."""
    follow_ups: tuple[str, ...] = ()
    """The user's further turns; each is sent after the reply to the one before."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the requests' bodies."""


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, name: str, text: str) -> Span:
        """Read `N` or `LOW-HIGH`.

        Raises:
            ConfigError: `text`, the value of option `name`, is neither, or below 1.
        """
        found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip())
        if found is None:
            raise ConfigError(f"{name}={text!r}: want a number such as 128, or a range: 64-512")
        low, high = int(found[1]), int(found[2] or found[1])
        if not 1 <= low <= high:
            raise ConfigError(f"{name}={text!r}: want 1 or more, the smaller number first")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        """Return one of the numbers, all equally likely."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Words:
    """Makes texts that have a wanted number of tokens for a tokenizer known by two figures."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0
    """Tokens of a prompt beside its words: the chat template's."""

    def text(self, rng: random.Random, num_tokens: float) -> str:
        """Return random words, at least one, that have about `num_tokens` tokens."""
        count = max(1, round(num_tokens / self.tokens_per_word))
        return " ".join(rng.choices(common_words(), k=count))


@cache
def common_words() -> tuple[str, ...]:
    """Return the most frequent words of the bundled held-out texts, in lower case."""
    text = heldout("text").read_text(encoding="utf-8").replace("\\n", " ").lower()
    counts = Counter(re.findall(r"\b[a-z]{2,}\b", text))
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return tuple(ordered[:_NUM_WORDS])


def random_jobs(
    count: int, *, input_len: Span, output_len: Span, words: Words, seed: int
) -> list[Job]:
    """Draw single requests that share nothing."""
    rng = random.Random(f"random {seed}")
    return [
        Job(
            words.text(rng, input_len.draw(rng) - words.overhead),
            (output_len.draw(rng),),
        )
        for _ in range(count)
    ]


def shared_prefix_jobs(
    count: int,
    *,
    num_groups: int,
    prefix_len: int,
    input_len: Span,
    output_len: Span,
    words: Words,
    seed: int,
) -> list[Job]:
    """Draw requests that begin with one of `num_groups` texts, and go on with a text of their own.

    `input_len` counts the own part. Groups come in random order, equally often but for the
    remainder.
    """
    rng = random.Random(f"shared-prefix {seed}")
    prefixes = [words.text(rng, prefix_len - words.overhead) for _ in range(num_groups)]
    groups = [i % num_groups for i in range(count)]
    rng.shuffle(groups)
    return [
        Job(
            f"{prefixes[group]} {words.text(rng, input_len.draw(rng))}",
            (output_len.draw(rng),),
        )
        for group in groups
    ]


def chat_jobs(
    count: int, *, turns: Span, input_len: Span, output_len: Span, words: Words, seed: int
) -> list[Job]:
    """Draw conversations; `input_len` and `output_len` count for each turn."""
    rng = random.Random(f"chat-turn {seed}")
    jobs = []
    for _ in range(count):
        texts = [
            words.text(rng, input_len.draw(rng) - words.overhead) for _ in range(turns.draw(rng))
        ]
        lens = tuple(output_len.draw(rng) for _ in texts)
        jobs.append(Job(texts[0], lens, tuple(texts[1:])))
    return jobs


def read_jobs(file: Path, *, output_len: Span, seed: int, count: int | None = None) -> list[Job]:
    """Read JSON lines with a `prompt` or `messages` each, in the order of the file.

    A line may be a request's body, or one of OpenAI's batch format, which holds it under `body`.
    `max_tokens` or `max_completion_tokens` go before `output_len`; other fields are sent along.
    With `count` that many jobs are made, from the start again where the file is shorter.

    Raises:
        InvalidRequest: the file cannot be read, has no line, or has one that is neither.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}; want JSON lines in UTF-8") from error
    # JSON strings may hold U+2028 and the like, at which splitlines() would cut
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InvalidRequest(f"{file} has no line; want a `prompt` or `messages` each")
    rng = random.Random(f"jsonl {seed}")
    jobs = [_job(f"{file}:{i}", line, output_len.draw(rng)) for i, line in lines]
    count = len(jobs) if count is None else count
    return [jobs[i % len(jobs)] for i in range(count)]


def _job(where: str, line: str, output_len: int) -> Job:
    try:
        value = json.loads(line)
    # also for integers that are too long to convert
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}; correct the line") from error
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    match value:
        case {"prompt": str(prompt)} if "messages" not in value:
            opening: str | Messages = prompt
        case {"messages": [*messages, dict(last)]} if "prompt" not in value:
            opening = (*messages, last)
        case _:
            raise InvalidRequest(
                f"{where}: want an object with either `prompt`, a text, or `messages`, a list of "
                "at least one chat message"
            )
    asked = value.get("max_completion_tokens", value.get("max_tokens", output_len))
    if not isinstance(asked, int) or asked < 1:
        raise InvalidRequest(f"{where}: max_tokens={asked!r}: want a whole number from 1")
    fields = {name: item for name, item in value.items() if name not in _OWN_FIELDS}
    return Job(opening, (asked,), fields=fields)
