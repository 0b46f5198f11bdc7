"""An engine over two GPUs: tokens as on one, one graph launch per rank and step, lost ranks."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, connection
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from gapless import LLM, SamplingParams
from gapless.engine import load as load_module
from gapless.engine.load import build
from gapless.engine.worker import Workers
from gapless.errors import InternalError
from gapless.ops.peer_sum.reference import peer_gather, peer_sum
from gapless.runner.syncs import forbid_syncs

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.core.plan import StepPlan
    from gapless.engine.loop import Handle
    from gapless.engine.process_group import ProcessCommunicator
    from gapless.layers.placement import Communicator
    from gapless.runner.runner import Runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_running_requests": 4, "max_model_len": 400,
    "page_size": 16, "chunked_prefill_size": 48,
}  # fmt: skip
QUESTIONS = [
    [{"role": "user", "content": text}]
    for text in (
        "Ann has 4 boxes with 6 pens each. How many pens are there?",
        "What is the capital of France?",
        "Tom has 7 pens and buys 8 more. How many pens does he have now?",
        "What is the capital of Spain?",
        "Ben has 3 bags with 5 nuts each. How many nuts are there?",
    )
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=60)
# what whole logits are gathered for
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=5, max_tokens=20)
EDITED = SamplingParams(temperature=0.8, repetition_penalty=1.1, seed=6, max_tokens=20)


def watched_build(recipe: Any, rank: int, communicator: Communicator) -> Runner:
    """A rank whose steady steps may neither wait for its device nor be launched but by graphs."""
    runner = build(recipe, rank, communicator)
    runner.run = partial(watched_run, runner.run)  # type: ignore[method-assign]
    return runner


def watched_run(run: Callable[[StepPlan], Handle], plan: StepPlan) -> Handle:
    if plan.prefill or plan.saves or plan.page_copies or not plan.decode:
        return run(plan)
    launches = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        launches.append(graph)
        replay(graph)

    with forbid_syncs(), mock.patch.object(torch.cuda.CUDAGraph, "replay", counted):
        handle = run(plan)
    # masks, which edits share their graphs with, are filled between two of them
    wanted = 1 + any(row.request.params.edits_logits for row in plan.decode)
    if len(launches) != wanted:
        raise InternalError(f"a step of {len(launches)} graph launches, want {wanted}")
    return handle


def retract_often(llm: LLM) -> None:
    """Send requests back to waiting all the time, the oldest apart."""
    scheduler, calls = llm.engine.scheduler, []
    schedule = scheduler.schedule

    def retracting() -> StepPlan | None:
        calls.append(None)
        running = list(scheduler._running)
        if len(calls) % 7 == 0 and len(running) > 1:
            scheduler._retract(running[-1])
        return schedule()

    scheduler.schedule = retracting  # type: ignore[method-assign]


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Tokens of requests side by side, of a second turn, and of the first prompts once more.

    Then of drawn tokens: alone, beside those of filters, and beside edits.
    """
    params = [SEEDED if index == 3 else GREEDY for index in range(len(QUESTIONS))]
    first = [result.token_ids for result in llm.generate(QUESTIONS, params)]
    turn = [*QUESTIONS[0], {"role": "assistant", "content": "24"}, *QUESTIONS[1]]
    again = llm.generate([turn, *QUESTIONS], [GREEDY, *params])
    found = [*first, *(result.token_ids for result in again)]
    for other in (SEEDED, FILTERED, EDITED):
        drawn = [replace(other if i % 2 else SEEDED, seed=i) for i in range(len(QUESTIONS))]
        found += [result.token_ids for result in llm.generate(QUESTIONS, drawn)]
    return found


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Tokens of one GPU without drafts."""
    llm = LLM(speculative_num_steps=0, **OPTIONS)
    found = tokens(llm)
    count = len(QUESTIONS)
    assert found[:count] == found[count + 1 :][:count]
    return found


@pytest.mark.parametrize(
    "drafting",
    [
        {"speculative_num_steps": 0},
        {"speculative_num_steps": 3},
        {"speculative_topk": 4, "speculative_num_draft_tokens": 16},
    ],
    ids=str,
)
def test_tokens_are_those_of_one_gpu_until_a_rank_is_killed(
    expected: list[tuple[int, ...]], drafting: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "build", watched_build)
    llm = LLM(tp=2, **drafting, **OPTIONS)
    (worker,) = active_children()
    retract_often(llm)
    assert tokens(llm) == expected
    assert llm.cache_counters.num_retractions > 3
    assert llm.cache_counters.num_hits >= 3
    stream = llm.stream([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True))
    next(stream)
    is_idle = drafting == {"speculative_num_steps": 0}
    if is_idle:
        stream.close()
        while llm.engine.has_work:
            llm.engine.step()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    started = time.monotonic()
    if is_idle:
        assert connection.wait(llm.engine.sentinels, 10)
    go_on: Callable[[], object] = llm.engine.check_ranks if is_idle else partial(list, stream)
    with pytest.raises(InternalError, match="rank 1 was ended by signal SIGKILL"):
        go_on()
    assert time.monotonic() - started < 15
    with pytest.raises(InternalError):
        llm.generate([1, 2], GREEDY)
    llm.close()
    # the GPU of rank 0 waits for nobody
    torch.cuda.synchronize()


SIZES = ((1, 256), (4, 2048), (64, 2048), (256, 2048), (257, 2048))


class Sums:
    """Sums and gathers of random terms, launched one by one, and sums from a graph."""

    def __init__(self, rank: int, communicator: ProcessCommunicator) -> None:
        self.has_mailboxes = communicator.peers is not None
        self.problems: list[str] = []
        for dtype in (torch.bfloat16, torch.float32):
            for size in SIZES:
                terms = [self._term(index, size, dtype) for index in range(2)]
                own, wanted = terms[rank], peer_sum(terms)
                found = communicator.all_reduce(own.clone())
                if not torch.equal(found, wanted):
                    self.problems.append(f"rank {rank}: sum of {dtype} {size}")
                if not torch.equal(communicator.all_gather(own), peer_gather(terms)):
                    self.problems.append(f"rank {rank}: gather of {dtype} {size}")
        self._replay(rank, communicator)

    @staticmethod
    def _term(index: int, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(index)
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    def _replay(self, rank: int, communicator: ProcessCommunicator) -> None:
        """An odd number of sums per graph, so that mailboxes change their turns between replays."""
        x = torch.full((4, 2048), 1.0 + rank, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            communicator.all_reduce(x.clone())
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                total = x
                for index in range(7):
                    total = communicator.all_reduce(total / 2 + index)
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        # (1 + 2) / 2, and each rank's indices
        if not bool((total == 1.5 + 2 * 21).all()):
            self.problems.append(f"rank {rank}: a graph's sums are {total}")

    def forget_graphs(self) -> None:
        """None is kept."""


def sums(rank: int, communicator: ProcessCommunicator) -> Sums:
    found = Sums(rank, communicator)
    if found.problems:
        raise InternalError("; ".join(found.problems))
    return found


def lacking(rank: int, communicator: ProcessCommunicator) -> object:
    """Rank 1 fails while rank 0 waits for its term, on the device."""
    if rank == 1:
        time.sleep(1)
        raise MemoryError("no room")
    communicator.all_reduce(torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()
    return object()


def test_a_rank_that_cannot_load_says_why() -> None:
    build_rank: Any = lacking
    workers = Workers(device="cuda", world_size=2, build=build_rank)
    waited: Any = build_rank(0, workers.communicator)
    with pytest.raises(InternalError, match="rank 1 failed: MemoryError: no room"):
        workers.lead(waited)


def test_sums_and_gathers_are_those_in_the_order_of_ranks_bit_for_bit() -> None:
    build_rank: Any = sums
    workers = Workers(device="cuda", world_size=2, build=build_rank)
    try:
        found: Any = build_rank(0, workers.communicator)
        workers.lead(found)
    finally:
        workers.close()
    assert found.has_mailboxes
