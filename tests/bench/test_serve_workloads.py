"""What is sent: reproducible, of the wanted lengths, shared where it should be."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from gapless.bench.serve_workloads import (
    Job,
    Span,
    Words,
    chat_jobs,
    common_words,
    random_jobs,
    read_jobs,
    shared_prefix_jobs,
)
from gapless.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = Words(tokens_per_word=2.0, overhead=10)


def drawn_random(seed: int) -> list[Job]:
    """Requests that share nothing."""
    return random_jobs(50, input_len=Span(30, 70), output_len=Span(1, 9), words=WORDS, seed=seed)


def drawn_groups(seed: int) -> list[Job]:
    """Requests in three groups."""
    return shared_prefix_jobs(
        50, num_groups=3, prefix_len=110, input_len=Span(30, 70), output_len=Span(4, 4),
        words=WORDS, seed=seed,
    )  # fmt: skip


def drawn_chats(seed: int) -> list[Job]:
    """Conversations."""
    return chat_jobs(
        50, turns=Span(2, 5), input_len=Span(30, 70), output_len=Span(1, 9), words=WORDS, seed=seed
    )


@pytest.mark.parametrize("draw", [drawn_random, drawn_groups, drawn_chats])
def test_seeds_reproduce(draw: Callable[[int], list[Job]]) -> None:
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_lengths_fill_their_range() -> None:
    jobs = drawn_random(0)
    lens = [len(job.opening.split()) * 2 + 10 for job in jobs]
    assert min(lens) >= 29
    assert max(lens) <= 71
    assert max(lens) - min(lens) > 30
    outputs = {length for job in jobs for length in job.output_lens}
    assert outputs == set(range(1, 10))
    assert len({job.opening.split()[:4].__repr__() for job in jobs}) == 50


def test_groups_share_their_prefix_and_no_more() -> None:
    jobs = drawn_groups(0)
    prefixes: dict[str, int] = {}
    for job in jobs:
        prefix = " ".join(job.opening.split()[:50])
        prefixes[prefix] = prefixes.get(prefix, 0) + 1
    # 110 tokens less the template's 10, at 2 a word
    assert sorted(prefixes.values()) == [16, 17, 17]
    tails = {" ".join(job.opening.split()[50:]) for job in jobs}
    assert len(tails) == 50
    assert all(15 <= len(tail.split()) <= 35 for tail in tails)
    order = [" ".join(job.opening.split()[:50]) for job in jobs]
    assert order != sorted(order)


def test_conversations_have_their_turns() -> None:
    jobs = drawn_chats(0)
    assert {len(job.output_lens) for job in jobs} == {2, 3, 4, 5}
    assert all(len(job.follow_ups) == len(job.output_lens) - 1 for job in jobs)


def test_words_are_words() -> None:
    words = common_words()
    assert len(words) == len(set(words)) == 1000
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert len(Words().text(random.Random(0), -5).split()) == 1


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("2-9", 2, 9), (" 1-1 ", 1, 1)])
def test_spans(text: str, low: int, high: int) -> None:
    assert Span.parse("turns", text) == Span(low, high)


@pytest.mark.parametrize("text", ["", "0", "9-2", "a", "1-", "-3", "1.5", "1-2-3"])
def test_wrong_spans(text: str) -> None:
    with pytest.raises(ConfigError, match="turns="):
        Span.parse("turns", text)


def write(path: Path, *lines: Any) -> Path:
    """Write JSON lines."""
    file = path / "in.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    return file


def test_lines_of_a_file(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\u2028b"}]
    file = write(
        tmp_path,
        {"prompt": "x", "max_tokens": 3, "temperature": 0.5, "stream": False, "model": "other"},
        {"messages": chat},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": chat[1:], "max_completion_tokens": 4, "stop": ["."]}},
    )  # fmt: skip
    jobs = read_jobs(file, output_len=Span(8, 8), seed=0)
    assert jobs == [
        Job("x", (3,), fields={"temperature": 0.5}),
        Job(tuple(chat), (8,)),
        Job((chat[1],), (4,), fields={"stop": ["."]}),
    ]
    again = read_jobs(file, output_len=Span(8, 8), seed=0, count=7)
    assert again == [*jobs, *jobs, jobs[0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, "want an object with either"),
        ({"prompt": "x", "messages": [{"role": "user"}]}, "want an object with either"),
        ({"messages": []}, "want an object with either"),
        ([1], "want an object with either"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens=0"),
        ({"prompt": "x", "max_tokens": "3"}, "max_tokens='3'"),
    ],
)
def test_wrong_lines(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_jobs(write(tmp_path, {"prompt": "fine"}, line), output_len=Span(1, 1), seed=0)


def test_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_jobs(tmp_path / "none", output_len=Span(1, 1), seed=0)
    file = tmp_path / "in.jsonl"
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="has no line"):
        read_jobs(file, output_len=Span(1, 1), seed=0)
    file.write_text("{oops")
    with pytest.raises(InvalidRequest, match=r"in\.jsonl:1 is not JSON"):
        read_jobs(file, output_len=Span(1, 1), seed=0)
