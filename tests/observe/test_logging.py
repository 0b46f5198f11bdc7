"""The log goes to standard error at the level asked for, and importing gapless sets nothing up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from gapless.errors import ConfigError
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger = logging.getLogger("gapless")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_import_adds_no_handler() -> None:
    assert logging.getLogger("gapless").handlers == []


def test_level_is_honoured_and_records_come_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure("debug")
    configure("INFO")
    logger = logging.getLogger("gapless.config.resolve")
    logger.debug("unseen")
    logger.info("chose %d", 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.endswith("INFO gapless.config.resolve: chose 3\n")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="'loud': want one of debug, info, warning, error"):
        configure("loud")
