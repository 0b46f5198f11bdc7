"""A device whose copies to the host arrive as late as they may: when their event is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.runner import inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

POISON = -(2**40)


class LateEvent:
    """Runs what was put off, in order, when the host waits."""

    def __init__(self, device: object) -> None:
        self._due: list[Callable[[], None]] = []

    def put_off(self, work: Callable[[], None]) -> None:
        """Have `work` done by the time that a wait returns."""
        self._due.append(work)

    def record(self) -> None:
        pass

    def wait(self) -> None:
        due, self._due = self._due, []
        for work in due:
            work()


def make_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poison every buffer that a copy goes to until its event is waited for."""
    honest = inputs.Download.fetch

    def fetch(self: inputs.Download, count: int) -> inputs.Ticket:
        ticket = honest(self, count)
        array, event = ticket._array, ticket._event
        arrived: Any = array.copy()
        array[:] = POISON
        assert isinstance(event, LateEvent)
        event.put_off(lambda: array.__setitem__(slice(None), arrived))
        return ticket

    monkeypatch.setattr(inputs, "Event", LateEvent)
    monkeypatch.setattr(inputs.Download, "fetch", fetch)
