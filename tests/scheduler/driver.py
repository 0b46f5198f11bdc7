"""The engine's loop around a hash device, checking everything it sees; and random programs."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING

from gapless.cache.pages import largest_reserved_len
from gapless.core.request import FinishReason, Request, Status
from gapless.core.sampling_params import SamplingParams
from gapless.scheduler.limits import SchedulerLimits
from gapless.scheduler.scheduler import Scheduler
from tests.scheduler.hash_device import (
    VOCAB_SIZE,
    Divergence,
    Flaw,
    HashDevice,
    Sizes,
    prompt_logprob,
    reference,
    reference_output,
)

if TYPE_CHECKING:
    from gapless.core.draft_shape import TreeShape
    from gapless.core.plan import Delta, StepPlan, StepResult

HOST_ENDS = (FinishReason.STOP, FinishReason.ABORT)


def make_request(
    name: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int,
    min_tokens: int = 0,
    stop_ids: tuple[int, ...] = (),
    wants_prompt_logprobs: bool = False,
    message_end: int | None = None,
) -> Request:
    """A request that may reach `len(prompt) + max_tokens` tokens."""
    return Request(
        request_id=name,
        prompt_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens),
        seed=0,
        stop_ids=stop_ids,
        limit_len=len(prompt) + max_tokens,
        wants_prompt_logprobs=wants_prompt_logprobs,
        message_end=message_end,
    )


class Driver:
    """Runs requests to their ends, one result behind the launches.

    With a `run_ahead` above 1 an ended request's state is checked only where the device itself
    ended it: the host's length lags too far behind otherwise.
    """

    def __init__(self, sizes: Sizes, run_ahead: int = 1) -> None:
        self.sizes = sizes
        self.limits = sizes.limits
        self.run_ahead = run_ahead
        self.scheduler = Scheduler(sizes.limits)
        self.device = HashDevice(sizes)
        self.pending: deque[tuple[StepPlan, StepResult]] = deque()
        self.requests: dict[str, Request] = {}
        self.finals: dict[str, Delta] = {}
        self.ended_by_host: set[str] = set()
        self._output: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[tuple[float, ...]]] = {}

    @property
    def live(self) -> list[Request]:
        """Requests without a final delta, in order of arrival."""
        return [r for name, r in self.requests.items() if name not in self.finals]

    def submit(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._output[request.request_id] = []
        self._logprobs[request.request_id] = []
        delta = self.scheduler.submit(request)
        if delta is not None:
            self._take(delta)
        self.scheduler.check_conserved()

    def step(self) -> None:
        """One iteration: plan, launch, read the step before."""
        plan = self.scheduler.schedule()
        self.scheduler.check_conserved()
        if plan is not None:
            self._check_plan(plan)
            self.pending.append((plan, self.device.run(plan)))
        if self.pending and (len(self.pending) > self.run_ahead or plan is None):
            self._commit()

    def settle(self) -> None:
        """Read all results, as an engine without run-ahead does."""
        while self.pending:
            self._commit()

    def flush(self) -> None:
        """Forget what is cached."""
        self.scheduler.flush_cache()
        self.scheduler.check_conserved()

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a live request from the host: an abort, or a stop string."""
        if self.run_ahead == 1 and request.status is Status.DECODE:
            self._check_snapshot(request, request.slot)
        self.ended_by_host.add(request.request_id)
        if reason is FinishReason.ABORT:
            delta = self.scheduler.abort(request.request_id)
            assert delta is not None, "a live request can be aborted"
        else:
            delta = self.scheduler.finish(request, reason)
        self._take(delta)
        assert self.scheduler.abort(request.request_id) is None, "ended twice"
        self.scheduler.check_conserved()

    def drain(self, most_steps: int = 3000) -> None:
        """Run until nothing is left, and check every request and that all memory is back."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        else:
            raise Divergence("livelock")
        assert not self.pending, "a launched step was not read"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        self._let_stores_arrive()
        self.flush()
        self.scheduler.check_is_empty()
        for request in self.requests.values():
            self._check_request(request)

    def _let_stores_arrive(self) -> None:
        """Go on, with a request that nothing is cached of, until no copy is under way."""
        while self.scheduler.num_stores_under_way:
            name = f"last{len(self.requests)}"
            self.submit(make_request(name, (VOCAB_SIZE,), max_tokens=1))
            while self.scheduler.has_work:
                self.step()

    def _commit(self) -> None:
        plan, result = self.pending.popleft()
        held = {r: r.slot for r in self.live if r.status is Status.DECODE}
        for delta in self.scheduler.commit(plan, result):
            self._take(delta)
            if delta.finish_reason is not None and delta.request in held:
                slot = held[delta.request]
                self.device.check_frozen(slot, delta.request.committed_len)
                self._check_snapshot(delta.request, slot)
        self.scheduler.check_conserved()

    def _check_snapshot(self, request: Request, slot: int) -> None:
        position = request.committed_len
        self.device.check_snapshot(slot, tuple(request.token_ids), position)

    def _take(self, delta: Delta) -> None:
        name = delta.request.request_id
        assert name not in self.finals, f"{name}: a delta after its final one"
        assert delta.token_ids or delta.finish_reason, f"{name}: a delta without news"
        self._output[name] += delta.token_ids
        if delta.prompt_logprobs:
            self._logprobs[name].append(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finals[name] = delta

    def _check_plan(self, plan: StepPlan) -> None:
        num_tokens = sum(segment.end - segment.start for segment in plan.prefill)
        assert num_tokens <= self.limits.chunked_prefill_size
        slots = [row.slot for row in plan.decode]
        assert len(set(slots)) == len(slots)
        assert {entry.slot for entry in plan.page_entries} <= set(slots)
        assert len(self.pending) <= self.run_ahead
        named = Counter(slot for unread, _ in self.pending for slot in _slots_of(unread))
        assert all(named[slot] <= self.run_ahead for slot in _slots_of(plan))

    def _check_request(self, request: Request) -> None:
        name, final = request.request_id, self.finals[request.request_id]
        output = tuple(self._output[name])
        assert output == tuple(request.output_ids), f"{name}: deltas {output}"
        if final.finish_reason is FinishReason.ERROR:
            assert self._is_impossible(request), f"{name} was refused: {final.error}"
            assert not output
            return
        assert not self._is_impossible(request), f"{name} was not refused"
        wanted = reference_output(request)
        if name in self.ended_by_host:
            assert output == wanted[: len(output)], f"{name}: {output}, want {wanted}"
            assert final.finish_reason in HOST_ENDS
        else:
            assert output == wanted, f"{name}: {output}, want {wanted}"
            is_stop = output[-1] in request.stop_ids and len(output) > request.params.min_tokens
            assert final.finish_reason == (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        self._check_logprobs(request, has_first=bool(output))

    def _check_logprobs(self, request: Request, *, has_first: bool) -> None:
        prompt = request.prompt_ids
        wanted = tuple(
            prompt_logprob(reference(prompt[:i])[0], prompt[i]) for i in range(1, len(prompt))
        )
        is_due = has_first and request.wants_prompt_logprobs and wanted
        assert self._logprobs[request.request_id] == ([wanted] if is_due else [])

    def _is_impossible(self, request: Request) -> bool:
        limits, limit_len = self.limits, request.limit_len
        most_tokens = largest_reserved_len(limits.max_window, limit_len, limits.tree)
        return (
            not 0 < len(request.prompt_ids) < limit_len <= limits.max_model_len
            or most_tokens > limits.num_pages * limits.page_size
        )


def _slots_of(plan: StepPlan) -> set[int]:
    return {s.slot for s in plan.prefill} | {row.slot for row in plan.decode}


def random_sizes(
    rng: random.Random,
    window: int,
    flaws: frozenset[Flaw],
    *,
    uses_prefix_cache: bool,
    tree: TreeShape | None = None,
) -> Sizes:
    """Small pools: most hold little more than the longest request."""
    max_model_len, page_size = rng.randrange(8, 40), rng.randrange(1, 6)
    largest = -(-largest_reserved_len(window, max_model_len, tree) // page_size)
    limits = SchedulerLimits(
        max_running_requests=rng.randrange(1, 7),
        max_model_len=max_model_len,
        num_pages=max(1, largest + rng.choice([-1, 0, 0, 1, 2, 3, largest // 2, 3 * largest])),
        page_size=page_size,
        num_state_rows=rng.randrange(1, 9),
        chunked_prefill_size=rng.choice([1, 2, 3, 7, 16, 64]),
        max_window=window,
        tree=tree,
        replay_len=rng.choice([1, 2, 4, 5]),
        uses_prefix_cache=uses_prefix_cache,
        needs_snapshots=window > 1 or rng.random() < 0.8,
        page_bytes=rng.choice([0, 1, 10]),
        row_bytes=rng.choice([1, 100]),
        num_host_pages=rng.choice([0, 0, 3, 10, 60]),
        num_host_rows=rng.randrange(1, 10),
    )
    return Sizes(
        limits=limits,
        accept_rate=rng.choice([0.0, 0.3, 0.7, 0.95, 1.0]),
        seed=rng.randrange(1 << 30),
        flaws=flaws,
    )


def random_prompt(rng: random.Random, requests: list[Request], most: int) -> tuple[int, ...]:
    """A new prompt, one like or as an earlier one, or the next turn of an earlier request."""
    new = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, max(2, most // 4))))
    if not requests or rng.random() < 0.3:
        return new
    earlier = rng.choice(requests)
    whole, kind = tuple(earlier.token_ids), rng.random()
    if kind < 0.2:
        return earlier.prompt_ids
    if kind < 0.6:
        return (*whole, *new)[: most - 1]
    return (*whole[: rng.randrange(len(whole) + 1)], *new)[: most - 1]


def random_request(
    rng: random.Random, name: str, max_model_len: int, requests: list[Request]
) -> Request:
    """A request that usually, not always, fits the context."""
    prompt = random_prompt(rng, requests, max_model_len)
    room = max_model_len - len(prompt)
    max_tokens = max(1, room + rng.choice([-20, -10, -5, -3, -2, -1, 0, 0, 1]))
    return make_request(
        name,
        prompt,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 1, 3, max_tokens]) if max_tokens >= 3 else 0,
        stop_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1, 2]))),
        wants_prompt_logprobs=rng.random() < 0.2,
        message_end=rng.choice([None, rng.randrange(1, len(prompt) + 1)]),
    )


def run_program(
    seed: int,
    *,
    window: int,
    run_ahead: int = 1,
    flaws: frozenset[Flaw] = frozenset(),
    uses_prefix_cache: bool = True,
    tree: TreeShape | None = None,
) -> Driver:
    """Run one random program to its end; raises AssertionError where the design is broken."""
    rng = random.Random(seed)
    sizes = random_sizes(rng, window, flaws, uses_prefix_cache=uses_prefix_cache, tree=tree)
    driver = Driver(sizes, run_ahead)
    num_requests, end_rate = rng.randrange(1, 16), rng.choice([0.0, 0.0, 0.1, 0.3])
    flush_rate, submit_rate = rng.choice([0.0, 0.0, 0.02]), rng.choice([0.3, 0.8])
    while len(driver.requests) < num_requests:
        if rng.random() < submit_rate:
            name = f"r{len(driver.requests)}"
            known = list(driver.requests.values())
            driver.submit(random_request(rng, name, driver.limits.max_model_len, known))
        if driver.live and rng.random() < end_rate:
            driver.end(rng.choice(driver.live), rng.choice(HOST_ENDS))
        if rng.random() < 0.1 and run_ahead == 1:
            driver.settle()
        if rng.random() < flush_rate:
            driver.flush()
        driver.step()
    for _ in range(200 if end_rate else 0):
        if driver.live and rng.random() < end_rate:
            driver.end(rng.choice(driver.live), rng.choice(HOST_ENDS))
        driver.step()
    driver.drain()
    return driver
