"""Grading, comparing transcripts, and a peer's batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gapless.eval.accuracy import (
    Difference,
    compare_transcripts,
    first_difference,
    grade,
    measure_accuracy,
)
from gapless.eval.against import Parting, partings, peer_accuracy
from gapless.eval.data import Problem, ProblemSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless import LLM
    from gapless.eval.accuracy import Accuracy

PROBLEMS = ProblemSet("set", (Problem("a", 1), Problem("b", -2), Problem("c", 3)))


def graded(*transcripts: Sequence[int], texts: Sequence[str] = ("", "", "")) -> Accuracy:
    """Grade transcripts of PROBLEMS; prompt i is [i, i]."""
    return grade(PROBLEMS, [[i, i] for i in range(3)], transcripts, texts)


def test_grading() -> None:
    result = graded([1], [2], [3], texts=["#### 1", "#### 2", "#### 4\n#### 3"])
    assert [a.answer for a in result.attempts] == [1, 2, 3]
    assert [a.is_right for a in result.attempts] == [True, False, True]
    assert (result.num_right, result.accuracy) == (2, 2 / 3)
    assert not graded([], [], []).attempts[0].is_right


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1], 1),
        ([], [7], 0),
    ],
)
def test_first_difference(left: list[int], right: list[int], position: int | None) -> None:
    assert first_difference(left, right) == position


def test_transcripts_that_differ() -> None:
    left, right = graded([1, 2], [4, 5, 6], [7]), graded([1, 2], [4, 8, 6], [7, 9])
    assert compare_transcripts(left, left) == ()
    assert compare_transcripts(left, right) == (
        Difference(1, 1, (5, 8)),
        Difference(2, 1, (None, 9)),
    )


class EchoPeer:
    """Generates a prompt's own tokens in reverse."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """Reverse."""
        self.batches.append([len(prompt) for prompt in prompts])
        return [list(prompt)[::-1][:max_tokens] for prompt in prompts]

    def margin(self, prompt: Sequence[int]) -> float:
        """Tell which prompt was asked about."""
        return float(len(prompt))


def test_peer_is_given_the_same_prompts_in_batches_of_like_length(llm: LLM) -> None:
    problems = ProblemSet("many", tuple(Problem(str(i), i) for i in range(70)))
    prompts = [[16] * (1 + i * 7 % 70) + [17] for i in range(70)]
    own = grade(problems, prompts, [[]] * 70, [""] * 70)
    peer = EchoPeer()
    other = peer_accuracy(llm, peer, problems, own, max_tokens=3)
    assert [a.token_ids for a in other.attempts] == [(17, 16, 16)[: len(p)] for p in prompts]
    assert [len(batch) for batch in peer.batches] == [32, 32, 6]
    lengths = [length for batch in peer.batches for length in batch]
    assert lengths == sorted(lengths)
    assert other.attempts[5].text == llm.engine.tokenizer.decode(
        [17, 16, 16], skip_special_tokens=True
    )


def test_peer_ends_where_the_context_does(llm: LLM) -> None:
    prompt = [16] * (llm.engine.config.max_model_len - 2)
    problems = ProblemSet("long", (Problem("a", 1),))
    own = grade(problems, [prompt], [[]], [""])
    other = peer_accuracy(llm, EchoPeer(), problems, own, max_tokens=5)
    assert len(other.attempts[0].token_ids) == 2


def test_partings_say_how_close_the_peer_was() -> None:
    left, right = graded([1, 2], [4, 5, 6], [7]), graded([1, 2], [4, 5, 8], [7, 9])
    # the margin is the length of prompt (2) and shared transcript
    assert partings(EchoPeer(), left, right) == (
        Parting(1, 2, 6, 8, margin=4.0),
        Parting(2, 1, None, 9, margin=3.0),
    )


def test_engine_solves_problems(llm: LLM) -> None:
    question = (
        "Mia earns $15 an hour. She works 3 days, 2 hours each day, and then pays $50 for rent. "
        "How much money is left?"
    )
    problems = ProblemSet("two", (Problem(question, 40), Problem(question, 41)))
    result = measure_accuracy(llm, problems, max_tokens=256)
    assert [a.answer for a in result.attempts] == [40, 40]
    assert result.num_right == 1
    assert result.attempts[0].text.endswith("#### 40")
    assert measure_accuracy(llm, problems, max_tokens=3).num_right == 0
