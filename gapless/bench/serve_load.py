"""Load on an OpenAI endpoint: requests at their own times, or a fixed number at once.

The client's own lateness is measured beside the server's times, since both run in one loop here.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gapless.bench.serve_client import Client, Record
from gapless.bench.serve_workloads import Words
from gapless.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gapless.bench.serve_client import Endpoint, Kind
    from gapless.bench.serve_workloads import Job, Messages

# how often the event loop's lag is looked at
_LAG_PERIOD = 0.02
# words of the two prompts that tell how long words are; they must fit any context
_PROBE_WORDS = (16, 116)


@dataclass(frozen=True)
class Load:
    """How conversations are started."""

    rate: float = math.inf
    """Conversations per second, at random times (a Poisson process); infinite: all at once."""
    concurrency: int | None = None
    """Run this many at any time instead, each next one when one has ended."""
    seed: int = 0


@dataclass
class Run:
    """What a run left."""

    records: list[Record] = field(default_factory=list)
    """Requests in the order of their ends."""
    seconds: float = 0.0
    """From the start to the last reply's end."""
    loop_lags: list[float] = field(default_factory=list)
    """Seconds by which timers of the client's event loop were late, every 20 ms or so."""
    num_skipped: int = 0
    """Further turns that were never sent, since one before them had failed."""


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return the starts of `count` conversations in seconds, increasing, the first one at 0.

    Gaps are exponential with mean 1 / `rate`, so arrivals are a Poisson process.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"arrivals {seed}")
    times = [0.0] * count
    for i in range(1, count):
        times[i] = times[i - 1] + rng.expovariate(rate)
    return times


async def run_load(
    client: Client, jobs: Sequence[Job], load: Load, report: Callable[[Record], object]
) -> Run:
    """Run all conversations and return every request. `report` is told each one as it ends."""
    run = Run()
    watch = asyncio.create_task(_watch_loop(client, run.loop_lags))
    client.restart_clock()
    try:
        async with asyncio.TaskGroup() as group:
            if load.concurrency is None:
                due = arrival_times(len(jobs), load.rate, load.seed)
                for index, job in enumerate(jobs):
                    group.create_task(_run_job(client, index, job, due[index], run, report))
            else:
                queue = iter(enumerate(jobs))
                for _ in range(load.concurrency):
                    group.create_task(_work(client, queue, run, report))
    finally:
        watch.cancel()
    run.seconds = max((record.end for record in run.records), default=0.0)
    return run


async def measure_words(endpoint: Endpoint) -> Words:
    """Ask the endpoint how many tokens words have, by the usage of two prompts.

    Raises:
        RequestError: it does not answer, or gives no usage.
    """
    rng = random.Random("probe")
    counts = []
    async with Client(endpoint) as client:
        for num_words in _PROBE_WORDS:
            record = Record(job=0, turn=0, due=0.0)
            await client.send(record, Words().text(rng, num_words), 1, {})
            if record.failure is not None:
                raise RequestError(
                    f"{endpoint.url} failed a first request ({record.failure}: {record.detail}); "
                    "check base_url, endpoint, model and api_key"
                )
            if record.prompt_tokens is None:
                raise RequestError(
                    f"{endpoint.url} gives no usage, so prompts of a wanted length cannot be "
                    "made; want workload='jsonl'"
                )
            counts.append(record.prompt_tokens)
    slope = (counts[1] - counts[0]) / (_PROBE_WORDS[1] - _PROBE_WORDS[0])
    return Words(max(slope, 0.1), max(0.0, counts[0] - slope * _PROBE_WORDS[0]))


async def _work(
    client: Client,
    queue: Iterator[tuple[int, Job]],
    run: Run,
    report: Callable[[Record], object],
) -> None:
    for index, job in queue:
        await _run_job(client, index, job, client.now(), run, report)


async def _run_job(
    client: Client, index: int, job: Job, due: float, run: Run, report: Callable[[Record], object]
) -> None:
    await asyncio.sleep(max(0.0, due - client.now()))
    prompt = job.opening
    for turn, output_len in enumerate(job.output_lens):
        record = Record(job=index, turn=turn, due=due)
        await client.send(record, prompt, output_len, job.fields)
        run.records.append(record)
        report(record)
        if record.failure is not None:
            run.num_skipped += len(job.output_lens) - turn - 1
            return
        if turn < len(job.follow_ups):
            prompt = _continued(client.endpoint.kind, prompt, record.text, job.follow_ups[turn])
            due = client.now()


def _continued(kind: Kind, prompt: str | Messages, reply: str, text: str) -> str | Messages:
    """Return the next prompt of a conversation."""
    if kind == "completions":
        return f"{prompt}{reply}\n{text}"
    if isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    return (
        *prompt,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": text},
    )


async def _watch_loop(client: Client, lags: list[float]) -> None:
    while True:
        wanted = client.now() + _LAG_PERIOD
        await asyncio.sleep(_LAG_PERIOD)
        lags.append(max(0.0, client.now() - wanted))
