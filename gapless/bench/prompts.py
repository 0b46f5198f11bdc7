"""Prompts to measure with: questions of mixed length, none used twice, so that no cache helps."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from gapless.assets import heldout


@dataclass(frozen=True)
class PromptSet:
    """What every side runs in one round."""

    single: str
    """For the request that runs alone."""
    batch: tuple[str, ...]
    """For the requests that run together."""


def prompt_sets(*, num_sets: int, num_prompts: int) -> list[PromptSet]:
    """Draw disjoint sets out of the bundled held-out questions, always the same ones."""
    size = num_prompts + 1
    drawn = _questions(num_sets * size)
    chunks = [drawn[i * size : (i + 1) * size] for i in range(num_sets)]
    return [PromptSet(single=chunk[0], batch=tuple(chunk[1:])) for chunk in chunks]


def _questions(count: int) -> list[str]:
    files = (heldout("level1"), heldout("level2"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    questions = list(dict.fromkeys(json.loads(line)["question"] for line in lines))
    random.Random(0).shuffle(questions)
    drawn = questions[:count]
    repeat = 1
    while len(drawn) < count:
        # a number in front makes another prompt of it for a prefix cache
        repeat += 1
        drawn += [f"({repeat}) {question}" for question in questions[: count - len(drawn)]]
    return drawn
