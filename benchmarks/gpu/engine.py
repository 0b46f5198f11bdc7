"""The whole engine on a GPU: tokens per second, and where a step's time goes.

    python -m benchmarks.gpu.engine --model 35b-a3b [--batches 1,8,32] [--steps 0,3] [--output ...]

Weights are made up, prompts random, requests greedy and of fixed length; with drafts, acceptance is
forced to 3.0 tokens per step, since made-up weights accept nothing. Tokens per second are those of
decode, from the last request's first token on. The breakdown is of a few steps under torch's
profiler, whose own cost the seam share leaves out: kernels' time over the time from the first to
the last of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import MODELS, write_checkpoint
from gapless import LLM, SamplingParams
from gapless.bench.decode import time_requests
from gapless.runner.syncs import count_calls

PROMPT_LEN = 256
PROFILED_STEPS = 6
FORCED_ACCEPTANCE = 3.0

# kernels by the first pattern that their name holds
CLASSES = (
    ("moe", ("moe", "expert", "router", "topk")),
    ("linear state", ("replay", "delta", "materialize", "chunk_", "recurrent", "wy_", "cumsum")),
    ("attention", ("paged", "window_kernel", "combine", "prefill_kernel", "flash", "attn")),
    ("sampling", ("sample", "argmax", "gumbel", "philox", "accept", "threshold")),
    ("projections", ("gemm", "gemv", "cutlass", "nvjet", "xmma", "splitk", "matmul", "dot_kernel")),
    ("norm and conv", ("norm", "conv")),
)


@dataclass
class Figures:
    """One engine at one batch size."""

    model: str
    num_drafts: int
    ssm_dtype: str
    batch: int
    tokens_per_second: float
    ms_per_step: float
    tokens_per_step: float
    first_token_ms: float
    host_us_per_step: float
    graph_launches: float
    kernel_launches: float
    blocking_calls: float
    seam_share: float
    ms_by_class: dict[str, float]


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure(llm: LLM, model: str, batch: int, output_len: int, vocab_size: int) -> Figures:
    """Time a batch, then profile a few of its steps."""
    asked = prompts(batch, PROMPT_LEN, vocab_size)
    time_requests(llm, asked, 16)
    loop = llm.engine.loop_counters
    steps, planned = loop.num_steps, loop.plan_seconds
    timing = time_requests(llm, asked, output_len)
    num_steps = loop.num_steps - steps
    config = llm.engine.config
    decode_steps = timing.counters.num_steps / batch
    return Figures(
        model=model,
        num_drafts=config.max_window - 1,
        ssm_dtype=config.ssm_dtype,
        batch=batch,
        tokens_per_second=timing.decode_tokens / timing.decode_seconds,
        ms_per_step=timing.decode_seconds / decode_steps * 1e3,
        tokens_per_step=timing.counters.accepted_len,
        first_token_ms=timing.first_token_seconds * 1e3,
        host_us_per_step=(loop.plan_seconds - planned) / num_steps * 1e6,
        **profile(llm, asked),
    )


def profile(llm: LLM, asked: list[list[int]]) -> dict[str, Any]:
    """Look into steady decode steps."""
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    engine = llm.engine
    for index, ids in enumerate(asked):
        engine.submit(f"profile-{index}", ids, params)
    warm = 0
    while warm < 8 or engine.scheduler.num_waiting:
        engine.step()
        warm += 1
    with count_calls() as counts:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    for index in range(len(asked)):
        engine.abort(f"profile-{index}")
    while engine.has_work:
        engine.step()
    by_class: Counter[str] = Counter()
    for name, start, end in counts.kernels:
        by_class[kernel_class(name)] += (end - start) / 1e3 / PROFILED_STEPS
    spans = sorted((start, end) for _, start, end in counts.kernels)
    busy, last = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return {
        "graph_launches": counts.graph_launches / PROFILED_STEPS,
        "kernel_launches": counts.kernel_launches / PROFILED_STEPS,
        # the synchronize above is ours
        "blocking_calls": (sum(counts.blocking.values()) - 1) / PROFILED_STEPS,
        "seam_share": 1 - busy / (last - spans[0][0]),
        "ms_by_class": {name: round(ms, 4) for name, ms in by_class.most_common()},
    }


def kernel_class(name: str) -> str:
    """Class of a kernel by its name."""
    lowered = name.lower()
    for found, patterns in CLASSES:
        if any(pattern in lowered for pattern in patterns):
            return found
    return "small kernels"


def prefill(llm: LLM, vocab_size: int) -> list[dict[str, float]]:
    """Time to first token of one prompt, by its length."""
    found = []
    for length in (512, 2048, 8192):
        times = []
        for seed in range(4):
            (ids,) = prompts(1, length, vocab_size, seed)
            times.append(time_requests(llm, [ids], 2).first_token_seconds)
        best = sorted(times[1:])[1]
        found.append({"tokens": length, "ms": best * 1e3, "tokens_per_second": length / best})
    return found


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in all that is asked for."""
    figures, prefills, starts = [], [], []
    with tempfile.TemporaryDirectory() as root:
        path = write_checkpoint(asked.model, Path(root))
        for ssm_dtype in asked.ssm_dtypes.split(","):
            for num_drafts in map(int, asked.steps.split(",")):
                options: dict[str, Any] = {"speculative_num_steps": num_drafts}
                if num_drafts:
                    options["speculative_simulate_acceptance"] = FORCED_ACCEPTANCE
                started = time.perf_counter()
                llm = LLM(
                    str(path), load_format="dummy", device="cuda", ssm_dtype=ssm_dtype,
                    max_running_requests=max(map(int, asked.batches.split(","))),
                    max_model_len=asked.max_model_len, seed=0, **options,
                )  # fmt: skip
                ready = time.perf_counter() - started
                starts.append({"num_drafts": num_drafts, "seconds": ready})
                print(f"{asked.model} k={num_drafts} {ssm_dtype}: ready in {ready:.1f} s")
                vocab_size = MODELS[asked.model]["vocab_size"]
                for batch in map(int, asked.batches.split(",")):
                    output_len = 768 if batch == 1 else 256
                    found = measure(llm, asked.model, batch, output_len, vocab_size)
                    figures.append(asdict(found))
                    print_figures(found)
                if num_drafts == 0 or asked.steps == str(num_drafts):
                    prefills += prefill(llm, vocab_size)
                    for row in prefills[-3:]:
                        print("prefill", {k: round(v, 2) for k, v in row.items()}, flush=True)
                llm.close()
                del llm
                gc.collect()
                torch.cuda.empty_cache()
    return {"figures": figures, "prefill": prefills, "ready_seconds": starts}


def print_figures(found: Figures) -> None:
    """Print one row and its breakdown."""
    print(
        f"B={found.batch:4d} {found.tokens_per_second:8.1f} tok/s {found.ms_per_step:7.3f} ms/step "
        f"x{found.tokens_per_step:.2f} TTFT {found.first_token_ms:.0f} ms, host "
        f"{found.host_us_per_step:.0f} us, graphs {found.graph_launches:.1f}, launches "
        f"{found.kernel_launches:.1f}, blocking {found.blocking_calls:.1f}, seams "
        f"{found.seam_share:.1%}"
    )
    print("       " + ", ".join(f"{k} {v:.3f}" for k, v in found.ms_by_class.items()), flush=True)


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="35b-a3b")
    parser.add_argument("--batches", default="1,8,32,64,128")
    parser.add_argument("--steps", default="0,3", help="tokens drafted per step")
    parser.add_argument("--ssm-dtypes", default="float32")
    parser.add_argument("--max-model-len", type=int, default=8448)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
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
