"""How much of the time a device is idle: between the graphs that it runs, and inside them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Interval = tuple[float, float]
    Run = Sequence[Interval]


@dataclass(frozen=True)
class IdleShares:
    """Shares of the time from the first run's start to the last one's."""

    seam: float
    """Between the end of a run and the start of the next."""
    gap: float
    """Inside runs, when nothing of them ran."""


def idle_shares(stretches: Iterable[Sequence[Run]]) -> IdleShares | None:
    """Divide the time that nothing ran; None where no run follows another.

    Args: stretches: of runs that follow each other with nothing else to do between them. A run is
        what one graph ran: start and end of each piece, in any unit, in any order.
    """
    between = within = whole = 0.0
    for runs in stretches:
        for run, following in pairwise(runs):
            start = last = min(run)[0]
            for began, ended in sorted(run):
                within += max(0.0, began - last)
                last = max(last, ended)
            next_start = min(following)[0]
            between += max(0.0, next_start - last)
            whole += next_start - start
    if whole <= 0.0:
        return None
    return IdleShares(seam=between / whole, gap=within / whole)


def busy_time(intervals: Iterable[Interval]) -> float:
    """Return the time that at least one interval covers."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
