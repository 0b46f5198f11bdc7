"""The step loop: schedule and launch one step, then read the one before it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from gapless.core.counters import LoopCounters
from gapless.errors import InternalError
from gapless.observe.trace import Kind, Trace
from gapless.scheduler.unread import RUN_AHEAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.core.plan import Delta, StepPlan, StepResult
    from gapless.scheduler.scheduler import Scheduler


class Handle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until its result is on the host."""
        ...


class EngineLoop:
    """Keeps the device one step ahead of the host, or in step with it."""

    def __init__(
        self, scheduler: Scheduler, run: Callable[[StepPlan], Handle], *, runs_ahead: bool = True
    ) -> None:
        self._scheduler = scheduler
        self._run = run
        self._most_unread = RUN_AHEAD if runs_ahead else 0
        self._unread: deque[tuple[StepPlan, Handle]] = deque()
        self._failure: str | None = None
        self.counters = LoopCounters()
        self._trace: Trace | None = None

    def watch(self, trace: Trace | None) -> None:
        """Record the phases of each step from now on; None ends it."""
        self._trace = trace

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any step unread."""
        return self._scheduler.has_work or bool(self._unread)

    def step(self) -> list[Delta]:
        """Launch the next step and return the news of the one before it.

        Raises:
            InternalError: the engine cannot go on, now or since an earlier step.
        """
        if self._failure is not None:
            raise InternalError(f"this engine has failed before: {self._failure}")
        try:
            return self._step()
        except InternalError as error:
            self._failure = str(error)
            raise

    def _step(self) -> list[Delta]:
        started = time.perf_counter()
        self._begin("schedule")
        plan = self._scheduler.schedule()
        self._end()
        if plan is not None:
            self.counters.num_ahead += bool(self._unread)
            self._begin("launch")
            self._unread.append((plan, self._run(plan)))
            self._end()
            self.counters.num_steps += 1
        launched = time.perf_counter()
        self.counters.plan_seconds += launched - started
        if len(self._unread) <= (self._most_unread if plan is not None else 0):
            return []
        read, handle = self._unread.popleft()
        self._begin("wait")
        result = handle.wait()
        self._end()
        self.counters.wait_seconds += time.perf_counter() - launched
        self._begin("commit")
        deltas = self._scheduler.commit(read, result)
        self._end()
        return deltas

    def _begin(self, phase: str) -> None:
        if self._trace is not None:
            self._trace.begin(Kind.PHASE, phase)

    def _end(self) -> None:
        if self._trace is not None:
            self._trace.end()
