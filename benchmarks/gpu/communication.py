"""What the ranks of one step cost each other: sums through mailboxes and through NCCL, and gathers.

    python -m benchmarks.gpu.communication [--tp 2] [--output figures.json]

Each figure is of a graph of many calls, as a step has them, on every rank at once.
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
from gapless.engine.worker import Workers
from gapless.ops.peer_sum.reference import is_served

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

    def __init__(self, communicator: ProcessCommunicator, world_size: int) -> None:
        self._communicator = communicator
        self._peers = communicator.peers
        self.rows: Rows = []
        for count in NUM_TOKENS:
            x = torch.zeros(count, HIDDEN_SIZE, dtype=torch.bfloat16, device="cuda")
            row: dict[str, Any] = {"call": "sum", "tokens": count, "KiB": x.nbytes / 1024}
            row["nccl_us"] = time_us(lambda x=x: communicator.group_sum(x))
            if self._peers is not None and is_served(x, self._peers.mailboxes.capacity):
                row["mailboxes_us"] = time_us(lambda x=x: communicator.all_reduce(x))
            self.rows.append(row)
        for count in (1, 4, 64):
            logits = torch.zeros(count, VOCAB_SIZE // world_size, device="cuda")
            row = {"call": "gather of logits", "tokens": count, "KiB": logits.nbytes / 1024}
            row["nccl_us"] = time_us(lambda logits=logits: communicator.all_gather(logits))
            self.rows.append(row)
        self.is_right = self._agrees()

    def forget_graphs(self) -> None:
        """Nothing is kept."""

    def _agrees(self) -> bool:
        """Whether both ways give every rank the same bits; a sum of two terms rounds once."""
        wide = torch.randn(4, HIDDEN_SIZE, device="cuda")
        is_pair = self._peers is not None and self._peers.mailboxes.world_size == 2
        for x in (wide, wide.bfloat16()):
            found = self._communicator.all_reduce(x.clone())
            if is_pair and not torch.equal(found, self._communicator.group_sum(x.clone())):
                return False
            everyone = self._communicator.all_gather(found).view(4, -1, HIDDEN_SIZE)
            if not bool((everyone == found[:, None]).all()):
                return False
        return True


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
    return RankFigures(communicator, world_size)


def measure(world_size: int) -> Rows:
    """Check and time on as many GPUs.

    Raises:
        SystemExit: the ranks' sums differ.
    """
    build_rank: Any = partial(build, world_size=world_size)
    workers = Workers(device="cuda", world_size=world_size, build=build_rank)
    try:
        found: Any = build_rank(0, workers.communicator)
        workers.lead(found)
    finally:
        workers.close()
    if not found.is_right:
        raise SystemExit("sums differ between ranks, or between mailboxes and NCCL")
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
