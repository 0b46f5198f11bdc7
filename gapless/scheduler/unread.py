"""Launched steps that the host has not read: what they promise, and whom they name."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.core.plan import StepPlan
    from gapless.core.request import Request

# launched steps whose results are unread when the next one is planned; reservation, snapshots
# and readmission are derived for this value
RUN_AHEAD = 1


class UnreadSteps:
    """Plans in the order of their launches; the oldest is read first."""

    def __init__(self) -> None:
        self._plans: deque[StepPlan] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def check_may_plan(self) -> None:
        """Assert that the next step is at most `RUN_AHEAD` ahead of what has been read."""
        assert len(self) <= RUN_AHEAD, (
            f"{len(self)} launched steps are unread, at most {RUN_AHEAD} may be"
        )

    def launch(self, plan: StepPlan) -> None:
        """Take in a plan that is launched next."""
        self._plans.append(plan)

    def read(self, plan: StepPlan) -> None:
        """Strike out a plan, which must be the oldest."""
        assert next(iter(self._plans), None) is plan, f"step {plan.step_id} is not the oldest"
        self._plans.popleft()

    def promised_tokens(self) -> Counter[Request]:
        """Fewest tokens that the steps emit for a request that they do not end."""
        promised: Counter[Request] = Counter()
        for plan in self._plans:
            promised.update(segment.request for segment in plan.sampled)
            promised.update(row.request for row in plan.decode)
        return promised

    def names(self, request: Request) -> bool:
        """Whether a step runs tokens of the request."""
        return any(
            request in (segment.request for segment in plan.prefill)
            or request in (row.request for row in plan.decode)
            for plan in self._plans
        )
