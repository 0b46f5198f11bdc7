"""Checkpoints of the tiny models, saved once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.models import tiny
from tests.models.comparison import Case, tiny_model
from tests.models.driver import TeacherForced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """Return the directory of a tiny model; for reading only."""
    root = tmp_path_factory.mktemp("tiny")

    def saved(name: str, scaled: bool) -> Path:
        directory = root / (f"{name}_scaled" if scaled else name)
        return directory if directory.exists() else tiny.save(tiny_model(name, scaled), directory)

    return saved


@pytest.fixture
def serve(checkpoint_of: Callable[[str, bool], Path]) -> Callable[[Case], TeacherForced]:
    """Load the engine of a case."""
    return lambda case: TeacherForced(checkpoint_of(case.name, case.scaled), dtype=case.dtype)
