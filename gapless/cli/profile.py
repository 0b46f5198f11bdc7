"""`gapless profile`: where the time of an engine's iterations goes, as table, JSON, trace, page."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path  # noqa: TC003 (annotations are read when parsing)
from typing import TYPE_CHECKING, Any

from gapless.cli.report import circumstances, table, to_json, write_text
from gapless.config.options import EngineOptions
from gapless.errors import ConfigError
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gapless.bench.profile import EngineProfile

# rows of the tables: label, key in the summary, digits
PART_ROWS = (
    ("blocking calls", "blocking", 2),
    ("copies to the host", "copy down", 2),
    ("copies to the device", "copy up", 2),
    ("graph launches", "graph", 2),
    ("kernel launches", "kernel", 2),
    ("host, ms", "host_ms", 3),
    ("device, ms", "device_ms", 3),
)
ITERATION_ROWS = (
    ("whole, ms", "ms", 3),
    ("schedule, ms", "schedule_ms", 3),
    ("launch, ms", "launch_ms", 3),
    ("  of that upload, ms", "upload_ms", 3),
    ("wait, ms", "wait_ms", 3),
    ("commit, ms", "commit_ms", 3),
)
PARTS = {"decode step": "decode", "prefill chunk": "prefill", "cache moves": "moves"}
ITERATIONS = {"decode alone": "without_prefill", "with prefill": "with_prefill"}
NUM_KERNELS = 12


@dataclass(frozen=True)
class Profile:
    """Record iterations of an engine under load, and say where their time goes.

    The requests arrive together, with random prompts and outputs of a fixed length; recorded are
    the first iterations, prefill included. docs/profile.md explains the figures.
    """

    num_prompts: int = 4
    """Requests that run at once."""
    input_len: int = 128
    """Tokens of each prompt."""
    output_len: int = 128
    """Most tokens generated for each."""
    steps: int = 32
    """Iterations to record."""
    output_dir: Path | None = None
    """Write profile.json, trace.json (for ui.perfetto.dev) and profile.html into this folder, made
    where it does not exist."""
    json: bool = False
    """Print one JSON object, that of profile.json."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        configure(self.log_level)
        self._check()
        from gapless.bench.profile import Load, profile
        from gapless.engine.llm import LLM

        llm = LLM(**asdict(self.engine))
        load = Load(self.num_prompts, self.input_len, self.output_len, self.steps)
        try:
            found = profile(llm, load)
        finally:
            llm.close()
        report = {**circumstances(llm.engine.config), **found.to_json()}
        if self.output_dir is not None:
            self._write(found, report)
        print(to_json(report) if self.json else render(report), end="")
        return 0

    def _check(self) -> None:
        for name in ("num_prompts", "input_len", "steps"):
            if vars(self)[name] < 1:
                raise ConfigError(f"{name}={vars(self)[name]}: want at least 1")
        if self.output_len < 2:
            raise ConfigError(
                f"output_len={self.output_len}: want at least 2, since the first token is prefill's"
            )
        if self.output_dir is not None:
            try:
                self.output_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"output_dir={str(self.output_dir)!r} cannot be made: {error}; name another"
                ) from error

    def _write(self, found: EngineProfile, report: Mapping[str, Any]) -> None:
        from gapless.bench.profile_page import page
        from gapless.bench.profile_trace import chrome_trace

        assert self.output_dir is not None
        for name, text in {
            "profile.json": to_json(report),
            "trace.json": chrome_trace(found.trace),
            "profile.html": page(
                found.trace,
                f"gapless profile: {heading(report)}",
                share_lines(report),
                tables(report),
            ),
        }.items():
            write_text(self.output_dir / name, text, "output_dir")


def render(report: Mapping[str, Any]) -> str:
    """Lay out a profile for people."""
    parts = [heading(report), *map(table, tables(report).values()), "\n".join(share_lines(report))]
    return "\n\n".join(parts) + "\n"


def heading(report: Mapping[str, Any]) -> str:
    """Say what was run, and where."""
    load = report["load"]
    return (
        f"{load['num_prompts']} prompts of {load['input_len']} tokens, "
        f"{len(report['iterations'])} iterations; {report['device']}, {report['dtype']}"
    )


def tables(report: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """All tables with something in them, by what they show."""
    found = {
        "parts of an iteration: means of counts, medians of times": part_cells(report),
        "iterations on the host: medians": iteration_cells(report),
        "host work between two graphs of a step": seam_cells(report),
        "calls by which the host waits for the device": blocking_cells(report),
        "what took the device longest": work_cells(report),
    }
    return {caption: cells for caption, cells in found.items() if len(cells) > 1}


def share_lines(report: Mapping[str, Any]) -> list[str]:
    """Run-ahead, and in what part of decoding the device had nothing to run."""
    summary = report["summary"]
    ahead, seam, gap = summary["run_ahead"], summary["seam_share"], summary["gap_share"]
    lines = ["run-ahead: no decode step was launched"]
    if ahead:
        lines = [
            f"run-ahead: {sum(ahead) / len(ahead):.2f} steps are unread when the next is launched "
            f"({min(ahead)} to {max(ahead)})"
        ]
    if seam is None:
        return [*lines, "seam share: unknown, since no decode step follows another"]
    if summary["queued_ms"] is not None:
        lines.append(f"graphs run {summary['queued_ms']:.3f} ms after their launch (median)")
    return [
        *lines,
        f"seam share: {seam:.2%} of decoding lies outside of graphs, {gap:.2%} idle inside them",
    ]


def part_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """What the parts of iterations ask of the device."""
    rows = [row for row in PART_ROWS if report["sees_kernels"] or row[1] != "kernel"]
    return _columns(report["summary"], PARTS, rows)


def iteration_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """Phases of iterations on the host."""
    return _columns(report["summary"], ITERATIONS, ITERATION_ROWS)


def _columns(
    summary: Mapping[str, Any], columns: Mapping[str, str], rows: Sequence[tuple[str, str, int]]
) -> list[list[str]]:
    """Figures of those columns that have some."""
    shown = {title: summary[key] for title, key in columns.items() if summary[key]["number"]}
    cells = [["", *shown], ["number", *(str(column["number"]) for column in shown.values())]]
    return cells + [
        [label, *(f"{column[key]:.{digits}f}" for column in shown.values())]
        for label, key, digits in rows
    ]


def seam_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """Seams by stage."""
    return [["seam before", "count", "median ms", "max ms"]] + [
        [s["stage"], str(s["count"]), f"{s['median_ms']:.3f}", f"{s['max_ms']:.3f}"]
        for s in report["seams"]
    ]


def blocking_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """Blocking calls by call site."""
    return [["blocking call", "decode", "prefill", "cache moves"]] + [
        [c["call"], str(c["decode"]), str(c["prefill"]), str(c["moves"])]
        for c in report["blocking"]
    ]


def work_cells(report: Mapping[str, Any]) -> list[list[str]]:
    """What took the device longest."""
    return [["on the device", "count", "ms"]] + [
        [w["name"][:72], str(w["count"]), f"{w['ms']:.3f}"]
        for w in report["device_work"][:NUM_KERNELS]
    ]
