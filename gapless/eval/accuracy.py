"""Accuracy on word problems: chat prompts, greedy, exact match of the last `#### N`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.core.sampling_params import SamplingParams
from gapless.eval.answers import last_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.messages import GenerationResult
    from gapless.engine.llm import LLM, Prompt
    from gapless.eval.data import ProblemSet


@dataclass(frozen=True)
class Attempt:
    """One problem and what the model made of it."""

    question: str
    expected: int
    answer: int | None
    """The number found in the text, None where there is none."""
    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        """Whether the number is the expected one."""
        return self.answer == self.expected


@dataclass(frozen=True)
class Accuracy:
    """All attempts at one set of problems."""

    name: str
    attempts: tuple[Attempt, ...]

    @property
    def num_right(self) -> int:
        """Problems solved."""
        return sum(attempt.is_right for attempt in self.attempts)

    @property
    def accuracy(self) -> float:
        """Share of problems solved."""
        return self.num_right / len(self.attempts)


@dataclass(frozen=True)
class Difference:
    """Where two transcripts of one problem part."""

    problem: int
    """Index in the set."""
    position: int
    """Index of the first generated token that differs, or that only one side has."""
    token_ids: tuple[int | None, int | None]
    """What each side has there; None past its end."""


def measure_accuracy(
    llm: LLM, problems: ProblemSet, *, max_tokens: int, shows_progress: bool = False
) -> Accuracy:
    """Solve every problem in one batch.

    Raises:
        RequestError: a prompt does not fit the context, or the model has no chat template.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prompts: list[Prompt] = [[{"role": "user", "content": p.question}] for p in problems.problems]
    results: list[GenerationResult] = llm.generate(prompts, params, shows_progress=shows_progress)
    return grade(
        problems,
        [result.prompt_token_ids for result in results],
        [result.token_ids for result in results],
        [result.text for result in results],
    )


def grade(
    problems: ProblemSet,
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    texts: Sequence[str],
) -> Accuracy:
    """Compare the number at the end of each text with the expected one."""
    attempts = tuple(
        Attempt(
            question=problem.question,
            expected=problem.answer,
            answer=last_number(text),
            text=text,
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(ids),
        )
        for problem, prompt, ids, text in zip(
            problems.problems, prompt_ids, token_ids, texts, strict=True
        )
    )
    return Accuracy(problems.name, attempts)


def compare_transcripts(left: Accuracy, right: Accuracy) -> tuple[Difference, ...]:
    """Return where two runs over the same problems generated other tokens."""
    differences = []
    for problem, (a, b) in enumerate(zip(left.attempts, right.attempts, strict=True)):
        position = first_difference(a.token_ids, b.token_ids)
        if position is not None:
            pair = (_at(a.token_ids, position), _at(b.token_ids, position))
            differences.append(Difference(problem, position, pair))
    return tuple(differences)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which the sequences differ or only one goes on; None if equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
