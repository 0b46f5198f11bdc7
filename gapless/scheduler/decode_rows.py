"""Which requests the next step decodes, kept from step to step while nothing changes that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.request import Status
from gapless.scheduler.unread import RUN_AHEAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from gapless.core.plan import DecodeRow, PrefillSegment, StepPlan
    from gapless.core.request import Request
    from gapless.scheduler.unread import UnreadSteps


class DecodeRows:
    """Rows of a step, and those of them that have outgrown their pages.

    Both are those of the step before until a request comes, goes or nears its limit, which most
    steps do not see.
    """

    def __init__(
        self,
        running: Mapping[Request, DecodeRow],
        constrained: AbstractSet[Request],
        unread: UnreadSteps,
    ) -> None:
        """Args: the scheduler's own, of which nothing is copied; `running` oldest first."""
        self._running, self._constrained, self._unread = running, constrained, unread
        self._kept: tuple[DecodeRow, ...] | None = None
        self._outgrown: list[Request] = []

    def forget(self) -> None:
        """Look at all requests again: some have come or gone."""
        self._kept = None

    def begin_commit(self) -> None:
        """Take in that a step is read; growth in two that are read at once is not in order."""
        if self._outgrown:
            self._kept = None

    def end_commit(self, plan: StepPlan) -> None:
        """Take in that requests of the step that is read have more tokens, or have ended."""
        # oldest first: whose first token the step sampled is the newest, and may have a row, too
        requests = [row.request for row in plan.decode] + [cut.request for cut in plan.sampled]
        for request in dict.fromkeys(requests):
            if len(request.token_ids) + RUN_AHEAD >= request.limit_len:
                self._kept = None
            elif request.committed_len > request.covered_len:
                self._outgrown.append(request)

    def next_rows(self, prefill: Sequence[PrefillSegment] = ()) -> tuple[DecodeRow, ...]:
        """Rows of requests that decode, but for those which the host knows to be done by then.

        A constrained one sits out the step that samples its first token.
        """
        if self._kept is not None and not prefill:
            return self._kept
        decode, promised = Status.DECODE, self._unread.promised_tokens()
        promised.update(segment.request for segment in prefill if segment.is_last)
        rows = tuple(
            row
            for request, row in self._running.items()
            if request.status is decode
            and len(request.token_ids) + (ahead := promised[request]) < request.limit_len
            and not (ahead and request in self._constrained)
        )
        # each unread step promises a row one token, but for the one that has its prefill
        nears_end = (
            len(row.request.token_ids) + RUN_AHEAD >= row.request.limit_len for row in rows
        )
        self._kept = None if prefill or any(nears_end) else rows
        return rows

    def take_outgrown(self) -> list[Request]:
        """Requests of the next rows that want pages, oldest first; some may no longer run."""
        outgrown, self._outgrown = self._outgrown, []
        if self._kept is None:
            requests = (row.request for row in self.next_rows())
            outgrown = [r for r in requests if r.committed_len > r.covered_len]
        return outgrown
