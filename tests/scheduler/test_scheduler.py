"""Single rules of the scheduler, each in the smallest case that shows it."""

from __future__ import annotations

import numpy as np
import pytest

from gapless.core.plan import Delta, StepPlan, StepResult
from gapless.core.request import FinishReason, Request, Status
from gapless.scheduler.limits import SchedulerLimits
from gapless.scheduler.scheduler import Scheduler
from tests.scheduler.driver import make_request

PROMPT = tuple(range(20, 40))


def make_scheduler(
    *,
    slots: int = 4,
    pages: int = 40,
    page_size: int = 3,
    rows: int = 4,
    chunk: int = 64,
    caches: bool = False,
) -> Scheduler:
    """Without the prefix cache, but for those who ask for it: prompts here are much alike."""
    return Scheduler(
        SchedulerLimits(
            max_running_requests=slots,
            max_model_len=60,
            num_pages=pages,
            page_size=page_size,
            num_state_rows=rows,
            chunked_prefill_size=chunk,
            max_window=1,
            replay_len=4,
            uses_prefix_cache=caches,
        )
    )


def submit(scheduler: Scheduler, name: str, prompt_len: int, max_tokens: int = 9) -> Request:
    request = make_request(name, PROMPT[:prompt_len], max_tokens=max_tokens)
    assert scheduler.submit(request) is None
    return request


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 1) -> list[Delta]:
    """Answer a plan with one token everywhere."""
    num_rows = len(plan.decode)
    return scheduler.commit(
        plan,
        StepResult(
            prefill_tokens=np.full(len(plan.sampled), token, dtype=np.int32),
            decode_tokens=np.full((num_rows, 1), token, dtype=np.int32),
            decode_lens=np.ones(num_rows, dtype=np.int32),
            decode_proposed=np.zeros(num_rows, dtype=np.int32),
        ),
    )


def segments(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(s.request.request_id, s.start, s.end, s.is_last) for s in plan.prefill]


def names(plan: StepPlan) -> list[str]:
    return [row.request.request_id for row in plan.decode]


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "text"),
    [
        (0, 5, "begin-of-text"),
        (10, 51, "context holds 60"),
        (10, 50, "need 20 pages, 19 exist"),
    ],
)
def test_impossible_request_ends_at_once(prompt_len: int, max_tokens: int, text: str) -> None:
    scheduler = make_scheduler(pages=19)
    request = make_request("a", PROMPT[:prompt_len], max_tokens=max_tokens)
    delta = scheduler.submit(request)
    assert delta is not None
    assert delta.finish_reason is FinishReason.ERROR
    assert text in (delta.error or "")
    assert request.status is Status.FINISHED
    assert not scheduler.has_work


def test_prompt_that_leaves_no_room_is_refused() -> None:
    request = make_request("a", PROMPT[:5], max_tokens=1)
    request.limit_len = 5
    delta = make_scheduler().submit(request)
    assert delta is not None
    assert "shorten the prompt" in (delta.error or "")


def test_largest_request_is_accepted() -> None:
    scheduler = make_scheduler(pages=20)
    submit(scheduler, "a", 10, max_tokens=50)
    assert plan_of(scheduler).prefill


def test_load_is_never_refused() -> None:
    scheduler = make_scheduler(slots=1)
    for i in range(100):
        submit(scheduler, f"r{i}", 3)
    assert scheduler.num_waiting == 100


def test_chunk_packs_segments_and_cuts_the_last() -> None:
    scheduler = make_scheduler(chunk=8)
    for name in "abc":
        submit(scheduler, name, 5)
    first = plan_of(scheduler)
    assert segments(first) == [("a", 0, 5, True), ("b", 0, 3, False)]
    assert names(first) == ["a"]
    second = plan_of(scheduler)
    assert segments(second) == [("b", 3, 5, True), ("c", 0, 5, True)]
    assert names(second) == ["a", "b", "c"]


@pytest.mark.parametrize("limits", [{"slots": 1}, {"rows": 1}, {"pages": 6}])
def test_admission_waits_for_each_kind_of_memory(limits: dict[str, int]) -> None:
    scheduler = make_scheduler(**limits)
    submit(scheduler, "a", 7)
    submit(scheduler, "b", 10)
    submit(scheduler, "c", 1)
    assert segments(plan_of(scheduler)) == [("a", 0, 7, True)]
    assert scheduler.num_waiting == 2


def test_row_known_to_be_done_is_skipped() -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, "a", 4, max_tokens=2)
    only = submit(scheduler, "b", 4, max_tokens=1)
    first = plan_of(scheduler)
    assert names(first) == ["a"]
    assert scheduler.schedule() is None
    deltas = commit(scheduler, first)
    assert [(d.request, d.token_ids) for d in deltas] == [(request, (1, 1)), (only, (1,))]
    assert {d.finish_reason for d in deltas} == {FinishReason.LENGTH}
    assert not scheduler.has_work


def test_segments_carry_the_whole_page_row() -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, "a", 4)
    plan = plan_of(scheduler)
    assert plan.prefill[0].pages == tuple(request.pages)
    assert len(request.pages) == 2  # positions 0 .. 5
    assert plan.page_entries == ()
    assert plan.max_seq_len == 4


