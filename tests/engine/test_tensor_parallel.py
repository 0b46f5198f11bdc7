"""A model over several ranks gives the tokens of one, and its processes end when they should."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import active_children, connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless import LLM, ConfigError, EngineOptions, SamplingParams
from gapless.core.plan import DecodeRow, PrefillSegment, StepPlan
from gapless.core.request import Request
from gapless.engine.client import EngineClient
from gapless.engine.load import device_info
from gapless.engine.worker import PlanReader, PlanWriter, Workers
from gapless.errors import InternalError
from gapless.ops.sampling import SamplingMode
from tests.engine.summing import failing, summing
from tests.engine_fixtures import runner_of
from tests.ranks import CONFIGS, ThreadRunners, make_recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.runner.device import Device
    from tests.ranks import CheckpointOf

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SEEDED = SamplingParams(temperature=1.2, top_p=0.9, min_tokens=3, max_tokens=13)
# prompts of up to 70 tokens run in three chunks and more
OPTIONS: dict[str, Any] = {
    "dtype": "float64", "max_running_requests": 3, "max_model_len": 200, "page_size": 8,
    "chunked_prefill_size": 24, "mem_fraction": 0.1,
}  # fmt: skip


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    lengths = (70, 1, 33, 50, 12)
    found = [[rng.randrange(2, 250) for _ in range(n)] for n in lengths]
    # something for drafts to foretell
    found[2] = [7, 8, 9] * 11
    return found


def params() -> list[SamplingParams]:
    return [replace(SEEDED, seed=i) if i % 2 else GREEDY for i in range(5)]


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [result.token_ids for result in llm.generate(prompts(), params())]


PLAIN = SamplingParams(temperature=1.3, max_tokens=13)
# what rows may ask for; whole logits are gathered for `filtered`, `edited` and `scored` only
KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "plain": PLAIN,
    "filtered": replace(PLAIN, top_k=40),
    "edited": replace(PLAIN, frequency_penalty=0.5),
    "scored": replace(PLAIN, logprobs=2),
}
OFF = {"speculative_algorithm": "none"}
CHAIN = {"speculative_algorithm": "mtp"}
TREE = {"speculative_topk": 3, "speculative_num_draft_tokens": 9}


def of_kind(llm: LLM, kind: str) -> list[tuple[int, ...]]:
    """Tokens of requests of a kind beside greedy ones."""
    mixed = [replace(KINDS[kind], seed=i) if i % 2 else GREEDY for i in range(5)]
    return [result.token_ids for result in llm.generate(prompts(), mixed)]


def drafts_of(device: Device) -> list[torch.Tensor]:
    """What the last step left as drafts."""
    table = device.table
    slots = slice(0, device.geometry.num_slots)
    return [column[slots] for column in (table.window_tokens, table.num_drafts, table.draft_bits)]


def retract_often(llm: LLM) -> Callable[[], int]:
    """Send requests back to waiting all the time; return how often that was done."""
    scheduler, calls = llm.engine.scheduler, []
    schedule = scheduler.schedule

    def retracting() -> StepPlan | None:
        calls.append(None)
        running = list(scheduler._running)
        # the oldest is left alone, so that something gets on
        if len(calls) % 3 == 0 and len(running) > 1:
            scheduler._retract(running[-1])
        return schedule()

    scheduler.schedule = retracting  # type: ignore[method-assign]
    return lambda: scheduler.cache_counters.num_retractions


def split_in_threads(llm: LLM, checkpoint: Path, world_size: int, **options: Any) -> ThreadRunners:
    """Run an engine's plans on several ranks in place of one."""
    runners = ThreadRunners(make_recipe(checkpoint, **{**OPTIONS, **options}), world_size)
    llm.engine._loop._run = runners.run
    return runners


@pytest.fixture(scope="module")
def expected(checkpoint_of: CheckpointOf) -> dict[str, list[tuple[int, ...]]]:
    """Tokens of one rank without drafts, by model, as they are asked for."""

    class Tokens(dict[str, list[tuple[int, ...]]]):
        def __missing__(self, name: str) -> list[tuple[int, ...]]:
            llm = LLM(str(checkpoint_of(name)), **OPTIONS, speculative_algorithm="none")
            self[name] = tokens(llm)
            assert len({own[:5] for own in self[name]}) == len(self[name])
            return self[name]

    return Tokens()


