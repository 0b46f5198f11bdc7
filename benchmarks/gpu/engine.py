"""The whole engine on a GPU: tokens per second, and where a step's time goes.

    python -m benchmarks.gpu.engine --model 35b-a3b [--batches 1,8,32] [--steps 0,3] [--tp 1,2]
        [--output ...]
    python -m benchmarks.gpu.engine --model 35b-a3b --prefill --batches 8 --steps 3 [--output ...]

Weights are made up, prompts random, requests greedy and of fixed length; with drafts, acceptance is
forced to 3.0 tokens per step, since made-up weights accept nothing. Tokens per second are those of
decode, from the last request's first token on; `--prefill` is described in `prefill.py`. The
breakdown is of a few steps under torch's profiler, whose own cost the seam share leaves out:
kernels' time over the time from the first to the last of them. With --tp it is rank 0's, and the
share of communication is the time of its kernels that send and await, waiting included, over a
step's time.

Host time is that of planning and launching a steady decode step: the median of some steps, and
their mean, which a single interruption may double. Waiting for results is no part of it. Once a
profiler has run in a process, the host takes longer for each launch, so each engine has a process
of its own, and all its batches are timed before the first of them is profiled.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.harness import in_own_process
from benchmarks.gpu.models import MODELS, write_checkpoint
from benchmarks.gpu.prefill import measure_prefill
from gapless import LLM, SamplingParams
from gapless.bench import idle
from gapless.bench.decode import time_requests
from gapless.core.heap import freeze_heap
from gapless.runner.syncs import count_calls

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gapless.engine.engine import Engine

PROMPT_LEN = 256
HOST_STEPS = 50
PROFILED_STEPS = 6
FORCED_ACCEPTANCE = 3.0

# kernels by the first pattern that their name begins with, then by what it holds
CLASSES = (
    ("communication", ("nccl", "_peer_sum", "_peer_gather")),
    ("moe", ("_route", "_gathered", "_grouped", "_sort", "_combine")),
    (
        "linear state",
        (
            "_resident",
            "_token",
            "_channel",
            "_window_scores",
            "_window_stream",
            "_fold",
            "_delta_gates",
            "_discretise",
            "_skip_gate",
            "_normalize",
            "_scan",
            "chunk_",
        ),
    ),
    ("attention", ("_window_kernel", "_window_combine", "_prefill", "_qk_norm_rope")),
    (
        "sampling",
        (
            "_maximum",
            "_survey",
            "_collect",
            "_choose",
            "_noise",
            "_settle",
            "_shard_best",
            "_best_of_all",
        ),
    ),
    ("projections", ("nvjet", "gemv", "gemm", "cutlass", "sm90_xmma", "sm80_xmma", "_skinny")),
    ("norm and conv", ("_rms_norm", "_gated_rms_norm", "_convolve", "_keep_rows")),
)


@dataclass
class Figures:
    """One engine at one batch size."""

    model: str
    tp: int
    num_drafts: int
    ssm_dtype: str
    batch: int
    tokens_per_second: float
    ms_per_step: float
    tokens_per_step: float
    first_token_ms: float
    host_us_per_step: float
    """Median of `HOST_STEPS` steps."""
    host_us_mean: float
    host_us_tenth: float
    """What nine tenths of them exceed: on a busy machine half of all can take twice as long."""
    graph_launches: float
    kernel_launches: float
    blocking_calls: float
    seam_share: float
    """Of a step's time, what lies between its last kernel and the next step's first."""
    gap_share: float
    """Of a step's time, what lies between its own kernels."""
    ms_by_class: dict[str, float]
    communication_share: float
    """Of a step's time, what ranks send each other and wait for."""


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure(llm: LLM, model: str, output_lens: Mapping[int, int], vocab_size: int) -> list[Figures]:
    """Time batches, and only then look into a few steps of each.

    Args: output_lens: tokens that each request is to generate, by the size of its batch.
    """
    asked = {batch: prompts(batch, PROMPT_LEN, vocab_size) for batch in output_lens}
    timed = {batch: time_batch(llm, own, output_lens[batch]) for batch, own in asked.items()}
    config = llm.engine.config
    figures = []
    for batch, own in asked.items():
        found = timed[batch] | look_into(llm, own)
        figures.append(
            Figures(
                model=model,
                tp=config.tp,
                num_drafts=config.max_window - 1,
                ssm_dtype=config.ssm_dtype,
                batch=batch,
                communication_share=(
                    found["ms_by_class"].get("communication", 0.0) / found["ms_per_step"]
                ),
                **found,
            )
        )
    return figures


