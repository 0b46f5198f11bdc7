"""The line of log where an operation runs on torch, on a device that has kernels."""

from __future__ import annotations

import logging
from functools import cache

_logger = logging.getLogger(__name__)


@cache
def log_fallback(operation: str, reason: str) -> None:
    """Log, once, that torch runs an operation since no kernel serves what `reason` names."""
    _logger.info("%s on torch operations: no kernel for %s", operation, reason)