@pytest.mark.parametrize(
    ("name", "world_size", "options"),
    [
        ("qwen3_5", 2, {"speculative_algorithm": "mtp"}),
        ("qwen3_5_four", 4, {"speculative_algorithm": "mtp", "draft_head_dtype": "fp8"}),
        ("deepseek_v3", 2, {"speculative_topk": 2, "speculative_num_draft_tokens": 7}),
        ("qwen3_next", 2, {"speculative_algorithm": "ngram"}),
        ("qwen3_one_kv_head", 2, {"speculative_algorithm": "ngram"}),
        ("qwen3_moe", 2, {"speculative_algorithm": "none"}),
        ("deepseek_v3", 2, {"speculative_algorithm": "mtp"}),
        ("kimi_linear", 2, {"speculative_algorithm": "ngram"}),
    ],
)
def test_tokens_are_those_of_one_rank(
    checkpoint_of: CheckpointOf,
    expected: dict[str, list[tuple[int, ...]]],
    name: str,
    world_size: int,
    options: dict[str, Any],
) -> None:
    wanted = expected[name]
    llm = LLM(str(checkpoint_of(name)), **OPTIONS, **options)
    runners = split_in_threads(llm, checkpoint_of(name), world_size, **options)
    num_retractions = retract_often(llm)
    assert tokens(llm) == wanted
    assert num_retractions() > 5
    # those that were sent back resume
    assert llm.cache_counters.num_hits > 3
    first, *others = [runner.device.table for runner in runners.runners]
    for other in others:
        for column, found in vars(first).items():
            if isinstance(found, torch.Tensor):
                assert torch.equal(found, vars(other)[column]), column
        for column, found in vars(first.columns).items():
            assert torch.equal(found, vars(other.columns)[column]), column


# the kinds of the short run; greedy rows are beside those of every other kind
RANKS = [
    pytest.param(world_size, options, kind, marks=() if kind in usual else pytest.mark.slow)
    for world_size, options, usual in (
        (2, OFF, KINDS), (4, CHAIN, ("plain", "filtered", "scored")),
        (2, TREE, ("plain", "edited", "scored")), (2, CHAIN, ()), (4, TREE, ()),
    )
    for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize(("world_size", "options", "kind"), RANKS)
def test_ranks_gather_what_a_choice_depends_on(
    checkpoint_of: CheckpointOf, world_size: int, options: dict[str, Any], kind: str
) -> None:
    """Tokens and drafts are those of one rank, from few numbers per row where those do."""
    path = checkpoint_of("qwen3_5_four")
    whole = LLM(str(path), **OPTIONS, **options)
    wanted = of_kind(whole, kind)
    llm = LLM(str(path), **OPTIONS, **options)
    runners = split_in_threads(llm, path, world_size, **options)
    assert of_kind(llm, kind) == wanted
    for found, own in zip(
        drafts_of(runners.runners[-1].device), drafts_of(runner_of(whole).device), strict=True
    ):
        assert torch.equal(found, own)
    # a value and an id of each row that is sampled; of trees' drafts topk of both, and a sum
    few = {2, 2 * options["speculative_topk"] + 1} if "speculative_topk" in options else {2}
    shard = -(-CONFIGS["qwen3_5_four"]["vocab_size"] // world_size)
    columns = {size[1] for size in runners.ranks.communicators[0].gathered}
    if kind in ("greedy", "plain"):
        assert columns == few
    else:
        # greedy rows alone, once the others have ended
        assert columns - few == {shard}


@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        ("greedy", {SamplingMode.PLAIN}),
        ("plain", {SamplingMode.PLAIN}),
        # greedy rows alone, once the others have ended
        ("filtered", {SamplingMode.DRAWN, SamplingMode.PLAIN}),
        ("edited", {SamplingMode.SAMPLED, SamplingMode.PLAIN}),
    ],
)
def test_steps_of_a_gpu_are_the_least_that_is_captured(
    checkpoint_of: CheckpointOf, kind: str, modes: set[SamplingMode]
) -> None:
    path, options = checkpoint_of("qwen3"), {"speculative_algorithm": "ngram"}
    whole, llm = (LLM(str(path), **OPTIONS, **options) for _ in range(2))
    runners = split_in_threads(llm, path, 2, **options)
    decoders = [runner._decode for runner in (runner_of(whole), *runners.runners)]
    for decoder in decoders:
        decoder._is_on_gpu = True
    assert of_kind(llm, kind) == of_kind(whole, kind)
    found = [{key.mode for key in decoder._graphs._graphs} for decoder in decoders]
    # one rank has its logits whole
    of_one = {SamplingMode.DRAWN if mode is SamplingMode.PLAIN else mode for mode in modes}
    assert found == [of_one, modes, modes]
    assert modes <= set(decoders[-1]._gpu_modes)
    assert of_one <= set(decoders[0]._gpu_modes)


