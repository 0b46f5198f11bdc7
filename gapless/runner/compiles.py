"""Counts kernels that are compiled once the engine is ready; there should be none."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class CompileCounter:
    """Specialisations of Triton kernels that were met for the first time since `start`."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        """Count from now on."""
        from triton import knobs

        self.count = 0
        knobs.runtime.jit_post_compile_hook = self._note

    @staticmethod
    def stop() -> None:
        """End the count of whichever engine began one: another is being made."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = None

    def _note(self, **compiled: Any) -> None:
        self.count += 1
        logger.warning("compiled while serving: %s", compiled["repr"])