def time_batch(llm: LLM, asked: list[list[int]], output_len: int) -> dict[str, float]:
    """Serve requests, and time them; then the host, over steady decode steps."""
    time_requests(llm, asked, 16)
    timing = time_requests(llm, asked, output_len)
    steps = timing.counters.num_steps / len(asked)
    with decoding(llm.engine, asked):
        host = time_host(llm.engine)
    return {
        "tokens_per_second": timing.decode_tokens / timing.decode_seconds,
        "ms_per_step": timing.decode_seconds / steps * 1e3,
        "tokens_per_step": timing.counters.accepted_len,
        "first_token_ms": timing.first_token_seconds * 1e3,
        **host,
    }


def time_host(engine: Engine) -> dict[str, float]:
    """Time the host's part of each of some steps."""
    loop = engine.loop_counters
    found = []
    for _ in range(HOST_STEPS):
        before = loop.plan_seconds
        engine.step()
        found.append((loop.plan_seconds - before) * 1e6)
    return {
        "host_us_per_step": median(found),
        "host_us_mean": fmean(found),
        "host_us_tenth": quantiles(found, n=10)[0],
    }


@contextmanager
def decoding(engine: Engine, asked: list[list[int]]) -> Iterator[None]:
    """Have requests decode, with no end of theirs in sight."""
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    for index, ids in enumerate(asked):
        engine.submit(f"steady-{index}", ids, params)
    warm = 0
    while warm < 8 or engine.scheduler.num_waiting:
        engine.step()
        warm += 1
    yield
    for index in range(len(asked)):
        engine.abort(f"steady-{index}")
    while engine.has_work:
        engine.step()


def look_into(llm: LLM, asked: list[list[int]]) -> dict[str, Any]:
    """Count and profile steady decode steps."""
    with decoding(llm.engine, asked):
        with count_calls() as nothing:
            torch.cuda.synchronize()
        with count_calls() as counts:
            for _ in range(PROFILED_STEPS):
                llm.engine.step()
            torch.cuda.synchronize()
    # what a profile of nothing holds is the profiler's own, and ours
    blocking = counts.blocking - nothing.blocking
    if blocking:
        print(f"blocking calls: {dict(blocking)}")
    by_class: Counter[str] = Counter()
    for name, start, end in counts.kernels:
        if not name.startswith("Memcpy"):
            by_class[kernel_class(name)] += (end - start) / 1e3 / PROFILED_STEPS
    return {
        "graph_launches": counts.graph_launches / PROFILED_STEPS,
        "kernel_launches": counts.kernel_launches / PROFILED_STEPS,
        "blocking_calls": sum(blocking.values()) / PROFILED_STEPS,
        **idle_shares(counts.kernels),
        "ms_by_class": {name: round(ms, 4) for name, ms in by_class.most_common()},
    }


def idle_shares(kernels: list[tuple[str, float, float]]) -> dict[str, float]:
    """Divide the time that no kernel ran: within steps, and between them.

    A step begins where its inputs come up.
    """
    steps: list[list[tuple[float, float]]] = []
    for name, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        if "HtoD" in name:
            steps.append([])
        elif steps and not name.startswith("Memcpy"):
            steps[-1].append((start, end))
    shares = idle.idle_shares([[step for step in steps if step]])
    if shares is None:
        return {"seam_share": 0.0, "gap_share": 0.0}
    return {"seam_share": shares.seam, "gap_share": shares.gap}


def kernel_class(name: str) -> str:
    """Class of a kernel by its name."""
    for found, patterns in CLASSES:
        if name.startswith(patterns) or (found == "projections" and _holds(name, patterns)):
            return found
    return "small kernels"


