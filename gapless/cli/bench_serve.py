"""`gapless bench serve`: load on any OpenAI endpoint, and what its users would have seen."""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gapless.cli.report import check_output, table, write_json, write_text
from gapless.errors import ConfigError, RequestError
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from gapless.bench.serve_load import Run
    from gapless.bench.serve_report import Summary
    from gapless.bench.serve_workloads import Job, Span, Words

_NUM_REQUESTS = 100


@dataclass(frozen=True)
class BenchServe:
    """Put load on an OpenAI endpoint, gapless or not, and measure what its clients see.

    Requests are streamed. Prompts are random words, the same for the same seed and server; what
    was really sent and received is counted by the server.
    """

    base_url: str = "http://127.0.0.1:8000"
    """The server, with or without /v1."""
    endpoint: Literal["chat", "completions"] = "chat"
    """What to call."""
    model: str | None = None
    """The model's name there. Default: the first that /v1/models lists."""
    api_key: str | None = None
    """Sent as a bearer token. Default: the environment's GAPLESS_API_KEY, if set."""
    workload: Literal["random", "shared-prefix", "chat-turn", "jsonl"] = "random"
    """Requests that share nothing; that begin alike in groups; conversations, whose next turn is
    sent after the reply; or those of --file."""
    file: Path | None = None
    """JSON lines with a `prompt` or `messages` each, other fields sent along; OpenAI's batch format
    too."""
    num_requests: int | None = None
    """Requests to send; with chat-turn: conversations. Default: 100; with jsonl: each line once."""
    input_len: str = "128"
    """Tokens of a prompt, about: a number or a range such as 64-512. With shared-prefix: of the
    part that is not shared; with chat-turn: of each turn."""
    output_len: str = "64"
    """Most tokens of a reply: a number or a range."""
    prefix_len: int = 512
    """With shared-prefix: tokens that a group shares."""
    num_groups: int = 4
    """With shared-prefix: how many prefixes there are."""
    turns: str = "2-5"
    """With chat-turn: turns of a conversation, a number or a range."""
    request_rate: float = math.inf
    """Requests (conversations) per second, at random times of a Poisson process; inf: all at
    once."""
    concurrency: int | None = None
    """Run this many at any time instead, each next one when one has ended."""
    warmup: int = 4
    """Random requests before, not counted."""
    seed: int = 0
    """Draws prompts, lengths and times."""
    temperature: float = 0.0
    """Of every request."""
    ignore_eos: bool = False
    """Ask for all tokens of --output-len; engines that do not know `ignore_eos` refuse it."""
    extra_body: str = "{}"
    """Further fields of every request, as a JSON object."""
    slo: str | None = None
    """Count requests within these limits, in ms, such as ttft:200,tpot:50,e2e:5000."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""
    output: Path | None = None
    """Write every request's raw figures, and how they were made, to this JSON file."""
    plot: Path | None = None
    """Draw latencies over time and their distribution to this SVG file."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""

    def run(self) -> int:
        """Run the command."""
        from gapless.bench.serve_report import Slo, latency_rows, notes, summarize, total_rows

        configure(self.log_level)
        self._check()
        slo = None if self.slo is None else Slo.parse(self.slo)
        model, found, server = asyncio.run(self._measure())
        summary = summarize(found, slo)
        print(f"{model} at {self.base_url}: {self.workload}, {self._load_text()}")
        for rows in (latency_rows(summary), total_rows(summary)):
            print(f"\n{table(rows)}")
        for note in notes(summary):
            print(f"\n{note}")
        self._write(model, found, summary, server)
        if summary.num_completed == 0 and found.records:
            first = found.records[0]
            raise RequestError(
                f"no request was answered; the first one: {first.failure}: {first.detail}; check "
                "base_url, endpoint, model and api_key"
            )
        return 0

    def _check(self) -> None:
        if self.concurrency is not None and not math.isinf(self.request_rate):
            raise ConfigError(
                f"request_rate={self.request_rate} and concurrency={self.concurrency}: want one "
                "of them"
            )
        if (self.workload == "jsonl") != (self.file is not None):
            raise ConfigError(
                f"workload={self.workload!r} and file={self.file}: want both jsonl and a file, or "
                "neither"
            )
        least = {"num_requests": 1, "concurrency": 1, "prefix_len": 1, "num_groups": 1, "warmup": 0}
        for name, low in least.items():
            if vars(self)[name] is not None and vars(self)[name] < low:
                raise ConfigError(f"{name}={vars(self)[name]}: want at least {low}")
        for name in ("request_rate", "timeout"):
            if not vars(self)[name] > 0:
                raise ConfigError(f"{name}={vars(self)[name]}: want more than 0")
        if self.plot is not None and self.plot.suffix != ".svg":
            raise ConfigError(f"plot={str(self.plot)!r}: want a file that ends in .svg")
        check_output(self.output)
        check_output(self.plot)
        for name in ("input_len", "output_len", "turns"):
            self._span(name)
        self._extra_fields()

    def _extra_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.extra_body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ConfigError(f"extra_body={self.extra_body!r}: want a JSON object")
        ignore = {"ignore_eos": True} if self.ignore_eos else {}
        return {"temperature": self.temperature, **ignore, **fields}

    async def _measure(self) -> tuple[str, Run, object]:
        """Return the model's name, the run, and what the server says of itself."""
        from tqdm import tqdm

        from gapless.bench.serve_client import Client, Endpoint, first_model, server_info
        from gapless.bench.serve_load import Load, measure_words, run_load
        from gapless.bench.serve_workloads import Words, random_jobs

        key = self.api_key or os.environ.get("GAPLESS_API_KEY")
        model = self.model or await first_model(self.base_url, key)
        endpoint = Endpoint(
            self.base_url, self.endpoint, model, key, self.timeout, self._extra_fields()
        )
        words = Words() if self.workload == "jsonl" else await measure_words(endpoint)
        jobs = self._jobs(words)
        # the negative seed draws other texts than any run does, so that no cache is warmed
        warmup = random_jobs(
            self.warmup, input_len=self._span("input_len"), output_len=self._span("output_len"),
            words=words, seed=-1 - self.seed,
        )  # fmt: skip
        load = Load(self.request_rate, self.concurrency, self.seed)
        async with Client(endpoint) as client:
            await run_load(client, warmup, Load(), lambda _: None)
            total = sum(len(job.output_lens) for job in jobs)
            # on standard error, and only where that is a terminal
            with tqdm(total=total, unit="request", disable=None) as bar:
                found = await run_load(client, jobs, load, lambda _: bar.update())
        return model, found, await server_info(self.base_url, key)

    def _span(self, name: str) -> Span:
        from gapless.bench.serve_workloads import Span

        return Span.parse(name, vars(self)[name])

    def _jobs(self, words: Words) -> list[Job]:
        from gapless.bench.serve_workloads import (
            chat_jobs,
            random_jobs,
            read_jobs,
            shared_prefix_jobs,
        )

        if self.file is not None:
            output_len = self._span("output_len")
            return read_jobs(
                self.file, output_len=output_len, seed=self.seed, count=self.num_requests
            )
        count = self.num_requests or _NUM_REQUESTS
        lens = {"input_len": self._span("input_len"), "output_len": self._span("output_len")}
        match self.workload:
            case "shared-prefix":
                return shared_prefix_jobs(
                    count, num_groups=self.num_groups, prefix_len=self.prefix_len,
                    words=words, seed=self.seed, **lens,
                )  # fmt: skip
            case "chat-turn":
                return chat_jobs(
                    count, turns=self._span("turns"), words=words, seed=self.seed, **lens
                )
        return random_jobs(count, words=words, seed=self.seed, **lens)

    def _load_text(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} at any time"
        if math.isinf(self.request_rate):
            return "all at once"
        return f"{self.request_rate:g} per second"

    def _write(self, model: str, found: Run, summary: Summary, server: object) -> None:
        from gapless.bench.serve_plot import latency_svg
        from gapless.bench.serve_report import records_json

        if self.output is not None:
            hidden = ("api_key", "output", "plot", "log_level")
            settings = {k: _plain(v) for k, v in asdict(self).items() if k not in hidden}
            results = {
                "benchmark": {**settings, "model": model},
                "server": server,
                "summary": summary.to_json(),
                "requests": records_json(found.records),
            }
            write_json(self.output, results, None)
        if self.plot is not None:
            write_text(
                self.plot, latency_svg(found.records, f"{model}: {self._load_text()}"), "plot"
            )


def _plain(value: object) -> object:
    """Return a setting as JSON has it; there it has no infinity."""
    if isinstance(value, Path):
        return str(value)
    return None if value == math.inf else value
