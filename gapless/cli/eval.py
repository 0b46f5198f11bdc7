"""`gapless eval`: accuracy on word problems and perplexity on texts, alone or against a peer."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 (annotations are read when parsing)
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gapless.assets import heldout
from gapless.cli.report import check_output, table, write_json
from gapless.config.options import EngineOptions
from gapless.errors import InvalidRequest
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.engine.llm import LLM
    from gapless.eval.accuracy import Accuracy
    from gapless.eval.against import Parting
    from gapless.eval.data import DocumentSet, ProblemSet
    from gapless.eval.perplexity import Perplexity
    from gapless.eval.transformers_peer import TransformersPeer

T = TypeVar("T")


@dataclass(frozen=True)
class Eval:
    """Measure accuracy on word problems and perplexity on texts, by default the bundled ones."""

    file: tuple[Path, ...] = ()
    """JSON lines of problems (`question`, and `answer` ending in `#### N` or `n`) or of documents
    (`text`); the keys decide which it is. Default: the bundled held-out sets."""
    against: Literal["transformers"] | None = None
    """Run the same with this implementation and compare, token by token."""
    limit: int | None = None
    """Use only this many lines of each file."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    max_text_tokens: int = 1024
    """Tokens used of each document, from its start."""
    output: Path | None = None
    """Write everything, tokens of each answer included, to this JSON file."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.engine.llm import LLM
        from gapless.eval.data import ProblemSet, read_set
        from gapless.eval.transformers_peer import check_peer, make_peer

        configure(self.log_level)
        check_output(self.output)
        files = self.file or (heldout("level1"), heldout("level2"), heldout("text"))
        sets = [read_set(file, limit=self.limit) for file in files]
        if self.max_text_tokens < 2:
            raise InvalidRequest(
                f"max_text_tokens={self.max_text_tokens}: want at least 2, to predict the second"
            )
        if self.against is not None:
            check_peer()
        llm = LLM(**asdict(self.engine))
        peer = make_peer(self.engine, llm) if self.against is not None else None
        results: list[AccuracyResult | PerplexityResult] = [
            self._solve(llm, peer, item)
            if isinstance(item, ProblemSet)
            else self._score(llm, peer, item)
            for item in sets
        ]
        self._print(results)
        if self.output is not None:
            sets_json = [
                {"file": str(file) if self.file else f"bundled {file.stem}", **result.to_json()}
                for file, result in zip(files, results, strict=True)
            ]
            write_json(self.output, {"sets": sets_json}, llm.engine.config)
        return 0

    def _solve(
        self, llm: LLM, peer: TransformersPeer | None, problems: ProblemSet
    ) -> AccuracyResult:
        from gapless.eval.accuracy import measure_accuracy
        from gapless.eval.against import partings, peer_accuracy

        own, seconds = _timed(
            lambda: measure_accuracy(
                llm, problems, max_tokens=self.max_tokens, shows_progress=sys.stderr.isatty()
            )
        )
        if peer is None:
            return AccuracyResult(own, seconds)
        other, peer_seconds = _timed(
            lambda: peer_accuracy(llm, peer, problems, own, max_tokens=self.max_tokens)
        )
        return AccuracyResult(own, seconds, other, peer_seconds, partings(peer, own, other))

    def _score(
        self, llm: LLM, peer: TransformersPeer | None, documents: DocumentSet
    ) -> PerplexityResult:
        from gapless.eval.perplexity import encode_documents, measure_perplexity, perplexity_of

        encoded = encode_documents(llm, documents, max_tokens=self.max_text_tokens)
        own, seconds = _timed(lambda: measure_perplexity(llm, documents, encoded))
        if peer is None:
            return PerplexityResult(own, seconds)
        scores, peer_seconds = _timed(lambda: peer.score(encoded))
        return PerplexityResult(own, seconds, perplexity_of(documents, scores), peer_seconds)

    def _print(self, results: list[AccuracyResult | PerplexityResult]) -> None:
        columns = 1 if self.against is None else 2
        heads = ("gapless", str(self.against))[:columns]
        rows = [("set", "measure", *heads)]
        rows += [(*labels, *cells[:columns]) for r in results for *labels, cells in r.rows()]
        # two columns of words, then numbers: a table lays out only the first to the left
        width = max(len(row[0]) for row in rows)
        print(table([(f"{row[0].ljust(width)}  {row[1]}", *row[2:]) for row in rows]))
        for result in results:
            for line in result.notes(str(self.against)):
                print(line)


@dataclass(frozen=True)
class AccuracyResult:
    """One set of problems, solved once or twice."""

    own: Accuracy
    seconds: float
    other: Accuracy | None = None
    other_seconds: float | None = None
    partings: tuple[Parting, ...] = ()

    def rows(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Set, measure and a cell per side."""
        sides = [self.own] if self.other is None else [self.own, self.other]
        count = len(self.own.attempts)
        return [
            (self.own.name, f"right, of {count}", tuple(str(side.num_right) for side in sides)),
            (self.own.name, "accuracy", tuple(f"{side.accuracy:.4f}" for side in sides)),
            (self.own.name, "seconds", _seconds(self.seconds, self.other_seconds)),
        ]

    def notes(self, against: str) -> list[str]:
        """Lines below the table."""
        if self.other is None:
            return []
        count = len(self.own.attempts)
        lines = [f"{self.own.name}: {len(self.partings)} of {count} transcripts differ"]
        return lines + [
            f"  problem {p.problem} from token {p.position} on: gapless {p.token_id}, {against} "
            f"{p.peer_token_id}, whose two largest logits are {p.margin:.1e} apart"
            for p in self.partings
        ]

    def to_json(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        result: dict[str, Any] = {
            "name": self.own.name,
            "task": "accuracy",
            "gapless": _accuracy_json(self.own, self.seconds),
        }
        if self.other is not None:
            result["transformers"] = _accuracy_json(self.other, self.other_seconds)
            result["partings"] = [asdict(parting) for parting in self.partings]
        return result


@dataclass(frozen=True)
class PerplexityResult:
    """One set of documents, scored once or twice."""

    own: Perplexity
    seconds: float
    other: Perplexity | None = None
    other_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        """Perplexity over the other's."""
        return None if self.other is None else self.own.perplexity / self.other.perplexity

    def rows(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Set, measure and a cell per side."""
        sides = [self.own] if self.other is None else [self.own, self.other]
        name = self.own.name
        return [
            (name, "tokens predicted", tuple(str(side.num_tokens) for side in sides)),
            (name, "nats per token", tuple(f"{side.nats_per_token:.5f}" for side in sides)),
            (name, "perplexity", tuple(f"{side.perplexity:.4f}" for side in sides)),
            (name, "seconds", _seconds(self.seconds, self.other_seconds)),
        ]

    def notes(self, against: str) -> list[str]:
        """Lines below the table."""
        if self.ratio is None:
            return []
        return [f"{self.own.name}: perplexity is {self.ratio:.7f} of that by {against}"]

    def to_json(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        result: dict[str, Any] = {
            "name": self.own.name,
            "task": "perplexity",
            "gapless": _perplexity_json(self.own, self.seconds),
        }
        if self.other is not None:
            result["transformers"] = _perplexity_json(self.other, self.other_seconds)
            result["perplexity_ratio"] = self.ratio
        return result


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def _seconds(*values: float | None) -> tuple[str, ...]:
    return tuple(f"{value:.1f}" for value in values if value is not None)


def _accuracy_json(result: Accuracy, seconds: float | None) -> dict[str, Any]:
    return {
        "num_right": result.num_right,
        "num_problems": len(result.attempts),
        "accuracy": result.accuracy,
        "seconds": seconds,
        "attempts": [{**asdict(a), "is_right": a.is_right} for a in result.attempts],
    }


def _perplexity_json(result: Perplexity, seconds: float | None) -> dict[str, Any]:
    return {
        "num_tokens": result.num_tokens,
        "nats_per_token": result.nats_per_token,
        "perplexity": result.perplexity,
        "seconds": seconds,
        "documents": [asdict(score) for score in result.scores],
    }
