"""The engine on a GPU: captured steps, tokens as on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from gapless import LLM, Grammar, SamplingParams
from gapless.runner.syncs import forbid_syncs
from tests.engine_fixtures import runner_of

pytestmark = pytest.mark.gpu

QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in (
        "Ann has 4 boxes with 6 pens each. How many pens are there?",
        "What is the capital of France?",
        "Tom has 7 pens and buys 8 more. How many pens does he have now?",
    )
]
OPTIONS: dict[str, Any] = {"max_running_requests": 4, "max_model_len": 256, "dtype": "float32"}
DRAFTING: list[dict[str, int]] = [
    {"speculative_num_steps": 0},
    {"speculative_num_steps": 3},
    {"speculative_num_steps": 3, "speculative_topk": 3, "speculative_num_draft_tokens": 12},
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60),
    SamplingParams(temperature=0.0, max_tokens=60, min_tokens=3, logprobs=2),
]
PENALISED = [
    SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=0.5, presence_penalty=0.3),
    SamplingParams(temperature=0.9, seed=5, max_tokens=40, logit_bias={300: 2.0}, logprobs=0),
]


@pytest.mark.parametrize("params", [PARAMS, PENALISED])
@pytest.mark.parametrize("drafting", [*DRAFTING, {"draft_head_dtype": "fp8"}])
def test_tokens_as_on_the_cpu(drafting: dict[str, Any], params: list[SamplingParams]) -> None:
    found = [
        LLM(device=device, **drafting, **OPTIONS).generate(QUESTIONS, params)
        for device in ("cuda", "cpu")
    ]
    for on_gpu, on_cpu in zip(*found, strict=True):
        assert on_gpu.token_ids == on_cpu.token_ids


@pytest.mark.parametrize("drafting", DRAFTING)
def test_grammars_are_followed_as_on_the_cpu(drafting: dict[str, int]) -> None:
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"pens": {"type": "integer"}, "who": {"enum": ["Ann", "Tom"]}},
        "required": ["pens", "who"],
    }
    params = [
        replace(PARAMS[0], grammar=Grammar.json_schema(schema)),
        replace(PARAMS[1], grammar=Grammar.regex("[a-f]{3,9}(x|yz)")),
        PARAMS[1],
    ]
    found = [
        LLM(device=device, **drafting, **OPTIONS).generate(QUESTIONS, params)
        for device in ("cuda", "cpu")
    ]
    for on_gpu, on_cpu in zip(*found, strict=True):
        assert on_gpu.token_ids == on_cpu.token_ids
    assert re.fullmatch("[a-f]{3,9}(x|yz)", found[0][1].text)


@pytest.mark.parametrize("drafting", DRAFTING[1:])
def test_steady_steps_are_one_graph_each_and_never_sync(drafting: dict[str, int]) -> None:
    llm = LLM(device="cuda", **drafting, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    streams = [llm.stream(question, params) for question in QUESTIONS]
    for stream in streams:
        for _ in range(3):
            next(stream)
    torch.cuda.synchronize()
    launch = llm.engine._loop._run
    graphs = runner_of(llm)._decode._graphs._graphs
    # edits share their graphs with grammars, whose masks are filled between two of them
    assert all(graph.num_launches == 1 + key.is_masked for key, graph in graphs.items())

    def guarded(plan: Any) -> Any:
        with forbid_syncs():
            return launch(plan)

    llm.engine._loop._run = guarded
    for _ in range(5):
        llm.engine.step()
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("drafting", DRAFTING)
def test_nothing_is_compiled_once_the_engine_is_ready(drafting: dict[str, int]) -> None:
    llm = LLM(device="cuda", **drafting, **OPTIONS | {"dtype": "bfloat16"})
    llm.generate(QUESTIONS, PARAMS)
    llm.generate([[5] * length for length in (1, 3, 17, 40, 100)] * 2, PARAMS[0])
    history = [*QUESTIONS[0], {"role": "assistant", "content": "24"}, *QUESTIONS[1]]
    llm.generate(history, PARAMS[1])
    assert runner_of(llm).compiles.count == 0


def test_a_prefix_is_resumed_and_saved_on_the_device() -> None:
    """Tokens as without a cache, in float32 with the shapes of both runs apart."""
    warm, cold = (LLM(device="cuda", disable_prefix_cache=off, **OPTIONS) for off in (False, True))
    base = warm.encode(QUESTIONS[0])
    params = PARAMS[0]
    for offset in (len(base) // 2, len(base) - 3, len(base)):
        prompt = [*base[:offset], *warm.encode(QUESTIONS[2])]
        for _ in range(2):
            assert (
                warm.generate(prompt, params).token_ids == cold.generate(prompt, params).token_ids
            )
    assert warm.cache_counters.num_hits >= 3


def test_the_host_tier_gives_back_what_the_device_has_lost() -> None:
    llm = LLM(device="cuda", host_cache_gb=0.1, **OPTIONS)
    prompts = [[7 + i] * 90 for i in range(4)]
    first = [llm.generate(prompt, PARAMS[0]).token_ids for prompt in prompts]
    cache = llm.engine.scheduler._cache
    taken = cache._pages.allocate(cache.num_free_pages)
    assert taken is not None
    # everything on the device gives way
    while cache.device.make_room(cache.num_free_pages + 1):
        pass
    cache._pages.release(taken)
    assert [llm.generate(prompt, PARAMS[0]).token_ids for prompt in prompts] == first
    assert llm.cache_counters.num_loads >= 2
