"""How much prefill shared prompts, chats and branches cost, counted; and pressure on the cache."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from gapless.core.request import FinishReason, Request, Status
from gapless.scheduler.limits import SchedulerLimits
from tests.scheduler.driver import Driver, make_request
from tests.scheduler.hash_device import VOCAB_SIZE, Sizes

if TYPE_CHECKING:
    from gapless.core.plan import StepPlan

PAGE = 16

windows = pytest.mark.parametrize("window", [1, 4])


class CountingDriver(Driver):
    """Also counts the tokens of every request's prefill."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.prefilled: dict[str, int] = {}

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        for segment in plan.prefill:
            name = segment.request.request_id
            self.prefilled[name] = self.prefilled.get(name, 0) + segment.end - segment.start

    def finish(self, prompt: tuple[int, ...], **options: int | None) -> Request:
        """Run one request to its end."""
        options.setdefault("max_tokens", 5)
        request = make_request(f"r{len(self.requests)}", prompt, **options)  # type: ignore[arg-type]
        self.submit(request)
        while request.status is not Status.FINISHED:
            self.step()
        return request

    def cost(self, prompt: tuple[int, ...], **options: int | None) -> int:
        """Tokens of prefill that a prompt takes, now."""
        return self.prefilled[self.finish(prompt, **options).request_id]


def make_driver(
    window: int = 1,
    *,
    pages: int = 1000,
    rows: int = 100,
    slots: int = 8,
    chunk: int = 512,
    needs_snapshots: bool = True,
    max_len: int = 3000,
    host_pages: int = 0,
    host_rows: int = 0,
) -> CountingDriver:
    limits = SchedulerLimits(
        max_running_requests=slots,
        max_model_len=max_len,
        num_pages=pages,
        page_size=PAGE,
        num_state_rows=rows,
        chunked_prefill_size=chunk,
        max_window=window,
        replay_len=16,
        needs_snapshots=needs_snapshots,
        num_host_pages=host_pages,
        num_host_rows=host_rows,
    )
    return CountingDriver(Sizes(limits, accept_rate=0.8, seed=1))


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


@windows
@pytest.mark.parametrize("sizes", [(7, 3, 5), (16, 16, 16), (1, 1, 1), (33, 40, 2)])
def test_a_chat_prefills_the_last_token_and_what_is_new(
    window: int, sizes: tuple[int, int, int]
) -> None:
    driver, (first, new, reply) = make_driver(window), sizes
    text = tokens(first)
    for turn in range(10):
        cost = driver.cost(text, max_tokens=reply, message_end=max(1, len(text) - 1))
        assert cost == (first if turn == 0 else 1 + new)
        request = list(driver.requests.values())[-1]
        text = (*request.token_ids, *tokens(new, seed=turn + 1))
    driver.drain()


@windows
def test_a_chat_whose_template_strips_thinking(window: int) -> None:
    """The next turn has the reply without its first half: what was the message before it is met."""
    driver, header = make_driver(window), (1, 2, 3)
    history, new = tokens(50), 20
    for turn in range(10):
        prompt = (*history, *header)
        cost = driver.cost(prompt, max_tokens=30, message_end=len(history))
        # the reply of the turn before, as the template repeats it, what is new, and the header
        assert turn == 0 or cost <= len(header) + 15 + new + len(header)
        reply = list(driver.requests.values())[-1].output_ids
        history = (*prompt, *reply[15:], *tokens(new, seed=turn + 1))
    driver.drain()


@windows
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_a_prompt_sent_twice(window: int, length: int) -> None:
    driver = make_driver(window)
    assert driver.cost(tokens(length)) == length
    assert driver.cost(tokens(length)) <= PAGE
    driver.drain()


@windows
@pytest.mark.parametrize("branch", [1, 17, 500, 777, 992, 1000])
def test_a_shared_prefix_is_reused_wherever_prompts_diverge(window: int, branch: int) -> None:
    driver, shared = make_driver(window), tokens(1000)
    driver.cost((*shared, *tokens(40, seed=1)))
    tail = 30
    second = driver.cost((*shared[:branch], *_diverging(shared, branch), *tokens(tail, seed=2)))
    third = driver.cost((*shared[:branch], *_diverging(shared, branch), *tokens(tail, seed=3)))
    # no snapshot of the first prompt lies on the second's way, but the second leaves one
    assert second == branch + 1 + tail
    assert third <= PAGE + 1 + tail
    if branch >= PAGE:
        other = (_other(shared, branch), *tokens(tail, seed=4))
        assert driver.cost((*shared[:branch], *other)) <= PAGE + 1 + tail
    driver.drain()


def _diverging(shared: tuple[int, ...], branch: int) -> tuple[int, ...]:
    return ((shared[branch] + 1) % VOCAB_SIZE if branch < len(shared) else 0,)


def _other(shared: tuple[int, ...], branch: int) -> int:
    return (shared[branch] + 2) % VOCAB_SIZE if branch < len(shared) else 1


