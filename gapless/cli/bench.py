"""`gapless bench`: decoding measured round by round and compared within rounds; a server's load."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 (annotations are read when parsing)
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gapless.cli.bench_serve import BenchServe  # noqa: TC001 (annotations are read when parsing)
from gapless.cli.report import check_output, table, write_json
from gapless.config.options import EngineOptions
from gapless.errors import ConfigError
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.bench.decode import Side
    from gapless.bench.rounds import Measurement, Spread
    from gapless.engine.llm import LLM


@dataclass(frozen=True)
class BenchDecode:
    """Measure decoding through the serving path: one request alone, then many at once.

    Outputs have a fixed length. Prompts are held-out questions, the same for all that is compared
    in a round, others in every round.
    """

    num_prompts: int = 16
    """Requests that run at once."""
    output_len: int = 64
    """Tokens generated for each."""
    rounds: int = 5
    """Measured rounds."""
    warmup: int = 1
    """Rounds before those, not counted."""
    against: Literal["transformers"] | None = None
    """Compare with this implementation, by whole calls, prefill included on both sides."""
    ab: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Compare the options as given (A) with these changes to them (B): `option=value`."""
    raw: bool = False
    """Run the questions as they are, without the chat template."""
    output: Path | None = None
    """Write every round's raw figures, and how they were made, to this JSON file."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.bench.prompts import prompt_sets
        from gapless.bench.rounds import run_rounds

        configure(self.log_level)
        self._check()
        served = self._load()
        sides = self._sides(served)
        prompts = prompt_sets(num_sets=self.warmup + self.rounds, num_prompts=self.num_prompts)
        found = run_rounds(sides, prompts, num_warmup=self.warmup, report=self._report)
        figures, ratios = self._figures(found, list(served)), self._ratios(found)
        config = next(iter(served.values())).engine.config
        print(
            f"{self.num_prompts} prompts, {self.output_len} tokens of output each, {self.rounds} "
            f"rounds after {self.warmup} of warm-up; {config.device}, {config.dtype}, "
            f"{config.num_threads} threads"
        )
        if self.ab:
            print(f"A: the options as given; B: with {', '.join(self.ab)}")
        print(table(_cells(figures)))
        if ratios:
            print(table(_cells(ratios, shows_rounds=True)))
        if self.output is not None:
            results = {
                "benchmark": _settings_json(self),
                "configs": {name: asdict(llm.engine.config) for name, llm in served.items()},
                "summary": [_summary_json(label, values) for label, values in figures + ratios],
                "rounds": [measurement.to_json() for measurement in found],
            }
            write_json(self.output, results, config)
        return 0

    def _check(self) -> None:
        least = {"num_prompts": 1, "output_len": 2, "rounds": 1, "warmup": 0}
        for name, low in least.items():
            if vars(self)[name] < low:
                raise ConfigError(f"{name}={vars(self)[name]}: want at least {low}")
        check_output(self.output)

    def _load(self) -> dict[str, LLM]:
        """Engines by the name of their side."""
        from gapless.bench.settings import changed_options
        from gapless.engine.llm import LLM
        from gapless.eval.transformers_peer import check_peer

        if self.against is not None:
            check_peer()
        options = {"A" if self.ab else "gapless": self.engine}
        if self.ab:
            options["B"] = changed_options(self.engine, self.ab)
        return {name: LLM(**asdict(own)) for name, own in options.items()}

    def _sides(self, served: dict[str, LLM]) -> list[Side]:
        from gapless.bench.decode import PeerSide, ServedSide
        from gapless.eval.transformers_peer import make_peer

        sides: list[Side] = [
            ServedSide(name, llm, self.output_len, is_raw=self.raw) for name, llm in served.items()
        ]
        if self.against is not None:
            first = next(iter(served.values()))
            peer = make_peer(self.engine, first, ignores_eos=True)
            sides.append(PeerSide(self.against, peer, first, self.output_len, is_raw=self.raw))
        return sides

    def _report(self, number: int) -> None:
        if sys.stderr.isatty():
            what = f"round {number} of {self.rounds}" if number >= 1 else "warm-up"
            print(what, file=sys.stderr)

    def _figures(
        self, found: Sequence[Measurement], served: Sequence[str]
    ) -> list[tuple[str, Spread]]:
        from gapless.bench.rounds import PEER_METRICS, SERVED_METRICS, spread

        metrics = dict.fromkeys(served, SERVED_METRICS)
        if self.against is not None:
            metrics[self.against] = dict(PEER_METRICS)
        return [
            (f"{side} {mode}: {metric.label}", spread(found, side, mode, metric))
            for side, modes in metrics.items()
            for mode, own in modes.items()
            for metric in own
        ]

    def _ratios(self, found: Sequence[Measurement]) -> list[tuple[str, Spread]]:
        from gapless.bench.rounds import SERVED_METRICS, TOTAL_RATE, ratio, spread

        rows = []
        if self.ab:
            rows += [
                (
                    f"B / A {mode}: {metric.label}",
                    ratio(spread(found, "B", mode, metric), spread(found, "A", mode, metric)),
                )
                for mode, own in SERVED_METRICS.items()
                for metric in own
            ]
        if self.against is not None:
            side = "A" if self.ab else "gapless"
            for mode, other in (
                ("single", "single"),
                ("concurrent", "sequential"),
                ("concurrent", "batch"),
            ):
                above = spread(found, side, mode, TOTAL_RATE)
                below = spread(found, self.against, other, TOTAL_RATE)
                label = f"{side} {mode} / {self.against} {other}: {TOTAL_RATE.label}"
                rows.append((label, ratio(above, below)))
        return rows


@dataclass(frozen=True)
class Bench:
    """Measure speed."""

    command: (
        Annotated[BenchDecode, tyro.conf.subcommand("decode")]
        | Annotated[BenchServe, tyro.conf.subcommand("serve")]
    )

    def run(self) -> int:
        """Run the command."""
        return self.command.run()


def _cells(rows: Sequence[tuple[str, Spread]], *, shows_rounds: bool = False) -> list[list[str]]:
    numbers = range(1, 1 + len(rows[0][1].values)) if shows_rounds else ()
    cells = [["", "median", "min", "max", *(f"round {number}" for number in numbers)]]
    for label, values in rows:
        rounds = values.values if shows_rounds else ()
        figures = (values.median, values.minimum, values.maximum, *rounds)
        cells.append([label, *(f"{figure:.3f}" for figure in figures)])
    return cells


def _summary_json(label: str, values: Spread) -> dict[str, Any]:
    return {
        "figure": label,
        "median": values.median,
        "min": values.minimum,
        "max": values.maximum,
        "rounds": list(values.values),
    }


def _settings_json(command: BenchDecode) -> dict[str, Any]:
    """What was measured; options of the engine and where to write are kept elsewhere."""
    return {k: v for k, v in asdict(command).items() if k not in ("engine", "output")}
