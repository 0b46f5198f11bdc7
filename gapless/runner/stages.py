"""A step as a list of stages; where two stages have no seam between them, one graph holds both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Stage:
    """A piece of device work: takes what the stage before it made, returns what the next needs."""

    name: str
    run: Callable[[Any], Any]
    plan: Callable[[], None] | None = None
    """Host work that must happen right before this stage: a seam."""


def cut_at_seams(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Group stages into runs with no seam inside; each run is one graph."""
    runs: list[list[Stage]] = []
    for stage in stages:
        if not runs or stage.plan is not None:
            runs.append([])
        runs[-1].append(stage)
    return runs
