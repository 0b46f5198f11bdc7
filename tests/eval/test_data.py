"""Data sets read from JSON lines: which task, and what is refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from gapless.assets import heldout
from gapless.errors import InvalidRequest
from gapless.eval.data import Document, DocumentSet, Problem, ProblemSet, read_set

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *lines: object) -> Path:
    """Write JSON lines; strings as they are."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_problems(tmp_path: Path) -> None:
    file = write(
        tmp_path / "sums.jsonl",
        {"question": "a", "answer": "1 + 1 = 2\n#### 2"},
        "",
        {"question": "b", "n": -3, "answer": "no number", "text": "ignored"},
        {"question": "c\u2028d", "answer": "#### 1,000", "family": "x"},
    )
    problems = (Problem("a", 2), Problem("b", -3), Problem("c\u2028d", 1000))
    assert read_set(file) == ProblemSet("sums", problems)
    assert read_set(file, limit=2) == ProblemSet("sums", problems[:2])


def test_raw_line_separator_in_a_text(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", '{"text": "a\u2028b"}')
    assert read_set(file) == DocumentSet("t", (Document("a\u2028b"),))


@pytest.mark.parametrize(("name", "count"), [("level1", 500), ("level2", 200)])
def test_bundled_problems_agree_with_their_answers(name: str, count: int) -> None:
    found = read_set(heldout(name))
    lines = [json.loads(line) for line in heldout(name).read_text().splitlines()]
    assert isinstance(found, ProblemSet)
    assert [p.answer for p in found.problems] == [line["n"] for line in lines]
    assert len(found.problems) == count


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ({"title": "x", "body": "y"}, "2 has the keys title, body; want `question`"),
        ({}, "2 has the keys none"),
        ({"text": ""}, "2 has the keys text; want .* non-empty"),
        ({"text": 3}, "2 has the keys text"),
        ({"question": 3, "text": "a"}, "2 has the keys question, text"),
        ({"question": "a"}, "2 has a question and no answer; want a whole number `n`"),
        ({"question": "a", "answer": "40"}, "2 has a question and {'answer': '40'}"),
        ({"question": "a", "n": True}, "2 has a question and {'n': True}"),
        ({"question": "a", "n": 1.5, "answer": "#### 1"}, "2 has a question and {'n': 1.5"),
        (["text"], "2 is a JSON list"),
        ("{", "2 is not JSON"),
        ('{"n": ' + "9" * 5000 + "}", "2 is not JSON"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: object, found: str) -> None:
    good = {"question": "a", "n": 1}
    with pytest.raises(InvalidRequest, match=r"f\.jsonl:" + found.replace("{", r"\{")):
        read_set(write(tmp_path / "f.jsonl", good, line))


def test_lines_past_the_limit_are_not_read(tmp_path: Path) -> None:
    assert read_set(write(tmp_path / "f.jsonl", {"text": "a"}, "{"), limit=1).name == "f"


def test_bad_files(tmp_path: Path) -> None:
    mixed = write(tmp_path / "mixed.jsonl", {"text": "a"}, {"question": "a", "n": 1})
    with pytest.raises(InvalidRequest, match="1 problems and 1 documents; want one kind"):
        read_set(mixed)
    with pytest.raises(InvalidRequest, match="has no line"):
        read_set(write(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(InvalidRequest, match=re.escape(str(tmp_path / "none"))):
        read_set(tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="want JSON lines in UTF-8"):
        read_set(tmp_path / "latin")
    with pytest.raises(InvalidRequest, match="limit=0: want at least 1"):
        read_set(mixed, limit=0)
