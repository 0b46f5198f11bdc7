"""What the ranks of one step cost each other: sums and gathers through mailboxes and through NCCL.

    python -m benchmarks.gpu.communication [--tp 2] [--output figures.json]

Each figure is of a graph of many calls, as a step has them, on every rank at once. Choosing tokens
is timed both ways: from whole logits, gathered, and from what the best of each shard are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.harness import WARM_REPLAYS, Rows, print_rows, replay_us
from gapless.core.sampling_params import MAX_STOP_IDS
from gapless.engine.worker import Workers
from gapless.layers.logits import LogitShard
from gapless.ops.peer_sum.reference import is_gathered, is_served
from gapless.ops.sampling import SamplingColumns, SamplingMode, SamplingRows, shard_best
from gapless.runner.choice import choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gapless.engine.process_group import ProcessCommunicator

HIDDEN_SIZE = 2048
# tokens of a step: one request with and without drafts, up to 64 requests with three
NUM_TOKENS = (1, 4, 16, 64, 128, 256, 512)
VOCAB_SIZE = 248_320
CALLS = 40
REPLAYS = 5


class RankFigures:
    """One rank's part; all ranks make the same calls in the same order."""

    def __init__(self, rank: int, communicator: ProcessCommunicator, world_size: int) -> None:
        self._communicator = communicator
        self._peers = communicator.peers
        self.rows: Rows = []
        self.problems: list[str] = []
        for count in NUM_TOKENS:
            x = torch.zeros(count, HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda")
            row: dict[str, Any] = {"call": "sum", "tokens": count, "KiB": x.nbytes / 1024}
            row["nccl_us"] = time_us(lambda x=x: communicator.group_sum(x))
            if self._peers is not None and is_served(x, self._peers.mailboxes.capacity):
                row["mailboxes_us"] = time_us(lambda x=x: communicator.all_reduce(x))
            self.rows.append(row)
        for count in (1, 4, 64, 256):
            part = torch.randn(count, VOCAB_SIZE // world_size, device="cuda")
            self._choose(LogitShard(part, rank * part.shape[1], VOCAB_SIZE, communicator))
        self._check()

    def forget_graphs(self) -> None:
        """Nothing is kept."""

    def _choose(self, shard: LogitShard) -> None:
        """Time the choice of tokens both ways, and what each sends."""
        count = len(shard.part)
        at, sampling = torch.arange(count, device="cuda"), plain_rows(count)
        pairs = shard_best(shard.part, at, sampling, mode=SamplingMode.PLAIN, first=shard.first)
        self.rows.append(self._gather("gather of logits", shard.part))
        self.rows.append(self._gather("gather of the best", pairs.flatten(1)))
        calls: dict[str, Callable[[], Tensor]] = {
            "whole": lambda: choose(shard, at, sampling, mode=SamplingMode.DRAWN),
            "shards": lambda: choose(shard, at, sampling, mode=SamplingMode.PLAIN),
        }
        if not torch.equal(calls["whole"](), calls["shards"]()):
            self.problems.append(f"tokens of {count} rows from shards")
        for name, call in calls.items():
            us = time_us(call)
            self.rows.append({"call": f"tokens from {name}", "tokens": count, "us": us})

    def _gather(self, name: str, x: Tensor) -> dict[str, Any]:
        row: dict[str, Any] = {"call": name, "tokens": len(x), "KiB": x.nbytes / 1024}
        row["nccl_us"] = time_us(lambda: self._communicator.group_gather(x))
        if self._peers is not None and is_gathered(x, self._peers.mailboxes.capacity):
            row["mailboxes_us"] = time_us(lambda: self._communicator.all_gather(x))
        return row

    def _check(self) -> None:
        """Note where the two ways give a rank other bits; a sum of two terms rounds once."""
        wide = torch.randn(4, HIDDEN_SIZE, device="cuda")
        is_pair = self._peers is not None and self._peers.mailboxes.world_size == 2
        for x in (wide, wide.bfloat16()):
            found = self._communicator.all_reduce(x.clone())
            if is_pair and not torch.equal(found, self._communicator.group_sum(x.clone())):
                self.problems.append(f"a sum of {x.dtype} through NCCL")
            everyone = self._communicator.all_gather(found)
            if not torch.equal(everyone, self._communicator.group_gather(found)):
                self.problems.append(f"a gather of {x.dtype} through NCCL")
            if not bool((everyone.view(4, -1, HIDDEN_SIZE) == found[:, None]).all()):
                self.problems.append(f"a sum of {x.dtype} on another rank")


def plain_rows(count: int) -> SamplingRows:
    """Rows with a temperature and without filters."""
    columns = SamplingColumns(
        temperature=torch.full((count,), 0.8, device="cuda"),
        top_k=torch.zeros(count, dtype=torch.int64, device="cuda"),
        top_p=torch.ones(count, device="cuda"),
        min_p=torch.zeros(count, device="cuda"),
        seeds=torch.arange(count, device="cuda"),
        min_len=torch.zeros(count, dtype=torch.int64, device="cuda"),
        stop_ids=torch.full((count, MAX_STOP_IDS), -1, device="cuda"),
    )
    return SamplingRows(columns, torch.arange(count, device="cuda"))


def time_us(call: Callable[[], Tensor]) -> float:
    """Return microseconds per call in a graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread may ask for events meanwhile
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
    torch.cuda.synchronize()
    times = [replay_us(graph) for _ in range(WARM_REPLAYS + REPLAYS)]
    return statistics.median(times[WARM_REPLAYS:]) / CALLS


def build(rank: int, communicator: ProcessCommunicator, *, world_size: int) -> RankFigures:
    """Measure on one rank."""
    return RankFigures(rank, communicator, world_size)


def measure(world_size: int) -> Rows:
    """Check and time on as many GPUs.

    Raises:
        SystemExit: sums, gathers or tokens differ.
    """
    build_rank: Any = partial(build, world_size=world_size)
    workers = Workers(device="cuda", world_size=world_size, build=build_rank)
    try:
        found: Any = build_rank(0, workers.communicator)
        workers.lead(found)
    finally:
        workers.close()
    if found.problems:
        raise SystemExit(f"rank 0 has results that differ from: {', '.join(found.problems)}")
    return found.rows


def main() -> None:
    """Measure, print, and write a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    rows = measure(asked.tp)
    print_rows(rows)
    if asked.output is not None:
        record = {
            "command": " ".join(["python -m benchmarks.gpu.communication", *sys.argv[1:]]),
            "date": str(date.today()),
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__},
            "figures": rows,
        }
        asked.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
