"""docs/options.md is what the option dataclasses say."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from gapless.config.options import EngineOptions
from gapless.core.sampling_params import SamplingParams

ROOT = Path(__file__).parents[1]


def load_tool() -> Any:
    """Import the script that writes the page."""
    file = ROOT / "tools" / "make_option_docs.py"
    spec = importlib.util.spec_from_file_location("make_option_docs", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def test_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == TOOL.render(), "stale: run `make docs`"


@pytest.mark.parametrize("options", [EngineOptions, SamplingParams])
def test_every_option_has_its_row(options: type[Any]) -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    for field in fields(options):
        row = re.search(rf"^\| `--{field.name.replace('_', '-')}` \|.*$", page, re.MULTILINE)
        assert row is not None, field.name
        assert row[0].count("|") == 5, row[0]
        assert not row[0].endswith("|  |"), f"{field.name} has no meaning"


@dataclass(frozen=True)
class Sample:
    """Options that show every kind of type."""

    one_word: str | None = None
    """A meaning
    on two lines."""
    kind: Literal["a", "b"] | None = "b"
    """Either."""
    many: tuple[int, ...] = ()
    """Several."""
    on: bool = False
    """Yes."""


def test_rows_of_a_dataclass() -> None:
    assert TOOL.option_rows(Sample) == [
        ("`--one-word`", "text", "`None`", "A meaning on two lines."),
        ("`--kind`", "`a`, `b`", "`b`", "Either."),
        ("`--many`", "list of integer", "`()`", "Several."),
        ("`--on`", "yes or no", "`False`", "Yes."),
    ]


def test_an_option_without_a_meaning_is_refused() -> None:
    @dataclass(frozen=True)
    class Bare:
        silent: int = 1

    with pytest.raises(KeyError, match="silent"):
        TOOL.option_rows(Bare)


def test_every_environment_variable_that_is_read_is_listed() -> None:
    read = re.compile(r"\b(?:environ\b|getenv\()[^\"'\n]*(?:[\"'](\w+)[\"'])?")
    found = {
        name
        for path in sorted((ROOT / "gapless").rglob("*.py"))
        for name in read.findall(path.read_text(encoding="utf-8"))
    }
    assert found == set(TOOL.OWN_VARIABLES)
