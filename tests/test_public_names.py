"""The public names of gapless are the ones that are documented, and each can be imported."""

from __future__ import annotations

import inspect

import pytest

import gapless
from gapless import errors

ERRORS = sorted(
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.GaplessError)
)
PUBLIC = sorted(["LLM", "SamplingParams", "EngineOptions", "Grammar", *ERRORS])


def test_all_lists_the_public_names() -> None:
    assert sorted(gapless.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_can_be_imported(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from gapless import {name}", namespace)
    assert inspect.isclass(namespace[name])
    assert name in dir(gapless)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_ones_that_are_raised(name: str) -> None:
    assert vars(errors)[name] is getattr(gapless, name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        gapless.NoSuchName  # noqa: B018