def _holds(name: str, patterns: tuple[str, ...]) -> bool:
    return any(pattern in name for pattern in patterns)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in all that is asked for."""
    found: dict[str, Any] = {"figures": [], "prefill": {}, "ready_seconds": []}
    with tempfile.TemporaryDirectory() as root:
        path = write_checkpoint(asked.model, Path(root))
        for tp, ssm_dtype in product(map(int, asked.tp.split(",")), asked.ssm_dtypes.split(",")):
            for num_drafts in map(int, asked.steps.split(",")):
                own = in_own_process(run_engine, asked, path, tp, ssm_dtype, num_drafts)
                found["ready_seconds"].append(own["ready_seconds"])
                found["figures"] += own["figures"]
                found["prefill"] |= own["prefill"]
    return found


def run_engine(
    asked: argparse.Namespace, path: Path, tp: int, ssm_dtype: str, num_drafts: int
) -> dict[str, Any]:
    """Measure one engine."""
    batches = [int(batch) for batch in asked.batches.split(",")]
    options: dict[str, Any] = {"speculative_num_steps": num_drafts}
    if num_drafts:
        options["speculative_simulate_acceptance"] = FORCED_ACCEPTANCE
        options["draft_head_dtype"] = asked.draft_head_dtype
    started = time.perf_counter()
    llm = LLM(
        str(path), load_format="dummy", device="cuda", tp=tp, ssm_dtype=ssm_dtype,
        max_running_requests=max(batches), max_model_len=asked.max_model_len, seed=0, **options,
    )  # fmt: skip
    ready = time.perf_counter() - started
    # as the process that serves does
    freeze_heap()
    print(f"{asked.model} tp={tp} k={num_drafts} {ssm_dtype}: ready in {ready:.1f} s", flush=True)
    vocab_size = MODELS[asked.model]["vocab_size"]
    figures: list[Figures] = []
    prefill: dict[str, Any] = {}
    if asked.prefill:
        prefill[f"k={num_drafts} {ssm_dtype}"] = measure_prefill(llm, vocab_size)
    else:
        output_lens = {batch: 768 if batch == 1 else 256 for batch in batches}
        figures = measure(llm, asked.model, output_lens, vocab_size)
    for own in figures:
        print_figures(own)
    llm.close()
    return {
        "figures": [asdict(own) for own in figures],
        "prefill": prefill,
        "ready_seconds": {"tp": tp, "num_drafts": num_drafts, "seconds": ready},
    }


def print_figures(found: Figures) -> None:
    """Print one row and its breakdown."""
    print(
        f"B={found.batch:4d} {found.tokens_per_second:8.1f} tok/s {found.ms_per_step:7.3f} ms/step "
        f"x{found.tokens_per_step:.2f} TTFT {found.first_token_ms:.0f} ms, host "
        f"{found.host_us_per_step:.0f} us (mean {found.host_us_mean:.0f}, tenth "
        f"{found.host_us_tenth:.0f}), graphs "
        f"{found.graph_launches:.1f}, launches {found.kernel_launches:.1f}, blocking "
        f"{found.blocking_calls:.1f}, seams {found.seam_share:.1%}, gaps {found.gap_share:.1%}, "
        f"communication {found.communication_share:.1%}"
    )
    print("       " + ", ".join(f"{k} {v:.3f}" for k, v in found.ms_by_class.items()), flush=True)


def make_parser() -> argparse.ArgumentParser:
    """Command line of `run`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="35b-a3b")
    parser.add_argument("--batches", default="1,8,32,64,128")
    parser.add_argument("--steps", default="0,3", help="tokens drafted per step")
    parser.add_argument("--draft-head-dtype", default="auto", help="head that drafts are read from")
    parser.add_argument("--tp", default="1", help="GPUs that the model is split over")
    parser.add_argument("--ssm-dtypes", default="float32")
    parser.add_argument("--max-model-len", type=int, default=8448)
    parser.add_argument("--prefill", action="store_true", help="measure prefill, and nothing else")
    parser.add_argument("--output", type=Path)
    return parser


def main() -> None:
    """Run what is asked for."""
    asked = make_parser().parse_args()
    record = {
        "command": " ".join(["python -m benchmarks.gpu.engine", *sys.argv[1:]]),
        "date": str(date.today()),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        **run(asked),
    }
    if asked.output is not None:
        asked.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