def test_processes_give_the_tokens_of_one_rank_until_one_is_killed(
    checkpoint_of: CheckpointOf, expected: dict[str, list[tuple[int, ...]]]
) -> None:
    llm = LLM(str(checkpoint_of("qwen3_5")), tp=2, speculative_algorithm="mtp", **OPTIONS)
    (worker,) = active_children()
    num_retractions = retract_often(llm)
    assert tokens(llm) == expected["qwen3_5"]
    assert num_retractions() > 5
    stream = llm.stream([5, 6, 7], replace(GREEDY, max_tokens=100))
    next(stream)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(InternalError, match="rank 1 was ended by signal SIGKILL; this engine can"):
        list(stream)
    assert time.monotonic() - started < 10
    with pytest.raises(InternalError, match="has failed before: rank 1 was ended"):
        llm.generate([1, 2], GREEDY)
    llm.close()


@pytest.mark.slow
def test_an_idle_engine_says_at_once_that_a_rank_has_ended(checkpoint_of: CheckpointOf) -> None:
    options = EngineOptions.from_dict({**OPTIONS, "model": str(checkpoint_of("qwen3")), "tp": 2})

    async def kill_a_rank() -> str:
        client = EngineClient(options, "error")
        try:
            await client.ready()
            # its last statistics are sent: it rests
            await client.inspect()
            os.kill(rank_1_of(client.pid), signal.SIGKILL)
            return str(await asyncio.wait_for(client.gone, 10))
        finally:
            await client.close()

    reason = asyncio.run(kill_a_rank())
    assert "rank 1 was ended by signal SIGKILL; this engine cannot go on" in reason


def rank_1_of(engine: int) -> int:
    """Process id of an engine's other rank; Python's resource tracker is a child too."""
    for task in Path(f"/proc/{engine}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError(f"process {engine} has no rank 1")


@pytest.mark.slow
def test_processes_agree_about_trees(
    checkpoint_of: CheckpointOf, expected: dict[str, list[tuple[int, ...]]]
) -> None:
    tree = {"speculative_topk": 3, "speculative_num_draft_tokens": 9}
    llm = LLM(str(checkpoint_of("qwen3_5")), tp=2, **tree, **OPTIONS)
    assert tokens(llm) == expected["qwen3_5"]
    counters = llm.engine.scheduler.counters
    assert counters.num_proposed == 8 * counters.num_steps
    llm.close()


def step(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), (), (), 0)


