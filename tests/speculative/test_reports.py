"""What users of other engines reported about state, caches and speculation: a test for each kind.

`REPORTS` names the tests by report id; kinds that need grammars, tools or Mamba-2 come with those
features. Tests that no other file has stand below.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.layers.batch import LinearMemory
from tests.engine_fixtures import runner_of

MakeLLM = Callable[..., LLM]

REPORTS = {
    "A1": "engine.test_prefix_cache.test_turns_of_a_chat_stay_right_however_often_they_come",
    "A4": "scheduler.test_planted_bugs.test_prefix_is_resumed_by_the_step_that_computes_it",
    "A5": "engine.test_prefix_cache.test_a_state_is_that_of_its_key_at_every_length",
    "A6": "scheduler.test_planted_bugs.test_snapshot_stands_under_a_shorter_key",
    "A7": "engine.test_prefix_cache.test_branches_equal_cold_runs",
    "A8": "engine.test_equality.test_forced_retraction",
    "A9": "speculative.test_equality.test_forced_retraction",
    "A10": "speculative.test_reports.test_slot_of_a_drafting_request_serves_a_fresh_one",
    "A11": "models.test_equivalence.test_slot_used_before",
    "A12": "models.test_equivalence.test_chunked_prefill",
    "A13": "models.test_equivalence.test_chunked_prefill",
    "A14": "runner.test_steps.test_poison_in_null_memory_never_reaches_a_real_row",
    "A15": "models.test_equivalence.test_one_shot_prefill",
    "A16": "engine.test_equality.test_any_batch_order",
    "A17": "speculative.test_reports.test_identical_prompts_have_one_answer",
    "A18": "models.test_equivalence.test_mixed_batch_with_padding",
    "A21": "scheduler.test_prefix_cache.test_a_copy_without_a_state_is_no_hit",
    "A24": "speculative.test_reports.test_many_chunks_off_the_grid",
    "A27": "speculative.test_reports.test_infinities_in_a_freed_slot_do_no_harm",
    "B2": "speculative.test_equality.test_ngram_drafts_equal_plain",
    "B3": "speculative.test_equality.test_any_acceptance",
    "B4": "speculative.test_equality.test_any_options",
    "B6": "speculative.test_equality.test_stop_string_completed_inside_a_window",
    "B7": "speculative.test_equality.test_stop_string_completed_inside_a_window",
    "B9": "engine.test_logprobs.test_bundled_model",
    "B10": "speculative.test_step.test_counters_add_up",
    "B11": "speculative.test_equality.test_token_limit_is_exact",
    "B12": "engine.test_penalties.test_speculation_changes_no_token_of_the_bundled_model",
    "B13": "engine.test_penalties.test_bad_values_are_refused",
    "B16": "speculative.test_equality.test_any_acceptance",
    "B17": "scheduler.test_programs",
    "B18": "speculative.test_reports.test_last_chunk_of_one_token_while_others_draft",
    "B19": "speculative.test_equality.test_any_options",
    "B25": "speculative.test_accept.test_emitted_distribution_is_the_target_s",
    "B26": "speculative.test_equality.test_bundled_model_greedy_seeded_and_several_samples",
    "B27": "speculative.test_mtp_reference.test_drafts_of_every_step_equal_a_plain_chain",
    "B28": "speculative.test_equality.test_bundled_model_greedy_seeded_and_several_samples",
    "B29": "speculative.test_ngram.test_drafts_equal_a_search",
    "B30": "speculative.test_equality.test_any_acceptance",
    "D2": "scheduler.test_programs",
    "D3": "scheduler.test_state_machine",
    "D4": "scheduler.test_prefix_cache.test_every_stage_of_a_request_gives_back_what_it_holds",
    "D5": "scheduler.test_programs",
    "D6": "scheduler.test_prefix_cache.test_500_requests_into_room_for_8",
    "D7": "scheduler.test_scheduler.test_admission_waits_for_each_kind_of_memory",
    "D8": "config.test_resolve.test_pool_is_bounded_by_memory",
    "D9": "scheduler.test_prefix_cache.test_short_requests_fill_the_pool",
    "D10": "config.test_budget.test_it_holds_and_nothing_of_use_is_left_over",
    "D11": "config.test_budget.test_a_length_nobody_asked_for_leaves_half_to_running_requests",
    "D12": "scheduler.test_prefix_cache.test_short_requests_fill_the_pool",
    "D13": "config.test_budget.test_it_holds_and_nothing_of_use_is_left_over",
    "E2": "scheduler.test_prefix_cache.test_a_chat_prefills_the_last_token_and_what_is_new",
    "E3": "scheduler.test_prefix_cache.test_a_shared_prefix_is_reused_wherever_prompts_diverge",
    "E4": "scheduler.test_prefix_cache.test_forks_are_hit_with_half_the_rows",
    "E5": "cache.test_radix.test_equal_worth_goes_in_order_of_use",
    "E6": "scheduler.test_programs",
    "E7": "scheduler.test_prefix_cache.test_a_chat_prefills_the_last_token_and_what_is_new",
    "E8": "scheduler.test_prefix_cache.test_a_prompt_sent_twice",
    "F3": "server.test_refusals.test_bad_requests",
    "F4": "server.test_refusals.test_bad_requests",
    "F5": "server.test_refusals.test_a_prompt_that_is_too_long_is_told_as_clients_expect",
    "F9": "server.test_limits.test_a_template_that_raises",
    "F12": "config.test_hf.test_eos_is_the_union_of_all_three_sources",
    "F13": "server.test_disconnects.test_a_storm_of_aborts",
    "F14": "server.test_chat.test_cached_tokens_are_told_in_both_forms",
    "I1": "server.test_lifecycle.test_defaults_just_work_and_say_what_they_are",
    "I2": "server.test_lifecycle.test_defaults_just_work_and_say_what_they_are",
    "I4": "server.test_others.test_optional_packages_are_optional",
    "I5": "speculative.test_equality.test_any_options",
    "I6": "server.test_units.test_what_can_never_run_is_refused_with_its_sizes",
    "I7": "server.test_lifecycle.test_defaults_just_work_and_say_what_they_are",
}

QUESTION = [{"role": "user", "content": "Ann has 4 boxes with 6 pens each. How many pens?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_names_a_test_that_exists(report: str) -> None:
    path = f"tests.{REPORTS[report]}"
    try:
        importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        assert callable(vars(importlib.import_module(module))[name])


@pytest.fixture(scope="module")
def alone() -> tuple[int, ...]:
    llm = LLM(max_running_requests=1, max_model_len=128, dtype="float64", speculative_num_steps=0)
    return llm.generate(QUESTION, GREEDY).token_ids


def _llm(**options: Any) -> LLM:
    return LLM(max_model_len=128, dtype="float64", **options)


def test_identical_prompts_have_one_answer(alone: tuple[int, ...]) -> None:
    results = _llm(max_running_requests=8).generate([QUESTION] * 12, GREEDY)
    assert {result.token_ids for result in results} == {alone}


def test_slot_of_a_drafting_request_serves_a_fresh_one(alone: tuple[int, ...]) -> None:
    llm = _llm(max_running_requests=1)
    other = [{"role": "user", "content": "What is the capital of France?"}]
    llm.generate(other, SamplingParams(temperature=1.4, seed=1, max_tokens=50))
    assert llm.generate(QUESTION, GREEDY).token_ids == alone


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_in_a_freed_slot_do_no_harm(alone: tuple[int, ...], value: float) -> None:
    llm = _llm(max_running_requests=2)
    llm.generate(QUESTION, GREEDY)
    llm.flush_cache()
    device = runner_of(llm).device
    geometry = device.geometry
    device.drafter._hidden_ring.fill_(value)
    device.drafter._hidden_rows.fill_(value)
    for memory in (*device.memory, *device.drafter._memory):
        if isinstance(memory, LinearMemory):
            memory.conv_ring[: geometry.conv_zero] = value
            memory.conv_ring[geometry.conv_zero + 1 :] = value
            memory.replay.checkpoint[: geometry.zero_row] = value
            for ring in (memory.replay.d_ring, memory.replay.k_ring, memory.replay.g_ring):
                ring[: geometry.ring_zero] = value
        else:
            assert isinstance(memory, torch.Tensor)
            memory.fill_(value)
    assert [r.token_ids for r in llm.generate([QUESTION] * 2, GREEDY)] == [alone] * 2


@pytest.mark.parametrize("chunk", [2, 3])
def test_many_chunks_off_the_grid(alone: tuple[int, ...], chunk: int) -> None:
    llm = _llm(max_running_requests=2, chunked_prefill_size=chunk)
    assert len(llm.encode(QUESTION)) > 7 * chunk
    assert llm.generate(QUESTION, GREEDY).token_ids == alone


def test_last_chunk_of_one_token_while_others_draft(alone: tuple[int, ...]) -> None:
    length = len(_llm(max_running_requests=1).encode(QUESTION))
    llm = _llm(max_running_requests=3, chunked_prefill_size=length - 1)
    others = [llm.stream(QUESTION, GREEDY) for _ in range(2)]
    tokens = [list(next(other).token_ids) for other in others]
    assert llm.generate(QUESTION, GREEDY).token_ids == alone
    for own, other in zip(tokens, others, strict=True):
        own += [t for update in other for t in update.token_ids]
        assert tuple(own) == alone
