"""The scheduler as a state machine: any order of submits, steps and endings."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gapless.core.request import FinishReason
from gapless.scheduler.limits import SchedulerLimits
from tests.scheduler.driver import Driver, make_request
from tests.scheduler.hash_device import VOCAB_SIZE, Sizes

tokens = st.integers(0, VOCAB_SIZE - 1)

LIMITS = st.builds(
    SchedulerLimits,
    max_running_requests=st.integers(1, 4),
    max_model_len=st.integers(4, 32),
    num_pages=st.integers(1, 24),
    page_size=st.integers(1, 5),
    num_state_rows=st.integers(1, 5),
    chunked_prefill_size=st.sampled_from([1, 2, 3, 7, 32]),
    max_window=st.sampled_from([1, 2, 4]),
    replay_len=st.sampled_from([1, 2, 4, 5]),
    uses_prefix_cache=st.booleans(),
)
SIZES = st.builds(
    Sizes,
    limits=LIMITS,
    accept_rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 99),
)


class SchedulerMachine(RuleBasedStateMachine):
    """A driver whose every action hypothesis chooses; `Driver` holds the checks."""

    driver: Driver

    @initialize(sizes=SIZES)
    def build(self, sizes: Sizes) -> None:
        self.driver = Driver(sizes)

    @rule(
        shared=st.integers(0, 99),
        num_shared=st.integers(0, 24),
        prompt=st.lists(tokens, max_size=12).map(tuple),
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 6),
        stop_ids=st.lists(tokens, max_size=2, unique=True).map(tuple),
        wants_prompt_logprobs=st.booleans(),
    )
    def submit(
        self,
        shared: int,
        num_shared: int,
        prompt: tuple[int, ...],
        max_tokens: int,
        min_tokens: int,
        stop_ids: tuple[int, ...],
        wants_prompt_logprobs: bool,
    ) -> None:
        known = list(self.driver.requests.values())
        if known:
            earlier = known[shared % len(known)].token_ids
            prompt = (*earlier[:num_shared], *prompt)
        self.driver.submit(
            make_request(
                f"r{len(known)}",
                prompt,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                stop_ids=stop_ids,
                wants_prompt_logprobs=wants_prompt_logprobs,
            )
        )

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule()
    def settle(self) -> None:
        self.driver.settle()

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.STOP, FinishReason.ABORT]))
    def end(self, data: st.DataObject, reason: FinishReason) -> None:
        self.driver.end(data.draw(st.sampled_from(self.driver.live)), reason)

    @rule()
    def flush(self) -> None:
        self.driver.flush()

    @invariant()
    def is_conserved(self) -> None:
        self.driver.scheduler.check_conserved()

    def teardown(self) -> None:
        self.driver.drain()


class LongSchedulerMachine(SchedulerMachine):
    """The same machine in longer and many more runs."""


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestSchedulerLong = pytest.mark.slow(pytest.mark.timeout(1800)(LongSchedulerMachine.TestCase))
TestSchedulerLong.settings = settings(
    max_examples=2000, stateful_step_count=80, suppress_health_check=list(HealthCheck)
)
