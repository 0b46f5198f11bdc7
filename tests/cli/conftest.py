"""Commands run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gapless.cli import main
from tests.engine_fixtures import tiny_checkpoint, tiny_model

__all__ = ["Done", "Run", "run", "tiny_checkpoint", "tiny_model"]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    status: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `gapless` with arguments."""

    def run_command(*argv: str) -> Done:
        capsys.readouterr()
        try:
            status = main(argv)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        captured = capsys.readouterr()
        return Done(status, captured.out, captured.err)

    return run_command
