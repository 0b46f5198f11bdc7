"""A speculative step is one launch, one copy up, one copy down; no sync and no allocation."""

from __future__ import annotations

from typing import Any

import pytest

from gapless import LLM, SamplingParams
from gapless.runner.graphs import StepGraph
from gapless.runner.inputs import Download, Upload
from gapless.runner.syncs import HiddenSync, forbid_syncs
from gapless.speculative import mtp
from tests.engine_fixtures import runner_of
from tests.runner.allocations import Allocations

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DRAFTING: dict[str, dict[str, Any]] = {
    "mtp": {"speculative_algorithm": "mtp"},
    "ngram": {"speculative_algorithm": "ngram"},
    "tree": {"speculative_topk": 3, "speculative_num_draft_tokens": 10},
}
LONG = SamplingParams(temperature=0.7, seed=3, max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("drafting", DRAFTING)
def test_one_launch_one_copy_up_one_copy_down(
    drafting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(max_running_requests=4, max_model_len=400, **DRAFTING[drafting])
    streams = [llm.stream(QUESTION, LONG) for _ in range(3)]
    for stream in streams:
        next(stream)
    counts = dict.fromkeys(("launch", "send", "fetch"), 0)
    for owner, name in ((StepGraph, "launch"), (Upload, "send"), (Download, "fetch")):
        honest = getattr(owner, name)

        def counted(*args: Any, _name: str = name, _honest: Any = honest) -> Any:
            counts[_name] += 1
            return _honest(*args)

        monkeypatch.setattr(owner, name, counted)
    graphs = runner_of(llm)._decode._graphs._graphs
    num_keys = len(graphs)
    for _ in range(10):
        llm.engine.step()
    # a new reach makes a graph once, and sends null inputs to it
    assert counts["launch"] == 10
    assert counts["fetch"] == 10
    assert counts["send"] == 10 + len(graphs) - num_keys
    assert all(graph.num_launches == 1 for graph in graphs.values())
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("drafting", DRAFTING)
def test_no_sync(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_running_requests=3, max_model_len=200, **DRAFTING[drafting])
    launch = llm.engine._loop._run

    def guarded(plan: Any) -> Any:
        with forbid_syncs():
            return launch(plan)

    llm.engine._loop._run = guarded
    params = [
        SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=3 + 2 * i, min_tokens=i % 3,
            logprobs=i or None, presence_penalty=0.2 * (i == 3),
        )
        for i in range(5)
    ]  # fmt: skip
    llm.generate([QUESTION] * 5, params)
    if drafting != "ngram":
        honest = mtp.MtpDrafter.draft

        def syncing(self: Any, frontier: Any, *rest: Any) -> Any:
            assert int(frontier.seq_lens.max()) >= 0
            return honest(self, frontier, *rest)

        monkeypatch.setattr(mtp.MtpDrafter, "draft", syncing)
        with pytest.raises(HiddenSync):
            llm.generate(QUESTION, params[0])


@pytest.mark.parametrize("drafting", ["mtp", "tree"])
def test_no_allocation(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(max_running_requests=2, max_model_len=400, **DRAFTING[drafting])
    stream = llm.stream(QUESTION, LONG)
    for _ in range(3):
        next(stream)
    watch, launch = Allocations(), StepGraph.launch

    def inside(graph: StepGraph) -> Any:
        watch.in_graph = True
        out = launch(graph)
        watch.in_graph = False
        return out

    monkeypatch.setattr(StepGraph, "launch", inside)
    with watch:
        for _ in range(12):
            llm.engine.step()
    assert watch.found == []
    stream.close()


def test_counters_add_up() -> None:
    llm = LLM(max_running_requests=2, linear_replayssm_cache_len=4)
    result = llm.generate(QUESTION, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    counters = llm.engine.scheduler.counters
    assert result.completions[0].counters == counters
    assert counters.num_emitted == len(result.token_ids) - 1
    assert counters.num_emitted == counters.num_steps + counters.num_accepted
    assert counters.proposed_at == [counters.num_steps] * 3
    assert counters.accepted_at == sorted(counters.accepted_at, reverse=True)
    end = len(result.prompt_token_ids) + len(result.token_ids) - 1
    assert 0 < counters.num_flushes <= end // 4 - len(result.prompt_token_ids) // 4
    assert 0 < counters.ring_occupancy < 4 + 4
    assert "tokens per step" in str(counters)


@pytest.mark.parametrize("wanted", [1.0, 2.5, 4.0])
def test_simulated_acceptance_is_engaged(wanted: float) -> None:
    llm = LLM(max_running_requests=2, load_format="dummy", speculative_simulate_acceptance=wanted)
    params = SamplingParams(temperature=0.0, max_tokens=101, ignore_eos=True)
    assert len(llm.generate(QUESTION, params).token_ids) == 101
    # the last step may be cut by the limit
    assert llm.engine.scheduler.counters.accepted_len == pytest.approx(wanted, abs=0.1)
