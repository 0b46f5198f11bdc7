"""Data sets to evaluate on: JSON lines of problems or of documents, told apart by their keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.errors import InvalidRequest
from gapless.eval.answers import last_number

if TYPE_CHECKING:
    from pathlib import Path

_WANTED = "`question` with `answer` (ending in `#### N`) or `n`; or `text`"


@dataclass(frozen=True)
class Problem:
    """A question whose answer is a whole number."""

    question: str
    answer: int


@dataclass(frozen=True)
class Document:
    """A text to predict."""

    text: str


@dataclass(frozen=True)
class ProblemSet:
    """One file of problems; the task is accuracy."""

    name: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class DocumentSet:
    """One file of documents; the task is perplexity."""

    name: str
    documents: tuple[Document, ...]


def read_set(file: Path, *, limit: int | None = None) -> ProblemSet | DocumentSet:
    """Read a file, or its first `limit` lines. Empty lines do not count.

    Raises:
        InvalidRequest: the file cannot be read, has no line, mixes both kinds, or has a line that
            is neither.
    """
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit={limit}: want at least 1; leave it out to read everything")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}; want JSON lines in UTF-8") from error
    # JSON strings may hold U+2028 and the like, at which splitlines() would cut
    lines = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    items = [_read_line(f"{file}:{i}", line) for i, line in lines[:limit]]
    problems = tuple(item for item in items if isinstance(item, Problem))
    documents = tuple(item for item in items if isinstance(item, Document))
    if problems and documents:
        raise InvalidRequest(
            f"{file} has {len(problems)} problems and {len(documents)} documents; want one kind: "
            "split the file"
        )
    if not items:
        raise InvalidRequest(f"{file} has no line; want objects with {_WANTED}")
    return ProblemSet(file.stem, problems) if problems else DocumentSet(file.stem, documents)


def _read_line(where: str, line: str) -> Problem | Document:
    try:
        value = json.loads(line)
    # also for integers that are too long to convert
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}; correct the line") from error
    match value:
        case {"question": str(question)} if question:
            return Problem(question, _answer(where, value))
        case {"text": str(text)} if text and "question" not in value:
            return Document(text)
        case dict():
            keys = ", ".join(value) or "none"
            raise InvalidRequest(
                f"{where} has the keys {keys}; want {_WANTED}, as non-empty strings"
            )
    raise InvalidRequest(f"{where} is a JSON {type(value).__name__}; want an object with {_WANTED}")


def _answer(where: str, item: dict[str, object]) -> int:
    match item:
        case {"n": bool()}:
            pass
        case {"n": int(n)}:
            return n
        case {"answer": str(answer)} if "n" not in item:
            found = last_number(answer)
            if found is not None:
                return found
    given = {name: item[name] for name in ("n", "answer") if name in item}
    raise InvalidRequest(
        f"{where} has a question and {given or 'no answer'}; want a whole number `n`, or an "
        "`answer` that ends in `#### N`"
    )
