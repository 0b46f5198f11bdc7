"""Drafts in trees change how many tokens a step emits, never which (float64, reference path).

Random trees that hold the right tokens somewhere take the place of a drafter, so that every kind of
path is accepted in every kind of model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.config import drafting
from gapless.core.draft_shape import TreeShape
from gapless.core.plan import DecodeRow, StepPlan
from gapless.ops.draft_tree import TreeMask, unpack
from gapless.ops.linear_replay import reference as linear_replay
from gapless.ops.step_metadata import reference as step_metadata
from gapless.ops.step_metadata import window_indices
from gapless.runner import accept as accept_stage
from gapless.runner import decode
from gapless.runner.accept import close_up
from tests.engine_fixtures import runner_of
from tests.runner.test_steps import changed, of_slot
from tests.speculative.oracle import TreeOracle, with_tree_oracle

if TYPE_CHECKING:
    from pathlib import Path

Tokens = list[tuple[int, ...]]
Truth = dict[tuple[int, ...], tuple[int, ...]]
MakeTrees = Callable[..., LLM]
TinyModel = Callable[[str], "Path"]

# of every linear kind, of both kinds of attention
MODELS = {
    "qwen3_5": "gated delta rule",
    "kimi_linear": "delta rule with a decay per channel, latent attention",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2 beside attention",
    "lfm2": "short convolution",
    "qwen3": "attention alone",
    "deepseek_v2": "latent attention alone",
}
OPTIONS: dict[str, Any] = {"dtype": "float64", "max_running_requests": 8, "max_model_len": 160}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, seed=1)
DRAWN = SamplingParams(temperature=1.2, top_k=60, top_p=0.97, min_p=0.002, max_tokens=30, seed=2)
PARAMS = [
    GREEDY,
    replace(DRAWN, logprobs=2),
    replace(GREEDY, stop_token_ids=(7, 50, 91), min_tokens=5, repetition_penalty=1.3),
    replace(DRAWN, seed=3, max_tokens=23, stop_token_ids=(3, 70, 200), min_tokens=2),
    replace(GREEDY, max_tokens=1),
    replace(
        DRAWN, seed=4, frequency_penalty=0.7, presence_penalty=0.4, logit_bias={9: 3.0, 11: 2.5}
    ),
]


def prompts() -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(2, 250) for _ in range(n)] for n in (1, 17, 33, 5, 2, 48)]


def tokens(llm: LLM, order: list[int] | None = None) -> Tokens:
    places = order or list(range(len(PARAMS)))
    results = llm.generate([prompts()[i] for i in places], [PARAMS[i] for i in places])
    llm.engine.scheduler.check_conserved()
    found: Tokens = [()] * len(PARAMS)
    for place, result in zip(places, results, strict=True):
        found[place] = result.token_ids
    return found


class Plain(dict[str, Any]):
    """Results without drafts, by model, as they are asked for."""

    def __init__(self, tiny_model: TinyModel) -> None:
        super().__init__()
        self._tiny_model = tiny_model

    def __missing__(self, name: str) -> Any:
        llm = LLM(str(self._tiny_model(name)), **OPTIONS, speculative_algorithm="none")
        self[name] = [
            llm.generate(prompt, params) for prompt, params in zip(prompts(), PARAMS, strict=True)
        ]
        return self[name]

    def tokens(self, name: str) -> Tokens:
        return [result.token_ids for result in self[name]]

    def truth(self, name: str) -> Truth:
        return {
            (*prompt, params.seed or 0): result.token_ids
            for prompt, params, result in zip(prompts(), PARAMS, self[name], strict=True)
        }


@pytest.fixture(scope="module")
def plain(tiny_model: TinyModel) -> Plain:
    return Plain(tiny_model)


@pytest.fixture
def make_trees(tiny_model: TinyModel, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> MakeTrees:
    """Make engines over random trees of as many nodes as are asked for."""

    def make(
        name: str = "qwen3_5",
        *,
        nodes: int = 16,
        seed: int = 0,
        truth: Truth | None = None,
        **options: Any,
    ) -> LLM:
        # of any depth: the deepest is a chain
        shape = nodes, TreeShape(nodes - 1, topk=2)
        monkeypatch.setattr(drafting, "window_shape", lambda *_: shape)
        llm = LLM(str(tiny_model(name)), **{**OPTIONS, **options}, speculative_algorithm="ngram")
        return with_tree_oracle(llm, plain.truth(name) if truth is None else truth, seed=seed)

    return make


def drafter_of(llm: LLM) -> TreeOracle:
    drafter = runner_of(llm).device.drafter
    assert isinstance(drafter, TreeOracle)
    return drafter


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "falcon_h1" else n for n in MODELS],
)
def test_random_trees_in_every_kind_of_model(
    make_trees: MakeTrees, plain: Plain, name: str
) -> None:
    llm = make_trees(name)
    assert tokens(llm) == plain.tokens(name)
    counters = llm.engine.scheduler.counters
    assert 2 < counters.accepted_len < 8
    assert sum(count > 0 for count in counters.accepted_at) > 4
    assert len(drafter_of(llm).shapes) > 30


@pytest.mark.parametrize("options", [
    {"linear_replayssm_cache_len": 1, "nodes": 6},
    {"linear_replayssm_cache_len": 3, "page_size": 5},
    {"linear_replayssm_cache_len": 8, "page_size": 1, "nodes": 2},
    {"chunked_prefill_size": 7, "nodes": 9},
    {"max_running_requests": 2, "nodes": 4},  # joins and leaves while others run
])  # fmt: skip
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_any_options(
    make_trees: MakeTrees, plain: Plain, options: dict[str, Any], seed: int
) -> None:
    assert tokens(make_trees(seed=seed, **options)) == plain.tokens("qwen3_5")


@pytest.mark.parametrize("name", [
    "qwen3_5", "kimi_linear", "bamba", pytest.param("falcon_h1", marks=pytest.mark.slow)
])  # fmt: skip
def test_flush_boundary_at_every_offset(
    tiny_model: TinyModel, make_trees: MakeTrees, name: str
) -> None:
    truth: Truth = {}
    llm = make_trees(
        name, nodes=7, truth=truth, linear_replayssm_cache_len=5, max_running_requests=1
    )
    off = LLM(str(tiny_model(name)), **OPTIONS, speculative_algorithm="none")
    params = replace(GREEDY, max_tokens=18)
    for offset in range(5):
        prompt = [9 + i for i in range(offset + 1)]
        truth[(*prompt, 1)] = expected = off.generate(prompt, params).token_ids
        assert llm.generate(prompt, params).token_ids == expected
    assert llm.engine.scheduler.counters.num_flushes > 5


def test_log_probabilities_come_along_the_path(make_trees: MakeTrees, plain: Plain) -> None:
    result = make_trees().generate(prompts()[1], PARAMS[1])
    expected = plain["qwen3_5"][1]
    assert result.token_ids == expected.token_ids
    found, wanted = result.completions[0].logprobs, expected.completions[0].logprobs
    assert len(found) == len(wanted) == len(result.token_ids)
    for own, other in zip(found, wanted, strict=True):
        assert own.token_id == other.token_id
        assert own.logprob == pytest.approx(other.logprob, abs=1e-9)
        assert [token for token, _ in own.top] == [token for token, _ in other.top]


def test_forced_retraction(make_trees: MakeTrees, plain: Plain) -> None:
    llm = make_trees(nodes=8, chunked_prefill_size=16)
    scheduler = llm.engine.scheduler
    schedule, calls = scheduler.schedule, []

    def retracting() -> object:
        calls.append(None)
        running = list(scheduler._running)
        if len(calls) % 2 == 0 and len(running) > 1:
            scheduler._retract(running[-1])
        return schedule()

    scheduler.schedule = retracting  # type: ignore[method-assign, assignment]
    assert tokens(llm) == plain.tokens("qwen3_5")
    assert scheduler.cache_counters.num_retractions > 2


def test_few_pages(make_trees: MakeTrees, plain: Plain) -> None:
    """Pages run out, so that what a tree reaches must be what was reserved."""
    llm = make_trees(nodes=6, page_size=1, max_running_requests=6)
    scheduler = llm.engine.scheduler
    scheduler._cache._pages.allocate(scheduler.num_free_pages - 110)
    results = llm.generate(prompts(), PARAMS)
    assert [result.token_ids for result in results] == plain.tokens("qwen3_5")
    assert scheduler.cache_counters.num_retractions > 0


def test_abort_leaves_the_others_alone(make_trees: MakeTrees, plain: Plain) -> None:
    llm = make_trees(max_running_requests=4)
    doomed = llm.stream(prompts()[5], PARAMS[5], request_id="doomed")
    kept = llm.stream(prompts()[2], PARAMS[2])
    found = list(next(kept).token_ids)
    next(doomed)
    llm.abort("doomed")
    found += [t for update in kept for t in update.token_ids]
    assert tuple(found) == plain.tokens("qwen3_5")[2]


@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_cached_prefixes(tiny_model: TinyModel, make_trees: MakeTrees, name: str) -> None:
    """Turns of a chat, each resumed from what the turn before left behind."""
    truth: Truth = {}
    llm = make_trees(name, truth=truth, page_size=4, max_running_requests=2)
    off = LLM(
        str(tiny_model(name)), **OPTIONS, speculative_algorithm="none", disable_prefix_cache=True
    )
    prompt, params = list(range(20, 39)), replace(GREEDY, max_tokens=13)
    for turn in range(4):
        truth[(*prompt, 1)] = expected = off.generate(prompt, params).token_ids
        assert llm.generate(prompt, params).token_ids == expected
        prompt = [*prompt, *expected, 60 + turn, 61, 62]
    assert llm.engine.scheduler.cache_counters.num_hits == 3


def test_done_rows_stay_bit_identical(make_trees: MakeTrees) -> None:
    llm = make_trees(nodes=8, max_running_requests=3)
    streams = [llm.stream(prompts()[i], PARAMS[i]) for i in (1, 5)]
    for stream in streams:
        next(stream)
        next(stream)
    runner, requests = runner_of(llm), list(llm.engine.scheduler._running)
    device, (running, done) = runner.device, (request.slot for request in requests)
    device.table.columns.done[done] = True
    before = {slot: of_slot(device, slot) for slot in (running, done)}
    rows = tuple(DecodeRow(request, request.slot) for request in requests)
    for _ in range(4):
        result = runner.run(StepPlan(0, (), rows, (), 100)).wait()
        assert result.decode_lens[0] > 0
        assert result.decode_lens[1] == 0
    after = {slot: of_slot(device, slot) for slot in (running, done)}
    assert changed(before[running], after[running]) >= {"0.conv", "0.d", "draft_bits", "3.kv"}
    assert changed(before[done], after[done]) == set()


def _one_path(columns: Any) -> Any:
    """What would be right of chains: each node sees all before it."""
    return torch.full_like(columns, -1)


def _by_storage(ancestors: Any, seq_lens: Any, logical: Any, constants: Any) -> Any:
    nodes = torch.arange(logical.shape[1])
    return (seq_lens[:, None] + nodes - constants.tap_distance[:, :, None]).flatten(1)


def _logical_as_stored(*args: Any, **kwargs: Any) -> Any:
    found = window_indices(*args, **kwargs)
    return replace(found, logical=found.positions)


def _sampled_as_stored(*args: Any, **kwargs: Any) -> Any:
    found = window_indices(*args, **kwargs)
    return replace(found, sampled_at=found.positions + 1)


def _some_stay(*kinds: str) -> Callable[..., None]:
    """Close up paths, but for some kinds of memory."""

    def partly(device: Any, *rest: Any) -> None:
        pools = device.pools
        changes: dict[str, Any] = {"trunk_kv": ()} if "kv" in kinds else {}
        if "conv" in kinds or "rings" in kinds:
            nowhere = [torch.zeros_like(m.conv_ring) for m in pools.linear]
            changes["linear"] = tuple(
                replace(
                    memory,
                    conv_ring=copy if "conv" in kinds else memory.conv_ring,
                    replay=replace(memory.replay, d_ring=memory.replay.d_ring.clone())
                    if "rings" in kinds
                    else memory.replay,
                )
                for memory, copy in zip(pools.linear, nowhere, strict=True)
            )
        close_up(replace(device, pools=replace(pools, **changes)), *rest)

    return partly


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "rotary by storage": (decode, "window_indices", _logical_as_stored),
    "noise by storage": (decode, "window_indices", _sampled_as_stored),
    "taps by storage": (step_metadata, "_path_taps", _by_storage),
    "attention to all before": (decode, "TreeMask", lambda s, b: TreeMask(s, _one_path(b))),
    "siblings in the recurrence": (
        linear_replay, "unpack", lambda bits, n: unpack(_one_path(bits), n)
    ),
    "nothing closed up": (accept_stage, "close_up", lambda *_: None),
    "KV not closed up": (accept_stage, "close_up", _some_stay("kv")),
    "convolutions not closed up": (accept_stage, "close_up", _some_stay("conv")),
    "rings not closed up": (accept_stage, "close_up", _some_stay("rings")),
}  # fmt: skip


@pytest.mark.parametrize("bug", [None, *PLANTED])
def test_planted_bugs_show(
    make_trees: MakeTrees, plain: Plain, monkeypatch: pytest.MonkeyPatch, bug: str | None
) -> None:
    if bug is not None:
        monkeypatch.setattr(*PLANTED[bug])
    # its tokens follow from all that it keeps
    places = (1, 2, 5)
    expected = [plain.tokens("bamba")[i] for i in places]

    def differs(seed: int) -> bool:
        llm = make_trees("bamba", nodes=8, seed=seed)
        results = llm.generate([prompts()[i] for i in places], [PARAMS[i] for i in places])
        return [result.token_ids for result in results] != expected

    # no single draw of trees meets every bug
    seeds = range(1 if bug is None else 6)
    assert any(differs(seed) for seed in seeds) == (bug is not None)
