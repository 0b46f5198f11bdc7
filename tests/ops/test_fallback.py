"""What a user is told where torch stands in for a kernel."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gapless.ops.fallback import log_fallback

if TYPE_CHECKING:
    import pytest


def test_each_reason_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, logger="gapless"):
        for reason in ("wide rows", "wide rows", "float64"):
            log_fallback("norms run", reason)
    assert caplog.messages == [
        "norms run on torch operations: no kernel for wide rows",
        "norms run on torch operations: no kernel for float64",
    ]
