"""All GPU figures in one run: right first, then how fast.

    python -m benchmarks.gpu.run --kernels [--only attention,small_ops] [--output figures.json]
    python -m benchmarks.gpu.run --engine [--tp 2] [--output figures.json]

Each module compares its kernels with their definitions and then times them. A module whose checks
fail prints no figure, and the run fails. The engine is measured with one request and with 64, with
drafts and without; with --tp on one GPU and on several, and several also serve a model that one
cannot hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable

MODULES = (
    "linear_replay", "linear_chunk", "attention", "mla", "draft_tree", "projections", "small_ops",
    "sampling", "experts",
)  # fmt: skip
CEILING_BYTES = 4 << 30
REPLAYS = 9


@dataclass
class Report:
    """What was checked and measured, by module."""

    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    figures: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, name: str, device: torch.device) -> None:
        """Check a module's kernels, and time them if they are right."""
        started = time.perf_counter()
        try:
            module = importlib.import_module(f"benchmarks.gpu.{name}")
            self.checks[name] = module.check(device)
            wrong = [result for result in self.checks[name] if not result["ok"]]
            for result in wrong:
                print(f"WRONG {name}: {result}")
            if wrong:
                self.failed.append(name)
                return
            print(f"{name}: {len(self.checks[name])} checks hold", flush=True)
            self.figures[name] = module.measure(device)
            print_table(self.figures[name])
        except Exception:
            traceback.print_exc()
            self.failed.append(name)
        finally:
            print(f"{name} took {time.perf_counter() - started:.0f} s", flush=True)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print rows of figures; those with the same keys share a head."""
    head: list[str] = []
    for row in rows:
        if list(row) != head:
            head = list(row)
            print(" | ".join(head))
        print(" | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))


def bandwidths(device: torch.device) -> dict[str, float]:
    """Measure TB/s of a copy, an update in place, a sum and a fill of 4 GiB."""
    x = torch.randn(CEILING_BYTES // 4, device=device)
    y = torch.empty_like(x)
    cases: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: y.copy_(x), 2),
        "update": (lambda: x.mul_(1.0001), 2),
        "sum": (x.sum, 1),
        "fill": (lambda: y.fill_(1.0), 1),
    }
    return {
        name: CEILING_BYTES * passes / _seconds(run) / 1e12 for name, (run, passes) in cases.items()
    }


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def run_engine(tp: int) -> dict[str, Any]:
    """Measure the engine on one GPU, and on `tp` beside what their sums cost."""
    from benchmarks.gpu import communication, engine

    def decode(*args: str) -> dict[str, Any]:
        # no longer than what is asked for, so that fewer steps are captured
        return engine.run(engine.make_parser().parse_args(["--max-model-len", "1500", *args]))

    found: dict[str, Any] = {}
    if tp > 1:
        found["communication"] = communication.measure(tp)
        print_table(found["communication"])
    sizes = "1" if tp == 1 else f"1,{tp}"
    found["engine"] = decode("--tp", sizes, "--batches", "1,64", "--steps", "3,0")
    if tp > 1:
        found["speedup"] = speedups(found["engine"]["figures"])
        print_table(found["speedup"])
        found["large"] = decode(
            "--model", "80b-a3b", "--tp", str(tp), "--batches", "1", "--steps", "3"
        )
    return found


def speedups(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second on several GPUs over those on one, by drafts and batch."""
    one = {(row["num_drafts"], row["batch"]): row for row in figures if row["tp"] == 1}
    return [
        {
            "tp": row["tp"],
            "num_drafts": row["num_drafts"],
            "batch": row["batch"],
            "speedup": row["tokens_per_second"]
            / one[row["num_drafts"], row["batch"]]["tokens_per_second"],
            "communication_share": row["communication_share"],
        }
        for row in figures
        if row["tp"] > 1
    ]


def main() -> int:
    """Run what is asked for, print it, and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--tp", type=int, default=1, help="GPUs, with --engine")
    parser.add_argument("--only", default=",".join(MODULES))
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if not (asked.kernels or asked.engine):
        parser.error("nothing to run; want --kernels or --engine")
    if asked.tp != 1 and not asked.engine:
        parser.error("--tp is of --engine; leave it out")
    device = torch.device("cuda")
    report, ceilings = Report(), bandwidths(device)
    print("TB/s: " + ", ".join(f"{name} {value:.2f}" for name, value in ceilings.items()))
    if asked.kernels:
        for name in asked.only.split(","):
            report.run(name, device)
    engine = run_engine(asked.tp) if asked.engine else None
    if asked.output is not None:
        record = {
            "command": " ".join(["python -m benchmarks.gpu.run", *sys.argv[1:]]),
            "date": str(date.today()),
            "gpu": torch.cuda.get_device_name(device),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "bandwidth_TB_s": ceilings,
            "checks": report.checks,
            "figures": report.figures,
            "engine": engine,
        }
        asked.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"failed: {', '.join(report.failed)}" if report.failed else "all checks hold")
    return 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
