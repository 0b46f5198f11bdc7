"""Set-up of the `gapless` log for programs; libraries just use `logging.getLogger(__name__)`."""

from __future__ import annotations

import logging
import sys

from gapless.errors import ConfigError

_LEVELS = ("debug", "info", "warning", "error")


def configure(level: str) -> None:
    """Send records of `level` and above to standard error, replacing an earlier set-up.

    Raises:
        ConfigError: `level` is not one of debug, info, warning, error.
    """
    if level.lower() not in _LEVELS:
        raise ConfigError(f"log level {level!r}: want one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("gapless")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
