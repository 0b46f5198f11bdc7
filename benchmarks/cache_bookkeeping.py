"""Host time that the scheduler takes per admitted request, by the number of cached nodes.

    python -m benchmarks.cache_bookkeeping --output benchmarks/results/<date>-cpu-bookkeeping.json

Requests branch off shared prefixes and end after one token; snapshots outnumber the state rows, so
each request also evicts. Nothing runs: plans are answered at once.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from gapless.core.plan import StepPlan, StepResult
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.scheduler.limits import SchedulerLimits
from gapless.scheduler.scheduler import Scheduler

NUM_NODES = (1_000, 10_000, 100_000)
NUM_PREFIXES, PREFIX_LEN, OWN_LEN, VOCAB_SIZE = 50, 256, 40, 50_000


class Load:
    """An endless stream of requests through a scheduler without a device."""

    def __init__(self, num_nodes: int) -> None:
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_running_requests=8,
                max_model_len=4096,
                num_pages=8 * num_nodes,
                page_size=16,
                num_state_rows=num_nodes * 5 // 6,
                chunked_prefill_size=8192,
                max_window=1,
                replay_len=16,
            )
        )
        self._rng = random.Random(0)
        self._prefixes = [self._tokens(PREFIX_LEN) for _ in range(NUM_PREFIXES)]
        self._num_requests = 0

    def run(self, count: int) -> float:
        """Serve `count` requests one after the other; seconds per request."""
        started = time.perf_counter()
        for _ in range(count):
            self._serve()
        return (time.perf_counter() - started) / count

    def fill(self, num_nodes: int) -> None:
        """Serve until so many nodes are cached, or rows run out and the tree grows no more."""
        before = -1
        while before < self.scheduler.num_cached_nodes < num_nodes:
            before = self.scheduler.num_cached_nodes
            self.run(100)

    def _serve(self) -> None:
        prefix = self._rng.choice(self._prefixes)[: self._rng.randrange(1, PREFIX_LEN)]
        prompt = (*prefix, *self._tokens(OWN_LEN))
        self._num_requests += 1
        self.scheduler.submit(
            Request(
                request_id=str(self._num_requests),
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=1),
                seed=0,
                stop_ids=(),
                limit_len=len(prompt) + 1,
            )
        )
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            assert plan is not None, "a request is waiting"
            self.scheduler.commit(plan, _answer(plan))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(count))


def _answer(plan: StepPlan) -> StepResult:
    num_rows = len(plan.decode)
    return StepResult(
        prefill_tokens=np.ones(len(plan.sampled), np.int32),
        decode_tokens=np.ones((num_rows, 1), np.int32),
        decode_lens=np.ones(num_rows, np.int32),
        decode_proposed=np.zeros(num_rows, np.int32),
    )


def measure(num_nodes: int, num_requests: int) -> dict[str, Any]:
    """Time requests against a tree of about `num_nodes` nodes."""
    load = Load(num_nodes)
    load.fill(num_nodes)
    seconds = min(load.run(num_requests) for _ in range(3))
    return {
        "nodes": load.scheduler.num_cached_nodes,
        "us_per_request": round(seconds * 1e6, 1),
        "counters": str(load.scheduler.cache_counters),
    }


def main() -> None:
    """Measure all sizes, print them, and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    rows = [measure(num_nodes, 1000) for num_nodes in NUM_NODES]
    for row in rows:
        print(f"{row['nodes']:>8} nodes: {row['us_per_request']:8.1f} us per request")
    if output is not None:
        record = {
            "command": " ".join(["python -m benchmarks.cache_bookkeeping", *sys.argv[1:]]),
            "date": str(date.today()),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rows": rows,
        }
        output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