def test_identical_prompts_at_once_are_computed_once() -> None:
    driver, prompt = make_driver(), tokens(200)
    for i in range(8):
        driver.submit(make_request(f"r{i}", prompt, max_tokens=4))
    driver.drain()
    assert sum(driver.prefilled.values()) == 200 + 7 * (200 - 192)


def test_kv_alone_is_shared_in_full_pages() -> None:
    driver = make_driver(needs_snapshots=False)
    driver.cost(tokens(100))
    assert driver.cost((*tokens(75), 0, 1, 2)) == 78 - 64
    # a prompt that is cached whole still runs a token
    assert driver.cost(tokens(96)) == PAGE
    driver.drain()


def test_what_is_aborted_is_cached_as_far_as_it_came() -> None:
    driver, prompt = make_driver(chunk=32), tokens(100)
    request = make_request("a", prompt, max_tokens=50)
    driver.submit(request)
    driver.step()
    driver.end(request, FinishReason.ABORT)
    assert driver.cost(prompt) == 100 - 32
    running = make_request("b", prompt, max_tokens=50)
    driver.submit(running)
    for _ in range(10):
        driver.step()
    driver.end(running, FinishReason.ABORT)
    known = tuple(running.token_ids)
    assert len(known) > 105
    assert driver.cost((*known, 1)) == 2
    driver.drain()


def test_forks_are_hit_with_half_the_rows() -> None:
    """Report E4: chains forked at a quarter of their length, and too few rows for all snapshots."""
    chains = [tokens(400, seed=i) for i in range(6)]
    # 12 snapshots of the chains, 18 of their forks
    driver = make_driver(rows=1 + 15, slots=1)
    for chain in chains:
        driver.finish(chain)
    for i, chain in enumerate(chains):
        driver.finish((*chain[:100], *_diverging(chain, 100), *tokens(60, seed=100 + i)))
    forks = [(*chain[:100], _other(chain, 100), *tokens(60, seed=200)) for chain in chains]
    assert sum(driver.cost(fork) == 61 for fork in forks) >= 3
    driver.drain()


def test_every_stage_of_a_request_gives_back_what_it_holds() -> None:
    """Report D4: abort when queued, matched, between chunks, decoding and finishing."""
    for steps in range(12):
        driver = make_driver(4, chunk=8, slots=1)
        driver.finish(tokens(40))
        request = make_request("x", tokens(60), max_tokens=6)
        driver.submit(make_request("w", tokens(30, seed=9), max_tokens=3))
        driver.submit(request)
        for _ in range(steps):
            driver.step()
        if request.status is not Status.FINISHED:
            driver.end(request, FinishReason.ABORT)
        driver.drain()


def test_500_requests_into_room_for_8() -> None:
    """And into a quarter of the pages that those want."""
    rng = random.Random(3)
    shared = tokens(40)
    # 8 requests of 40 + 30 + 20 tokens want 48 pages
    driver = make_driver(4, pages=12, rows=9, slots=8, chunk=32, max_len=150)
    for i in range(500):
        prompt = (*shared[: rng.randrange(41)], *tokens(rng.randrange(1, 30), seed=i))
        driver.submit(make_request(f"r{i}", prompt, max_tokens=rng.randrange(1, 20)))
    driver.drain(most_steps=30_000)
    assert driver.scheduler.cache_counters.num_retractions > 20
    assert driver.scheduler.cache_counters.num_hits > 100


def test_short_requests_fill_the_pool() -> None:
    """Reports D9 and D12: no page or row that is there is out of reach."""
    driver = make_driver(pages=40, rows=20, slots=20)
    for i in range(30):
        driver.submit(make_request(f"r{i}", tokens(17, seed=i), max_tokens=12))
    # a step does not take back the rows of the snapshots that it writes
    for _ in range(5):
        driver.step()
    # 28 tokens at most: two pages each, and a row
    assert driver.scheduler.num_running == 20
    driver.drain()


def test_a_copy_without_a_state_is_no_hit() -> None:
    """Report A21: KV on the host is worth nothing where the state beside it is gone."""
    driver = make_driver(pages=12, rows=9, host_pages=100, host_rows=1)
    first, second = tokens(64), tokens(64, seed=1)
    driver.finish(first)
    for seed in range(2, 8):
        driver.finish(tokens(100, seed=seed))
    assert driver.scheduler.cache_counters.num_stores > 0
    assert driver.cost((*first, 1)) == 65
    assert driver.cost(second) == 64
    driver.drain()


def test_what_the_device_has_lost_comes_back_from_the_host() -> None:
    driver = make_driver(4, pages=12, rows=9, host_pages=100, host_rows=30)
    prompts = [tokens(100, seed=seed) for seed in range(5)]
    for prompt in prompts:
        driver.finish(prompt)
    assert [driver.cost(prompt) for prompt in prompts] == [4] * 5
    assert driver.scheduler.cache_counters.num_loads >= 4
    driver.drain()
