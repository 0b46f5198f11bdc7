"""Which request runs when: waiting order, admission, prefill chunks, decode rows, retraction.

Host integers only. One step is `plan = schedule()`, a launch, and `commit(plan, result)` one
step late: when `schedule` is called, at most one launched step is unread. Whatever a request
holds is released the moment it ends or is retracted, even while an unread step names it:
slots, pages and rows change owner in compute-stream order.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import TYPE_CHECKING

from gapless.cache.manager import Admission, CacheManager
from gapless.cache.rows import IdPool
from gapless.core.counters import CacheCounters, DecodeCounters, WaitReason
from gapless.core.draft_shape import most_emitted
from gapless.core.plan import (
    DecodeRow,
    Delta,
    LogprobRow,
    PageCopy,
    PageEntry,
    PrefillSegment,
    SlotSave,
    StepPlan,
    StepResult,
)
from gapless.core.request import FinishReason, Request, Status
from gapless.core.sampling_params import MAX_STOP_IDS
from gapless.scheduler.decode_rows import DecodeRows
from gapless.scheduler.limits import reason_to_end, reason_to_refuse
from gapless.scheduler.prompt_logprobs import PromptLogprobs
from gapless.scheduler.unread import UnreadSteps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np

    from gapless.scheduler.limits import SchedulerLimits

logger = logging.getLogger(__name__)


class Scheduler:
    """The life of every request from `submit` to its one final delta.

    Waiting requests are served first come, first served, without overtaking.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._cache = CacheManager(limits)
        self._slots = IdPool(limits.max_running_requests)
        self._requests: dict[str, Request] = {}
        # both in order of arrival, and all of `_running` arrived before all of `_waiting`; beside
        # each that runs, the row that stands for it in every batch until it gives up its slot
        self._running: dict[Request, DecodeRow] = {}
        self._waiting: deque[Request] = deque()
        # those among both that a grammar constrains
        self._constrained: set[Request] = set()
        self._unread = UnreadSteps()
        self._rows = DecodeRows(self._running, self._constrained, self._unread)
        # for the next plan: what slots that were given up must save, what admissions copy
        self._saves: list[SlotSave] = []
        self._page_copies: list[PageCopy] = []
        self._prompt_logprobs = PromptLogprobs()
        self.counters = DecodeCounters()
        self._num_plans = 0
        self._wait_reason: WaitReason | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request is alive or a launched step is unread."""
        return bool(self._requests or self._unread)

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet, or nothing any more."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def cache_counters(self) -> CacheCounters:
        """What the prefix cache and memory pressure did since the start."""
        return self._cache.counters

    @property
    def num_free_pages(self) -> int:
        """Pages that neither a request nor the prefix cache holds."""
        return self._cache.num_free_pages

    @property
    def num_free_rows(self) -> int:
        """State rows that neither a request nor the prefix cache holds."""
        return self._cache.num_free_rows

    @property
    def num_cached_nodes(self) -> int:
        """Nodes of the prefix cache's tree."""
        return self._cache.prefix.num_nodes

    @property
    def num_stores_under_way(self) -> int:
        """Copies to the host tier that have not been seen to arrive."""
        return self._cache.prefix.num_stores_under_way

    @property
    def wait_reason(self) -> WaitReason | None:
        """Why the first request in the queue was not admitted at the last step; None if it was."""
        return self._wait_reason

    def submit(self, request: Request) -> Delta | None:
        """Queue a request; one that could never run ends at once with the delta returned."""
        assert request.status is Status.WAITING, f"{request.request_id} is {request.status.value}"
        assert request.request_id not in self._requests, f"{request.request_id} is in use"
        assert len(request.stop_ids) <= MAX_STOP_IDS, f"{len(request.stop_ids)} stop ids"
        num_pages = self._cache.num_pages_at_limit(request.limit_len)
        error = reason_to_refuse(request, self._limits, num_pages)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        if request.is_constrained:
            self._constrained.add(request)
        return self.finish(request, FinishReason.ERROR, error) if error else None

    def schedule(self) -> StepPlan | None:
        """Plan the next step; the caller launches it. None if nothing can run before a commit.

        Retracts the requests admitted last when pages run out. A grammar's masks need every token
        before them, so a batch with constrained rows waits until the step before it is read.
        """
        self._unread.check_may_plan()
        if any(r.status is Status.DECODE and self._unread.names(r) for r in self._constrained):
            return None
        self._cache.prefix.begin_step()
        page_entries = self._grow_decode_rows()
        prefill = tuple(self._cut_segments())
        rows = self._rows.next_rows(prefill)
        awaits_stores = False
        if not prefill and not rows:
            if self._unread or not self._requests:
                return None
            awaits_stores = self._cache.prefix.num_stores_under_way > 0
            assert awaits_stores, "requests wait, and nothing will wake them"
        plan = StepPlan(
            step_id=self._num_plans,
            prefill=prefill,
            decode=rows,
            page_entries=page_entries,
            max_seq_len=self._largest_seq_len(rows),
            saves=tuple(self._saves),
            loads=self._cache.prefix.take_loads(),
            stores=self._cache.prefix.begin_stores(),
            awaits_stores=awaits_stores,
            page_copies=tuple(self._page_copies),
        )
        self._saves.clear()
        self._page_copies.clear()
        self._num_plans += 1
        self._unread.launch(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Delta]:
        """Append what the oldest unread step emitted, and end the requests that it ended.

        Tokens of a request that the host has ended meanwhile are dropped; those of a retracted
        one are kept. A prompt's log-probabilities come with the request's first token.
        """
        self._unread.read(plan)
        self._rows.begin_commit()
        self._cache.prefix.end_stores(result.num_stored)
        self._prompt_logprobs.collect(plan, result)
        for segment in plan.prefill:
            segment.request.checkpoint_len = segment.end
        news = self._take_first_tokens(plan, result)
        self._take_windows(plan, result, news)
        self._rows.end_commit(plan)
        return list(news.values())

    def _take_first_tokens(self, plan: StepPlan, result: StepResult) -> dict[Request, Delta]:
        news: dict[Request, Delta] = {}
        firsts = result.prefill_tokens.tolist()
        for i, (segment, token) in enumerate(zip(plan.sampled, firsts, strict=True)):
            request = segment.request
            if request.status is Status.FINISHED:
                continue
            prompt_logprobs = () if request.num_output else self._prompt_logprobs.take(request)
            self._append(request, (token,))
            news[request] = Delta(
                request,
                (token,),
                request.finish_reason,
                logprobs=_logprobs(request, result.prefill_logprobs, i, 1),
                prompt_logprobs=prompt_logprobs,
            )
        return news

    def _take_windows(self, plan: StepPlan, result: StepResult, news: dict[Request, Delta]) -> None:
        """Append and count what decode rows emitted; `news` holds the first tokens of this step."""
        grid, finished, counters = self._limits.replay_len, Status.FINISHED, self.counters
        windows: Counter[tuple[int, int]] = Counter()
        rows = zip(
            plan.decode,
            result.decode_tokens.tolist(),
            result.decode_lens.tolist(),
            result.decode_proposed.tolist(),
            strict=True,
        )
        for i, (row, window, num_emitted, num_proposed) in enumerate(rows):
            request = row.request
            first = news.get(request)
            if request.status is finished and first is None:
                continue
            if num_emitted == 0:
                assert request.status is finished, (
                    f"{request.request_id} is done on the device only"
                )
                continue
            # those that were committed when the step started: all but the newest
            seq_len, checkpoint_len = len(request.token_ids) - 1, request.checkpoint_len
            folded_len = max(checkpoint_len, seq_len // grid * grid)
            request.checkpoint_len = folded_len
            flushes, entries = folded_len > checkpoint_len, seq_len - checkpoint_len
            request.num_flushes += flushes
            request.ring_entries += entries
            counters.num_flushes += flushes
            counters.ring_entries += entries
            kind = num_emitted, num_proposed
            request.windows[kind] += 1
            windows[kind] += 1
            tokens = tuple(window[:num_emitted])
            self._append(request, tokens)
            logprobs = _logprobs(request, result.decode_logprobs, i, num_emitted)
            delta = Delta(request, tokens, request.finish_reason, logprobs=logprobs)
            news[request] = delta if first is None else _joined(first, delta)
        for (num_emitted, num_proposed), num_rows in windows.items():
            counters.record(num_emitted, num_proposed, num_rows)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> Delta:
        """End a request for a reason that the device does not see, and release all it holds.

        Call it between two iterations (plan, launch, commit), so that at most one unread step
        names the request; that step's tokens will be dropped. Returns the final delta.
        """
        self._end(request, reason)
        self._prompt_logprobs.take(request)
        return Delta(request, (), reason, error)

    def abort(self, request_id: str) -> Delta | None:
        """`finish` by id, at the client's wish; None if no such request is alive."""
        request = self._requests.get(request_id)
        return None if request is None else self.finish(request, FinishReason.ABORT)

    def flush_cache(self) -> int:
        """Forget cached prefixes that no running request builds on; returns tokens forgotten."""
        return self._cache.prefix.flush()

    def check_is_empty(self) -> None:
        """Assert that all memory is free, once nothing runs and the cache is flushed. For tests."""
        self.check_conserved()
        assert self._slots.num_free == self._slots.size, "slots are held"
        assert self._cache.num_free_pages == self._limits.num_pages, "pages are held"
        assert self._cache.num_free_rows == self._limits.num_state_rows, "state rows are held"

    def check_conserved(self) -> None:
        """Assert that slots, pages, rows and unread steps add up. For tests."""
        self._cache.check_conserved(self._running)
        slots = {request.slot for request in self._running}
        assert len(slots) == len(self._running), f"a slot has two owners: {sorted(slots)}"
        assert len(slots) + self._slots.num_free == self._slots.size, "slots were lost"
        assert set(self._requests.values()) == {*self._running, *self._waiting}, "lost requests"
        assert len(self._requests) == len(self._running) + len(self._waiting), "queued twice"
        assert self._constrained <= set(self._requests.values()), "constrained ones leak"
        assert self._prompt_logprobs.requests <= set(self._requests.values()), "logprobs leak"
        for request in self._running:
            assert request.status in (Status.PREFILL, Status.DECODE), f"{request} runs"
        for request in list(self._running)[:-1]:
            assert request.status is Status.DECODE, f"{request} was overtaken"
        for request in self._waiting:
            assert request.status is Status.WAITING, f"{request} waits"
            assert request.slot == request.state_row == -1, f"{request} holds a slot or row"
            assert not request.pages, f"{request} holds pages"
        for request, row in self._running.items():
            assert row == DecodeRow(request, request.slot), f"{request} is not in its row"

    def _grow_decode_rows(self) -> tuple[PageEntry, ...]:
        # oldest first, and it is the newest that yields: the oldest always gets on
        entries: list[PageEntry] = []
        for request in self._rows.take_outgrown():
            if request in self._running:
                entries += self._grow(request)
        return tuple(entries)

    def _grow(self, request: Request) -> list[PageEntry]:
        grow = self._cache.grow
        while (entries := grow(request, is_alone=len(self._running) == 1)) is None:
            assert len(self._running) > 1 or self._cache.prefix.num_stores_under_way, (
                f"{request.request_id} does not fit alone"
            )
            newest = next(reversed(self._running))
            self._retract(newest)
            if newest is request:
                return []
        return entries

    def _retract(self, request: Request) -> None:
        """Send a request back to the head of the queue with its tokens and nothing else."""
        self._release(request, request.committed_len)
        request.status = Status.WAITING
        request.committed_len = 0
        self._waiting.appendleft(request)
        self._cache.counters.num_retractions += 1
        logger.info("%s goes back to the queue: too few pages are free", request.request_id)

    def _cut_segments(self) -> Iterator[PrefillSegment]:
        budget = self._limits.chunked_prefill_size
        for request, admission in self._prefilling():
            start, total_len = request.committed_len, len(request.token_ids)
            end = min(total_len, start + budget)
            request.committed_len = end
            if end == total_len:
                request.status = Status.DECODE
            yield PrefillSegment(
                request=request,
                slot=request.slot,
                state_row=request.state_row,
                pages=tuple(request.pages),
                start=start,
                end=end,
                is_last=end == total_len,
                resumed_row=admission.resumed_row if admission is not None else None,
                snapshots=self._cache.take_snapshots(request, start, end),
                is_first=admission is not None,
            )
            budget -= end - start
            if budget == 0:
                return

    def _prefilling(self) -> Iterator[tuple[Request, Admission | None]]:
        """Requests with tokens to launch; the waiting ones are admitted as they are asked for."""
        # a chunk serves one after the other: only the newest can have been cut short
        newest = next(reversed(self._running), None)
        if newest is not None and newest.status is Status.PREFILL:
            yield newest, None
        self._wait_reason = None
        while self._waiting:
            admitted = self._admit(self._waiting[0])
            if isinstance(admitted, WaitReason):
                self._note_wait(admitted)
                return
            request = self._waiting.popleft()
            request.committed_len = admitted.cached_len
            if admitted.page_copy is not None:
                self._page_copies.append(admitted.page_copy)
            yield request, admitted

    def _admit(self, request: Request) -> Admission | WaitReason:
        if self._unread.names(request):
            return WaitReason.UNREAD
        if self._slots.num_free == 0:
            return WaitReason.SLOTS
        admitted = self._cache.admit(request, is_alone=not self._running)
        if isinstance(admitted, WaitReason):
            return admitted
        slot = self._slots.allocate()
        assert slot is not None, "a slot was free above"
        request.slot = slot
        request.status = Status.PREFILL
        self._running[request] = DecodeRow(request, slot)
        return admitted

    def _note_wait(self, reason: WaitReason) -> None:
        waits = self._cache.counters.waits
        if reason not in waits:
            logger.info("%d requests wait: %s", len(self._waiting), reason)
        waits[reason] = waits.get(reason, 0) + 1
        self._wait_reason = reason

    def _largest_seq_len(self, rows: Iterable[DecodeRow]) -> int:
        """Upper bound of the device's committed lengths when the planned step starts."""
        unread = most_emitted(self._limits.max_window, self._limits.tree) * len(self._unread)
        return max([row.request.committed_len for row in rows], default=0) + unread

    def _append(self, request: Request, tokens: tuple[int, ...]) -> None:
        token_ids = request.token_ids
        new_len = len(token_ids) + len(tokens)
        if new_len < request.limit_len and set(tokens).isdisjoint(request.stop_ids):
            # none of them can end it
            assert request.status is not Status.FINISHED, (
                f"{request.request_id}: tokens {tokens} after its end"
            )
            token_ids += tokens
            request.committed_len = new_len - 1
        else:
            self._append_one_by_one(request, tokens)

    def _append_one_by_one(self, request: Request, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            assert request.status is not Status.FINISHED, (
                f"{request.request_id}: token {token} after its end"
            )
            request.token_ids.append(token)
            request.committed_len = len(request.token_ids) - 1
            reason = reason_to_end(request)
            if reason is not None:
                self._end(request, reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        assert request.status is not Status.FINISHED, f"{request.request_id} has ended before"
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            # what an error left is not to be trusted
            kept = 0 if reason is FinishReason.ERROR else request.committed_len
            self._release(request, kept)
        del self._requests[request.request_id]
        self._constrained.discard(request)
        request.status = Status.FINISHED
        request.finish_reason = reason

    def _release(self, request: Request, kept_len: int) -> None:
        """Take all back, and cache the first `kept_len` tokens with their state."""
        del self._running[request]
        self._rows.forget()
        save = self._cache.release(request, kept_len)
        if save is not None:
            self._saves.append(save)
        self._slots.free(request.slot)
        request.slot = -1


def _joined(first: Delta, window: Delta) -> Delta:
    """News of a request whose first token and first window are of the same step."""
    return Delta(
        window.request,
        first.token_ids + window.token_ids,
        window.finish_reason,
        logprobs=first.logprobs + window.logprobs,
        prompt_logprobs=first.prompt_logprobs,
    )


def _logprobs(
    request: Request, found: np.ndarray | None, index: int, count: int
) -> tuple[LogprobRow, ...]:
    """Rows of a request's `count` tokens, which are at `index` of what a step found."""
    if request.params.logprobs is None:
        return ()
    assert found is not None, f"{request.request_id} asked for log-probabilities"
    return tuple(found[index].reshape(-1, found.shape[-1])[:count].tolist())
