"""One request's work in the engine, as long as somebody waits for it.

It ends with its last token, and at once when the client goes, time is up, or the server stops.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gapless.core.request import FinishReason
from gapless.errors import InvalidRequest
from gapless.server.errors import ApiError, ClientGone, TimeLimit
from gapless.server.schemas import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from gapless.core.messages import Submission, Update
    from gapless.server.site import Site


class Running:
    """Submissions of one request; `close` it in any case."""

    def __init__(
        self, site: Site, request_id: str, submissions: Sequence[Submission], arrived: float
    ) -> None:
        """`arrived` is when the request did, by the event loop's clock."""
        self._site = site
        self._id = request_id
        self._loop = asyncio.get_running_loop()
        self._arrived = arrived
        self._index = {submission.request_id: place for place, submission in enumerate(submissions)}
        self._n = submissions[0].params.n
        self._prompt_tokens = sum(len(submission.prompt_ids) for submission in submissions)
        self._cached_tokens = 0
        # by choice
        self._num_tokens = [0] * (len(submissions) * self._n)
        self._newest = [0.0] * len(self._num_tokens)
        if request_id in site.running:
            raise InvalidRequest(f"request_id={request_id!r} is in use; choose another")
        self._stream = site.engine.submit(submissions)
        site.running[request_id] = self
        limit = site.options.request_timeout_seconds
        self._timer = self._loop.call_at(arrived + limit, self.fail, TimeLimit(limit))
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, site: Site, request: Request, request_id: str, submissions: Sequence[Submission]
    ) -> Running:
        """Have the engine queue the submissions.

        Raises:
            RequestError: it refuses them.
            ApiError: the work ended before that.
        """
        running = cls(site, request_id, submissions, request.state.arrived)
        running._watcher = asyncio.create_task(running._watch(request))
        try:
            await running._stream.accepted()
        except BaseException:
            running.close()
            raise
        for submission in submissions:
            site.metrics.accepted(len(submission.prompt_ids))
        return running

    def choice(self, update: Update) -> int:
        """Index of an update's choice: samples of a prompt stand together."""
        return self._index[update.request_id] * self._n + update.index

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        completion = sum(self._num_tokens)
        return Usage(
            self._prompt_tokens,
            completion,
            self._prompt_tokens + completion,
            PromptTokensDetails(self._cached_tokens),
        )

    async def take(self) -> list[Update]:
        """Block until there are updates, and take all; empty at the end.

        Raises:
            ApiError, EngineGone: the work has been ended.
        """
        updates = await self._stream.take()
        now = self._loop.time()
        for update in updates:
            if update.error is not None:
                raise InvalidRequest(update.error)
            self._observe(update, now)
        return updates

    def fail(self, error: ApiError) -> None:
        """End the work; whoever waits for it sees `error`."""
        if self._stream.is_open:
            self._site.metrics.cut(error.code or "other")
        self._stream.fail(error)

    def abort(self) -> None:
        """End the work, as a client asks; its choices finish with `abort`."""
        self._site.engine.abort(self._stream.request_ids)

    def close(self) -> None:
        """Let go of everything."""
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        self._stream.close()
        self._site.running.pop(self._id, None)

    async def _watch(self, request: Request) -> None:
        """End the work when the client closes the connection."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())

    def _observe(self, update: Update, now: float) -> None:
        metrics, choice, count = self._site.metrics, self.choice(update), len(update.token_ids)
        if count and self._num_tokens[choice] == 0:
            metrics.first_token(now - self._arrived, count)
        elif count:
            metrics.more_tokens(now - self._newest[choice], count)
        if count:
            self._newest[choice] = now
            self._num_tokens[choice] += count
        reason = update.finish_reason
        if reason is None:
            return
        if update.index == 0:
            self._cached_tokens += update.cached_tokens
        assert reason is not FinishReason.ERROR, "those are raised"
        total = self._num_tokens[choice]
        metrics.finished(reason, now - self._arrived, update.queue_seconds, total)
