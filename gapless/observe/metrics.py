"""Prometheus metrics of a server; names and units follow vLLM's where it has the same thing.

What the server sees of requests is observed as it happens; what the engine counts is read when
somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "gapless:"
# seconds
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
         40, 80, 160, 640)  # fmt: skip
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5,
        5, 10)  # fmt: skip
_E2E = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
        1920, 3600)  # fmt: skip
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))


@dataclass(frozen=True)
class Sample:
    """One number that the engine counts."""

    name: str
    """Without prefix, and for a counter without `_total`."""
    meaning: str
    value: float
    kind: Literal["counter", "gauge"] = "counter"
    labels: Mapping[str, str] = field(default_factory=dict)


class Metrics:
    """All metrics of one server."""

    def __init__(self, model_name: str, read_engine: Callable[[], Iterable[Sample]]) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._read_engine = read_engine
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds",
            "Between two tokens; those that come together share the time since the last.",
            _ITL,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token.", _E2E
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Between arrival in the engine and first run.", _E2E
        )
        self._prompt_len = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_len = self._histogram(
            "request_generation_tokens", "Tokens of a continuation.", _TOKENS
        )
        self._lag = self._histogram(
            "event_loop_lag_seconds", "By how much the server's event loop is late.", _LAG
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts accepted.")
        self._tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = Counter(
            f"{_PREFIX}request_success", "Continuations that ended, by reason.",
            ["model_name", "finished_reason"], registry=self._registry,
        )  # fmt: skip
        self._cut = Counter(
            f"{_PREFIX}request_cut", "Requests whose work was ended before its time, by reason.",
            ["model_name", "reason"], registry=self._registry,
        )  # fmt: skip
        self._responses = Counter(
            f"{_PREFIX}http_responses", "Answers, by path and status.",
            ["model_name", "path", "status"], registry=self._registry,
        )  # fmt: skip
        self._tasks = Gauge(
            f"{_PREFIX}event_loop_tasks", "Tasks of the server's event loop.", ["model_name"],
            registry=self._registry,
        ).labels(**self._labels)  # fmt: skip
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def accepted(self, prompt_tokens: int) -> None:
        """Count a prompt."""
        self._prompt_len.observe(prompt_tokens)
        self._prompt_tokens.inc(prompt_tokens)

    def first_token(self, seconds: float, num_tokens: int) -> None:
        """Count a continuation's first tokens, `seconds` after the request's arrival."""
        self._ttft.observe(seconds)
        self._tokens.inc(num_tokens)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        """Count tokens that came together, `seconds` after those before them."""
        for _ in range(num_tokens):
            self._itl.observe(seconds / num_tokens)
        self._tokens.inc(num_tokens)

    def finished(self, reason: str, seconds: float, queue_seconds: float, num_tokens: int) -> None:
        """Count a continuation that has ended, `seconds` after the request's arrival."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()
        self._e2e.observe(seconds)
        self._queue.observe(queue_seconds)
        self._output_len.observe(num_tokens)

    def cut(self, reason: str) -> None:
        """Count a request whose work was ended before its time."""
        self._cut.labels(**self._labels, reason=reason).inc()

    def responded(self, path: str, status: int) -> None:
        """Count an answer; `path` is one of the server's own."""
        self._responses.labels(**self._labels, path=path, status=str(status)).inc()

    def lagged(self, seconds: float) -> None:
        """Note by how much the event loop was late."""
        self._lag.observe(seconds)

    def render(self, num_tasks: int) -> bytes:
        """Return everything as text in Prometheus' format."""
        self._tasks.set(num_tasks)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield what the engine counts; called by the registry."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._read_engine():
            labels = self._labels | dict(sample.labels)
            name = f"{_PREFIX}{sample.name}"
            if name not in families:
                make = CounterMetricFamily if sample.kind == "counter" else GaugeMetricFamily
                families[name] = make(name, sample.meaning, labels=list(labels))
            families[name].add_metric(list(labels.values()), sample.value)
        yield from families.values()

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"{_PREFIX}{name}", meaning, ["model_name"], buckets=buckets, registry=self._registry
        ).labels(**self._labels)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"{_PREFIX}{name}", meaning, ["model_name"], registry=self._registry).labels(
            **self._labels
        )
