"""Each optimisation can be turned off alone: the same tokens, and another path (float64)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM, ConfigError, SamplingParams
from gapless.runner import decode

if TYPE_CHECKING:
    from gapless.core.counters import DecodeCounters

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
PARAMS = [GREEDY, replace(GREEDY, temperature=0.8, seed=3), replace(GREEDY, max_tokens=6)]
# the third begins as the first, a page of which stays
PROMPTS = [list(range(50, 76)), [70, 71, 72], list(range(50, 72))]
COMMON: dict[str, Any] = {"dtype": "float64", "max_running_requests": 2, "max_model_len": 100}


def serve(**options: Any) -> tuple[LLM, list[tuple[int, ...]]]:
    llm = LLM(**COMMON, **options)
    return llm, [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def verify_counts(counters: DecodeCounters) -> dict[str, Any]:
    """What verify did, apart from the upkeep of states."""
    names = ("num_steps", "num_emitted", "proposed_at", "accepted_at")
    return {name: vars(counters)[name] for name in names}


@pytest.fixture(scope="module")
def plain() -> tuple[LLM, list[tuple[int, ...]]]:
    return serve()


def test_defaults_use_every_optimisation(plain: tuple[LLM, list[tuple[int, ...]]]) -> None:
    engine = plain[0].engine
    counters = engine.launch_counters
    assert engine.loop_counters.num_ahead > 0
    assert counters.num_launches == counters.num_steps > counters.num_setups > 0
    assert counters.num_plans == counters.num_planned_beside == counters.num_fused == 0
    assert engine.cache_counters.num_cached_tokens > 0
    assert engine.scheduler.counters.num_accepted > 0
    assert "of them ahead" in str(engine.loop_counters)
    assert "decode steps in" in str(counters)


@pytest.mark.parametrize(
    "switch",
    [
        {"disable_overlap_schedule": True},
        {"disable_cuda_graph": True},
        {"stage_graphs": True},
        {"linear_replayssm_cache_len": 1},
        {"disable_prefix_cache": True},
        {"speculative_algorithm": "none"},
    ],
    ids=lambda switch: next(iter(switch)),
)
def test_one_turned_off(switch: dict[str, Any], plain: tuple[LLM, list[tuple[int, ...]]]) -> None:
    llm, tokens = serve(**switch)
    assert tokens == plain[1]
    engine, before = llm.engine, plain[0].engine
    counters, launches = engine.scheduler.counters, engine.launch_counters
    if "speculative_algorithm" in switch:
        assert counters.num_emitted == before.scheduler.counters.num_emitted
        assert counters.num_proposed == 0
    else:
        assert verify_counts(counters) == verify_counts(before.scheduler.counters)
    assert (engine.loop_counters.num_ahead == 0) == ("disable_overlap_schedule" in switch)
    assert (launches.num_setups == launches.num_steps) == ("disable_cuda_graph" in switch)
    per_step = 4 if "stage_graphs" in switch else 1
    assert launches.num_launches == per_step * launches.num_steps
    assert (engine.cache_counters.num_cached_tokens == 0) == ("disable_prefix_cache" in switch)
    if "linear_replayssm_cache_len" in switch:
        # a first step finds nothing to fold
        assert counters.num_flushes == counters.num_steps - len(PROMPTS)
        assert counters.num_flushes > before.scheduler.counters.num_flushes


def test_fused_metadata(
    plain: tuple[LLM, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the kernel has no place, so it is put there, in Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from gapless.ops.step_metadata import triton

    asked: list[bool] = []

    def fused(
        slots: Any, columns: Any, geometry: Any, constants: Any, *, is_fused: bool, **rest: Any
    ) -> Any:
        asked.append(is_fused)
        return triton.window_indices(slots, columns, geometry, **rest)

    monkeypatch.setattr(decode, "window_indices", fused)
    monkeypatch.setattr(decode, "has_kernel", lambda device: True)
    llm, tokens = serve()
    assert tokens == plain[1]
    assert set(asked) == {True}
    assert llm.engine.launch_counters.num_fused == llm.engine.launch_counters.num_steps


def test_a_plan_stream_without_plans_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan_stream has no effect: .*plans on the device"):
        LLM(plan_stream=True, **COMMON)
