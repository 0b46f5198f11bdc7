"""Captured prefill on a GPU: the tokens of chunks that are launched, whatever null memory holds."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from gapless import LLM, SamplingParams
from gapless.runner.syncs import forbid_syncs
from tests.engine_fixtures import runner_of, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gapless.runner.prefill import PrefillRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # torch warns while fla is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

__all__ = ["tiny_model"]

OPTIONS: dict[str, Any] = {"device": "cuda", "max_running_requests": 12, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NAN = float("nan")


def prompts(vocab_size: int) -> list[list[int]]:
    """Unrelated prompts of many lengths, then ones that go on where others branch off."""
    rng = random.Random(7)
    lengths = (1, 3, 63, 64, 65, 100, 257, 400)
    found = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return found + [base[:cut] + found[2][:9] for base in found[2:] for cut in (16, 35)]


def generated(llm: LLM, vocab_size: int) -> list[tuple[int, ...]]:
    """All of them at once, then each alone: most then resume."""
    asked = prompts(vocab_size)
    together = [result.token_ids for result in llm.generate(asked, GREEDY)]
    return together + [llm.generate(prompt, GREEDY).token_ids for prompt in asked]


@contextmanager
def counted(prefill: PrefillRunner) -> Iterator[Counter[str]]:
    """Count chunks by how they run."""
    ran: Counter[str] = Counter()
    honest = {"_run_in": prefill._run_in, "_run_exactly": prefill._run_exactly}

    def counting(name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran[name] += 1
            with forbid_syncs():
                return honest[name](*args)

        return run

    for name in honest:
        vars(prefill)[name] = counting(name)
    yield ran
    for name in honest:
        del vars(prefill)[name]


@pytest.mark.parametrize("num_steps", [0, 3])
def test_captured_equals_the_same_chunks_launched(num_steps: int) -> None:
    """Bit for bit, so also in bfloat16 and with made-up weights of none."""
    found = []
    for is_captured in (True, False):
        llm = LLM(dtype="bfloat16", speculative_num_steps=num_steps, **OPTIONS)
        runner = runner_of(llm)
        prefill = runner._prefill
        assert prefill.rooms, "the bundled model's prefill can be captured"
        assert all(prefill.graph_for(room, ()) is not None for room in prefill.rooms)
        if not is_captured:
            prefill.forget_graphs()
            # as where nothing can be captured, chunks are padded all the same
            prefill._is_on_gpu = False
        with counted(prefill) as ran:
            found.append(generated(llm, 200))
        assert ran["_run_in"] > 20
        assert ran["_run_exactly"] == 0
        if is_captured:
            assert runner.compiles.count == 0
            assert llm.cache_counters.num_hits > 10
        llm.close()
    assert found[0] == found[1]


def test_captured_equals_chunks_that_are_not_padded(tiny_model: Callable[[str], Path]) -> None:
    """In float32, where shapes decide too little to change a token."""
    llm = LLM(str(tiny_model("qwen3")), dtype="float32", **OPTIONS)
    prefill = runner_of(llm)._prefill
    found = []
    for rooms in (prefill.rooms, ()):
        prefill.rooms = rooms
        llm.flush_cache()
        with counted(prefill) as ran:
            found.append(generated(llm, 200))
        assert set(ran) == {"_run_in" if rooms else "_run_exactly"}
    assert found[0] == found[1]
    assert runner_of(llm).compiles.count == 0


def test_what_null_memory_holds_reaches_no_token() -> None:
    llm = LLM(dtype="bfloat16", **OPTIONS)
    wanted = generated(llm, 200)
    llm.flush_cache()
    device = runner_of(llm).device
    geometry = device.geometry
    for pool in device.pools.kv:
        pool[:, geometry.null_page * geometry.page_size :] = NAN
    for memory in device.pools.linear:
        memory.conv_ring[:, geometry.null_slot * geometry.conv_ring_len : geometry.conv_zero] = NAN
        memory.replay.checkpoint[:, geometry.null_row] = NAN
    assert generated(llm, 200) == wanted
