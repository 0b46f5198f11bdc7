"""Backends that plan on the host: seams where lengths must be known, and the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gapless import LLM, SamplingParams
from gapless.attention.reference import ReferenceAttention
from gapless.runner.mirror import LengthMirror
from gapless.runner.syncs import forbid_syncs
from tests.engine_fixtures import runner_of
from tests.runner.late import make_late

if TYPE_CHECKING:
    from torch import Tensor

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=4, max_tokens=9),
    replace(GREEDY, max_tokens=1),
    replace(GREEDY, max_tokens=20),
    SamplingParams(temperature=0.6, seed=2, max_tokens=17, stop_token_ids=(60, 90, 120)),
]
# the second and the fourth begin alike, and there are more of them than slots
PROMPTS = [[50 + i for i in range(n)] for n in (5, 40, 1, 44, 12)]
Outcome = tuple[list[tuple[int, ...]], dict[str, Any]]


def run(**options: Any) -> tuple[LLM, Outcome]:
    """Serve all requests; return the engine, and their tokens with what verify counted."""
    defaults = {"dtype": "float64", "max_running_requests": 3, "max_model_len": 100}
    llm = LLM(**{**defaults, **options})
    tokens = [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]
    tokens += [result.token_ids for result in llm.generate(PROMPTS[:2], PARAMS[3:])]
    return llm, (tokens, vars(llm.engine.scheduler.counters))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Outcomes of device-planned engines by drafter, filled by the first test that needs them."""
    return {}


def expected(outcomes: dict[str, Outcome], algorithm: str) -> Outcome:
    """What a device-planned engine gives."""
    if algorithm not in outcomes:
        outcomes[algorithm] = run(speculative_algorithm=algorithm)[1]
    return outcomes[algorithm]


class Witness:
    """Compares what the host plans with what the device then runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: dict[str, np.ndarray] = {}
        self.num_compared = 0
        honest = ReferenceAttention.plan_window
        witness = self

        def plan_host(
            backend: Any, name: str, ends: np.ndarray, *, width: int, kv_len: int, first: int = 0
        ) -> None:
            witness.ends[name] = ends

        def plan_window(
            backend: Any, slots: Tensor, positions: Tensor, page_table: Tensor,
            *, host_plan: str | None = None, **rest: Any,
        ) -> Any:  # fmt: skip
            if host_plan is not None:
                # compared on the host; a real device is not asked
                live = slots.detach().__array__() != page_table.shape[0] - 1
                last = positions.detach().__array__()[:, -1]
                np.testing.assert_array_equal(witness.ends[host_plan][live], last[live] + 1)
                witness.num_compared += int(live.sum())
            return honest(backend, slots, positions, page_table, **rest)

        monkeypatch.setattr(ReferenceAttention, "needs_cpu_seq_lens", True)
        monkeypatch.setattr(ReferenceAttention, "plan_host", plan_host)
        monkeypatch.setattr(ReferenceAttention, "plan_window", plan_window)


@pytest.mark.parametrize(("algorithm", "launches"), [("mtp", 3), ("ngram", 2), ("none", 1)])
def test_a_device_planned_backend_that_claims_otherwise(
    algorithm: str, launches: int, outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(outcomes, algorithm)
    monkeypatch.setattr(ReferenceAttention, "needs_cpu_seq_lens", True)
    make_late(monkeypatch)
    llm, found = run(speculative_algorithm=algorithm)
    assert found == wanted
    graphs = runner_of(llm)._decode._graphs._graphs
    assert {graph.num_launches for graph in graphs.values()} == {launches}
    counters = llm.engine.launch_counters
    plans = {"mtp": 4, "ngram": 1, "none": 1}[algorithm]
    assert counters.num_plans == plans * counters.num_steps
    assert counters.num_launches == launches * counters.num_steps
    assert llm.engine.loop_counters.num_ahead > 0


@pytest.mark.parametrize("algorithm", ["mtp", "none"])
def test_the_host_knows_every_length(
    algorithm: str, outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(outcomes, algorithm)
    witness = Witness(monkeypatch)
    make_late(monkeypatch)
    _, found = run(speculative_algorithm=algorithm)
    assert found == wanted
    assert witness.num_compared >= wanted[1]["num_steps"]


def _planted(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    honest = LengthMirror.admit
    if bug == "chunks forgotten":
        monkeypatch.setattr(LengthMirror, "admit", lambda self, segments: None)
    elif bug == "chunk before the step that is under way":

        def early(self: LengthMirror, segments: Any) -> None:
            honest(self, segments)
            self._changes.rotate(1)

        monkeypatch.setattr(LengthMirror, "admit", early)
    else:
        assert bug == "no wait"
        monkeypatch.setattr("tests.runner.late.LateEvent.wait", lambda self: None)


@pytest.mark.parametrize(
    "bug", ["chunks forgotten", "chunk before the step that is under way", "no wait"]
)
def test_planted_wrong_length_is_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Witness(monkeypatch)
    make_late(monkeypatch)
    _planted(monkeypatch, bug)
    with pytest.raises((AssertionError, IndexError, OverflowError, ValueError)):
        run(speculative_algorithm="none")


def test_a_backend_must_say_whether_it_needs_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ReferenceAttention, "needs_cpu_seq_lens")
    with pytest.raises(AttributeError, match="needs_cpu_seq_lens"):
        LLM(max_running_requests=2, max_model_len=100)


def test_planning_on_the_host_never_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceAttention, "needs_cpu_seq_lens", True)
    llm = LLM(max_running_requests=2, max_model_len=100)
    launch = llm.engine._loop._run

    def guarded(plan: Any) -> Any:
        with forbid_syncs():
            return launch(plan)

    llm.engine._loop._run = guarded
    llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=6))
    assert llm.engine.launch_counters.num_plans > 0
