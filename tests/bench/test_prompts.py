"""Prompts: disjoint, of mixed length, the same every time."""

from __future__ import annotations

import pytest

from gapless.bench.prompts import prompt_sets


@pytest.mark.parametrize(("num_sets", "num_prompts"), [(1, 1), (6, 16), (5, 300)])
def test_no_prompt_is_used_twice(num_sets: int, num_prompts: int) -> None:
    sets = prompt_sets(num_sets=num_sets, num_prompts=num_prompts)
    prompts = [text for found in sets for text in (found.single, *found.batch)]
    assert [len(found.batch) for found in sets] == [num_prompts] * num_sets
    assert len(set(prompts)) == len(prompts) == num_sets * (num_prompts + 1)
    assert sets == prompt_sets(num_sets=num_sets, num_prompts=num_prompts)


def test_lengths_are_mixed() -> None:
    (found,) = prompt_sets(num_sets=1, num_prompts=16)
    lengths = sorted(len(text) for text in found.batch)
    assert lengths[-1] > 2 * lengths[0]


def test_more_sets_do_not_change_the_first() -> None:
    assert prompt_sets(num_sets=1, num_prompts=4) == prompt_sets(num_sets=3, num_prompts=4)[:1]
