"""Latent attention planned on the host and on the device: the whole engine, backend by backend.

    python -m benchmarks.gpu.host_planned [--model v2-lite-mtp] [--batches 1,8,32] [--output ...]

FlashInfer's MLA kernels are planned in three ways: `stock` calls the wrapper's own plan with device
tensors before each window, which reads them back; `host` makes the plan of arrays that the host
knows; `stream` does so on a stream of its own. `triton` plans on the device, so that a step is one
graph. Weights are made up, and acceptance is forced as in `benchmarks.gpu.engine`, whose figures
these are. Before an engine is measured its windows are compared with the definition in float32.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu.engine import FORCED_ACCEPTANCE, measure, print_figures
from benchmarks.gpu.harness import in_own_process, relative
from benchmarks.gpu.models import MODELS, write_checkpoint
from gapless import LLM
from gapless.attention.backend import make_backend
from gapless.attention.flashinfer import IS_CAUSAL, FlashInferAttention
from gapless.attention.reference import ReferenceAttention
from gapless.core.specs.attention import LatentSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gapless.attention.backend import AttentionBackend

KINDS = {
    "triton": {"attention_backend": "triton"},
    "stock": {"attention_backend": "flashinfer"},
    "host": {"attention_backend": "flashinfer"},
    "stream": {"attention_backend": "flashinfer", "plan_stream": True},
}
# relative error of bfloat16 windows against the definition
BOUND = 1e-2
SPEC = LatentSpec(
    num_heads=16, q_lora_rank=0, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128,
    scale=192**-0.5, rotary=None,
)  # fmt: skip
PAGE_SIZE, COLUMNS, MAX_ROWS = 16, 128, 32

_honest_plan = FlashInferAttention.plan_host


def stock_plan(
    self: FlashInferAttention, name: str, ends: np.ndarray, *, width: int, kv_len: int,
    first: int = 0,
) -> None:  # fmt: skip
    """Plan as FlashInfer's users do: by the wrapper, from device tensors."""
    window = self._windows.get((name, ends.size, width, first))
    if window is None:
        _honest_plan(self, name, ends, width=width, kv_len=kv_len, first=first)
        return
    row_len = self._row_len(kv_len, first)
    starts = torch.arange(0, (ends.size + 1) * row_len, row_len, dtype=torch.int32, device="cuda")
    lens = torch.from_numpy(ends - first).to("cuda", torch.int32)
    window.wrapper.plan(
        window.query_starts.to("cuda"), starts, self._indices_of(first)[: ends.size * row_len],
        lens, self._spec.num_heads, self._spec.kv_lora_rank, self._spec.rope_dim,
        1 if first else self._page_size, IS_CAUSAL, self._spec.scale, self._dtype, self._dtype,
    )  # fmt: skip


@contextmanager
def planned_by(kind: str) -> Iterator[None]:
    """Have FlashInfer planned as `kind` says."""
    plan = stock_plan if kind == "stock" else _honest_plan
    with mock.patch.object(FlashInferAttention, "plan_host", plan):
        yield


def check(kind: str, device: torch.device) -> dict[str, Any]:
    """Compare windows of many lengths, planned again and again, with the definition."""
    torch.manual_seed(0)
    backend: AttentionBackend = make_backend(
        str(KINDS[kind]["attention_backend"]), page_size=PAGE_SIZE, max_len=PAGE_SIZE * COLUMNS,
        max_rows=MAX_ROWS, device=str(device), layers=[SPEC], dtype="bfloat16",
    )  # fmt: skip
    reference = ReferenceAttention(
        page_size=PAGE_SIZE,
        max_len=PAGE_SIZE * COLUMNS,
        device=str(device),
        layers=[SPEC],
        dtype="float32",
    )
    table = torch.randperm(MAX_ROWS * COLUMNS, device=device).view(MAX_ROWS, COLUMNS)
    entries = torch.randn(MAX_ROWS * COLUMNS * PAGE_SIZE, 576, device=device, dtype=torch.bfloat16)
    worst, rng, kv_len = 0.0, np.random.default_rng(0), PAGE_SIZE * COLUMNS
    for rows, width, first in ((1, 4, 0), (8, 4, 0), (32, 4, 0), (8, 4, 1), (8, 1, 1), (32, 1, 1)):
        slots = torch.arange(rows, device=device)
        for turn in range(4):
            ends = rng.integers(width + first, (40, 300, 1200, kv_len)[turn], size=rows)
            q = torch.randn(rows * width, 16, 576, device=device, dtype=torch.bfloat16)
            after = torch.from_numpy(ends).to(device)
            positions = after[:, None] + torch.arange(-width, 0, device=device)
            if backend.needs_cpu_seq_lens:
                backend.plan_host("check", ends, width=width, kv_len=kv_len, first=first)
            found = backend.plan_window(
                slots, positions, table, kv_len=kv_len, first=first, host_plan="check"
            ).run_latent(q, entries, SPEC.scale, value_dim=512)
            wanted = reference.plan_window(
                slots, positions, table, kv_len=kv_len, first=first
            ).run_latent(q.float(), entries.float(), SPEC.scale, value_dim=512)
            worst = max(worst, relative(found, wanted))
    return {"error": worst, "bound": BOUND, "ok": worst <= BOUND}


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check and measure each kind."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        path = write_checkpoint(asked.model, Path(root))
        for kind in asked.kinds.split(","):
            found[kind] = in_own_process(run_kind, asked, path, kind)
    return found


def run_kind(asked: argparse.Namespace, path: Path, kind: str) -> dict[str, Any]:
    """Check and measure one kind."""
    with planned_by(kind):
        started = time.perf_counter()
        checked = check(kind, torch.device("cuda", torch.cuda.current_device()))
        print(f"{kind}: {checked}, {time.perf_counter() - started:.1f} s", flush=True)
        if not checked["ok"]:
            raise SystemExit(f"{kind} is wrong: no figures")
        return {"check": checked, **engine(asked, path, kind)}


def engine(asked: argparse.Namespace, path: Path, kind: str) -> dict[str, Any]:
    """Measure one engine."""
    output_lens = {int(batch): asked.output_len for batch in asked.batches.split(",")}
    started = time.perf_counter()
    llm = LLM(
        str(path), load_format="dummy", device="cuda", max_running_requests=max(output_lens),
        max_model_len=2000, seed=0, speculative_num_steps=3,
        speculative_simulate_acceptance=FORCED_ACCEPTANCE, **KINDS[kind],
    )  # fmt: skip
    print(f"{kind}: ready in {time.perf_counter() - started:.1f} s", flush=True)
    figures = measure(llm, asked.model, output_lens, MODELS[asked.model]["vocab_size"])
    for own in figures:
        print_figures(own)
    launches = asdict(llm.engine.launch_counters)
    llm.close()
    return {"figures": [asdict(row) for row in figures], "launches": launches}


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("v2-lite-mtp", "small-latent"), default="v2-lite-mtp")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    record = {
        "command": " ".join(["python -m benchmarks.gpu.host_planned", *sys.argv[1:]]),
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "flashinfer": importlib.metadata.version("flashinfer-python"),
        },
        "kinds": run(asked),
    }
    if asked.output is not None:
        asked.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