def test_ranks_meet_and_a_failing_one_says_why(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers(device="cpu", world_size=3, build=summing)
    directory = Path(workers._finalizer.peek()[2][1].name)
    assert directory.stat().st_mode & 0o777 == 0o700
    workers.lead(summing(0, workers.communicator))
    for step_id in (0, 5):
        result = workers.run(step(step_id)).wait()
        assert result.prefill_tokens.tolist() == [3 * step_id + 3] * 2
        assert result.decode_tokens.tolist() == [[step_id, step_id + 1, step_id + 2]] * 2
    processes = active_children()
    with pytest.raises(InternalError, match="rank 1 failed: ValueError: seven is too much"):
        workers.run(step(7))
    assert "line" in caplog.text
    assert not any(process.is_alive() for process in processes)
    assert not directory.exists()


def test_ranks_end_with_a_failed_step_of_rank_0() -> None:
    workers = Workers(device="cpu", world_size=2, build=summing)
    workers.lead(summing(0, workers.communicator))
    processes = active_children()
    assert not connection.wait(workers.sentinels, 0)
    with pytest.raises(ValueError, match="eight is too much"):
        workers.run(step(8))
    with pytest.raises(InternalError, match="were ended; make another engine"):
        workers.run(step(9))
    assert not any(process.is_alive() for process in processes)


def test_the_end_of_a_rank_is_seen_at_rest() -> None:
    workers = Workers(device="cpu", world_size=3, build=summing)
    workers.lead(summing(0, workers.communicator))
    workers.check()
    first, second = sorted(active_children(), key=lambda process: process.name)
    assert second.pid is not None
    os.kill(second.pid, signal.SIGKILL)
    assert connection.wait(workers.sentinels, 10) == [second.sentinel]
    with pytest.raises(InternalError, match=r"^rank 2 was ended by signal SIGKILL; "):
        workers.check()
    assert not first.is_alive()


def test_a_rank_that_cannot_load_says_why() -> None:
    workers = Workers(device="cpu", world_size=2, build=failing)
    processes = active_children()
    with pytest.raises(InternalError, match="rank 1 failed: MemoryError: rank 1 has no room"):
        workers.lead(summing(0, workers.communicator))
    assert not any(process.is_alive() for process in processes)


def test_ranks_end_with_their_engine(checkpoint_of: CheckpointOf) -> None:
    llm = LLM(str(checkpoint_of("qwen3")), tp=2, **OPTIONS)
    (process,) = active_children()
    assert len(llm.generate([4, 5], GREEDY).token_ids) == GREEDY.max_tokens
    del llm
    gc.collect()
    assert not process.is_alive()
    assert process.exitcode == 0


SCRIPT = """
import sys
from multiprocessing import active_children
from gapless import LLM, SamplingParams

def main():
    llm = LLM(sys.argv[1], tp=2, num_threads=1, max_running_requests=2, max_model_len=64)
    print([child.pid for child in active_children()], flush=True)
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0))
    next(stream)
    # ends with a step under way, the engine alive, and nothing closed

"""


def run_script(file: Path, text: str, checkpoint: Path) -> subprocess.CompletedProcess[str]:
    file.write_text(text)
    return subprocess.run(
        [sys.executable, str(file), str(checkpoint)], capture_output=True, text=True, timeout=60,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_processes_end_with_python(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    text = SCRIPT + "if __name__ == '__main__':\n    main()\n"
    done = run_script(tmp_path / "guarded.py", text, checkpoint_of("qwen3"))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (pid,) = eval(done.stdout)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(checkpoint_of: CheckpointOf, tmp_path: Path) -> None:
    done = run_script(tmp_path / "bare.py", SCRIPT + "main()\n", checkpoint_of("qwen3"))
    assert done.returncode == 1
    assert "must do so below `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]


def request(*ids: int) -> Request:
    return Request(
        request_id="r", prompt_ids=ids, params=GREEDY, seed=3, stop_ids=(9,), limit_len=50
    )


def segment(owner: Request, slot: int, start: int, end: int) -> PrefillSegment:
    return PrefillSegment(owner, slot, 1, (4, 2), start, end, end == len(owner.token_ids))


def test_plans_travel_whole_and_requests_once() -> None:
    writer, reader = PlanWriter(), PlanReader()
    long, short = request(*range(1000, 3000)), request(4, 5)
    first = StepPlan(0, (segment(long, 0, 0, 1500), segment(short, 1, 0, 2)),
                     (DecodeRow(short, 1),), (), 3)  # fmt: skip
    data = writer.pack(first)
    assert len(data) > 4000
    found = reader.unpack(data)
    assert found.prefill[0].request.token_ids == long.token_ids
    assert vars(found.prefill[1].request) == vars(short)
    assert found.decode[0].request is found.prefill[1].request
    # the device knows these, not the host of a worker
    short.token_ids += [6, 7]
    second = StepPlan(1, (segment(long, 0, 1500, 2000),), (DecodeRow(short, 1),), (), 5)
    data = writer.pack(second)
    assert len(data) < 1000
    again = reader.unpack(data)
    assert again.prefill[0].request is found.prefill[0].request
    assert again.decode[0].request is found.decode[0].request
    assert (again.step_id, again.prefill[0].start, again.max_seq_len) == (1, 1500, 5)


def test_readmitted_requests_bring_their_tokens() -> None:
    writer, reader = PlanWriter(), PlanReader()
    owner, other = request(1, 2, 3), request(8, 9)
    reader.unpack(writer.pack(StepPlan(0, (segment(owner, 0, 0, 3),), (), (), 0)))
    owner.token_ids.append(7)
    reader.unpack(writer.pack(StepPlan(1, (segment(other, 0, 0, 2),), (), (), 0)))
    plan = StepPlan(2, (segment(owner, 2, 0, 4),), (DecodeRow(other, 0),), (), 0)
    found = reader.unpack(writer.pack(plan))
    assert found.prefill[0].request.token_ids == [1, 2, 3, 7]
    assert found.prefill[0].request.prompt_ids == (1, 2, 3)
    assert found.decode[0].request.token_ids == [8, 9]


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ConfigError, match=rf"tp=2 needs 2 GPUs, torch finds {num_gpus}.*use tp=1"):
        device_info(EngineOptions(tp=2, device="cuda"))


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2"])
def test_tp_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tp=.*want an integer of at least 1"):
        LLM(tp=value)


def test_sizes_that_do_not_divide_are_named(checkpoint_of: CheckpointOf) -> None:
    wanted = "tp=3 .*intermediate_size=44.*num_attention_heads=4.*use tp=1 or 2$"
    with pytest.raises(ConfigError, match=wanted):
        LLM(str(checkpoint_of("qwen3_5")), tp=3, **OPTIONS)


def test_ranks_on_a_cpu_share_its_memory_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    one, four = (device_info(EngineOptions(tp=tp, device="cpu")) for tp in (1, 4))
    assert (one.num_threads, four.num_threads) == (8, 2)
    assert one.free_bytes / 5 < four.free_bytes < one.free_bytes / 3