def test_decode_rows_get_their_pages_before_they_need_them() -> None:
    scheduler = make_scheduler()
    request = submit(scheduler, "a", 4)
    plan = plan_of(scheduler)
    following = plan_of(scheduler)
    assert following.page_entries == ()
    assert following.max_seq_len == 5
    commit(scheduler, plan)
    third = plan_of(scheduler)
    assert [(e.slot, e.index, e.page) for e in third.page_entries] == [(0, 2, request.pages[2])]
    assert third.max_seq_len == 6


def test_newest_is_retracted_and_keeps_what_comes_in() -> None:
    scheduler = make_scheduler(pages=5)
    submit(scheduler, "a", 4)
    newest = submit(scheduler, "b", 4)
    submit(scheduler, "c", 10, max_tokens=5)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert names(second) == ["a", "b"]
    commit(scheduler, first)
    assert names(plan_of(scheduler)) == ["a"]
    assert scheduler.cache_counters.num_retractions == 1
    assert newest.status is Status.WAITING
    commit(scheduler, second, token=5)
    assert newest.output_ids == [1, 1, 5]
    scheduler.check_conserved()
    assert scheduler.abort("a") is not None
    assert segments(plan_of(scheduler)) == [("b", 0, 7, True)]


def test_retracted_request_may_end_while_it_waits() -> None:
    scheduler = make_scheduler(pages=5)
    submit(scheduler, "a", 4)
    newest = make_request("b", PROMPT[:4], max_tokens=9, stop_ids=(5,))
    scheduler.submit(newest)
    first, second = plan_of(scheduler), plan_of(scheduler)
    commit(scheduler, first)
    plan_of(scheduler)
    assert newest.status is Status.WAITING
    deltas = commit(scheduler, second, token=5)
    assert [d.finish_reason for d in deltas] == [None, FinishReason.STOP]
    assert scheduler.num_waiting == 0
    scheduler.check_conserved()


def test_stop_ids_count_only_above_min_tokens() -> None:
    scheduler = make_scheduler()
    request = make_request("a", PROMPT[:3], max_tokens=8, min_tokens=2, stop_ids=(6,))
    scheduler.submit(request)
    plan = plan_of(scheduler)
    assert [d.finish_reason for d in commit(scheduler, plan, token=6)] == [None]
    (delta,) = commit(scheduler, plan_of(scheduler), token=6)
    assert delta.token_ids == (6,)
    assert delta.finish_reason is FinishReason.STOP


def test_token_after_a_stop_is_an_error() -> None:
    scheduler = make_scheduler()
    request = make_request("a", PROMPT[:3], max_tokens=8, stop_ids=(6,))
    scheduler.submit(request)
    with pytest.raises(AssertionError, match="after its end"):
        commit(scheduler, plan_of(scheduler), token=6)


def test_row_done_on_the_device_only_is_an_error() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3)
    plan = plan_of(scheduler)
    result = StepResult(
        prefill_tokens=np.array([1], dtype=np.int32),
        decode_tokens=np.full((1, 1), -1, dtype=np.int32),
        decode_lens=np.zeros(1, dtype=np.int32),
        decode_proposed=np.zeros(1, dtype=np.int32),
    )
    with pytest.raises(AssertionError, match="done on the device only"):
        scheduler.commit(plan, result)


def test_host_end_drops_unread_tokens_and_frees_at_once() -> None:
    scheduler = make_scheduler(slots=1)
    request = submit(scheduler, "a", 3)
    submit(scheduler, "b", 3)
    first = plan_of(scheduler)
    delta = scheduler.finish(request, FinishReason.STOP)
    assert (delta.token_ids, delta.finish_reason) == ((), FinishReason.STOP)
    second = plan_of(scheduler)
    assert second.prefill[0].slot == first.prefill[0].slot
    assert commit(scheduler, first) == []
    assert request.output_ids == []
    with pytest.raises(AssertionError, match="ended before"):
        scheduler.finish(request, FinishReason.ABORT)
    assert scheduler.abort("a") is None


def test_two_steps_ahead_are_refused() -> None:
    scheduler = make_scheduler()
    submit(scheduler, "a", 3)
    plan_of(scheduler)
    second = plan_of(scheduler)
    with pytest.raises(AssertionError, match="2 launched steps are unread"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="not the oldest"):
        commit(scheduler, second)


def test_prompt_logprobs_come_once_and_with_the_first_token() -> None:
    scheduler = make_scheduler(chunk=2)
    request = make_request("a", PROMPT[:3], max_tokens=8, wants_prompt_logprobs=True)
    scheduler.submit(request)
    plans = [plan_of(scheduler), plan_of(scheduler)]
    values = [np.array([-1.0, -2.0]), np.array([np.nan])]
    deltas = [
        scheduler.commit(
            plan,
            StepResult(
                prefill_tokens=np.full(len(plan.sampled), 1, dtype=np.int32),
                decode_tokens=np.full((len(plan.decode), 1), 1, dtype=np.int32),
                decode_lens=np.ones(len(plan.decode), dtype=np.int32),
                decode_proposed=np.zeros(len(plan.decode), dtype=np.int32),
                prompt_logprobs=(logprobs,),
            ),
        )
        for plan, logprobs in zip(plans, values, strict=True)
    ]
    assert deltas[0] == []
    assert [d.prompt_logprobs for d in deltas[1]] == [(-1.0, -2.0)]
    assert [d.prompt_logprobs for d in commit(scheduler, plan_of(scheduler))] == [()]
