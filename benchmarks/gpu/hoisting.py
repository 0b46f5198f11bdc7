"""What it is worth that layers read a prefill's metadata instead of deriving it, each for itself.

    python -m benchmarks.gpu.hoisting --check --bench [--output ...]

A Mamba-2 hybrid in the shape of Nemotron-H-8B, with made-up weights, serves prompts in two ways. As
it is, the host decides which rows have a state and which states are stored, once per chunk. With
the derivation back in every layer, as other engines had it, each asks the device whether any row
has a state and whether any is stored, and makes its own rows from the answers: two blocking calls a
layer. The two are run in turn within each round.
"""

from __future__ import annotations

import gc
import json
import shutil
import statistics
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.gpu.engine import prompts
from benchmarks.gpu.harness import main, result
from gapless import LLM, SamplingParams
from gapless.assets import demo_checkpoint
from gapless.bench.decode import time_requests
from gapless.layers import ssm
from gapless.layers.batch import PrefillBatch
from gapless.runner.syncs import count_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.gpu.harness import Rows
    from gapless.layers.batch import AttentionBatch, LayerMemory, LinearMemory, WindowBatch

LENGTHS = (512, 2048)
ROUNDS = 9
BATCH = 8  # prompts at once, for throughput
SYNCS_PER_LAYER = 2
MODEL: dict[str, Any] = {
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


@contextmanager
def hoisted() -> Iterator[None]:
    """Run as it is."""
    yield


@contextmanager
def derived() -> Iterator[None]:
    """Let every Mamba-2 layer derive what a chunk's metadata holds."""
    with mock.patch.object(ssm, "linear_inputs", partial(_deriving, ssm.linear_inputs)):
        yield


def _deriving(
    honest: Any, memory: LayerMemory, batch: AttentionBatch
) -> tuple[LinearMemory, WindowBatch | PrefillBatch]:
    found, batch = honest(memory, batch)
    if not isinstance(batch, PrefillBatch):
        return found, batch
    chunks, checkpoint = batch.chunks, found.replay.checkpoint
    zero_row = checkpoint.shape[0] - 1
    has_state = chunks.init_rows != zero_row
    init_rows = torch.full_like(chunks.init_rows, zero_row)
    if has_state.any():
        init_rows = torch.where(has_state, chunks.init_rows, init_rows)
    cut_rows = chunks.cut_rows
    is_stored = cut_rows < zero_row
    if is_stored.any():
        cut_rows = torch.where(is_stored, cut_rows, zero_row)
    return found, replace(batch, chunks=replace(chunks, init_rows=init_rows, cut_rows=cut_rows))


WAYS = {"hoisted": hoisted, "derived": derived}


@contextmanager
def engine(config: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """Serve a config with made-up weights."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(demo_checkpoint() / file, Path(root) / file)
        llm = LLM(root, load_format="dummy", speculative_algorithm="none", seed=0, **options)
        try:
            yield llm
        finally:
            llm.close()
            del llm
            gc.collect()


def tokens_of(llm: LLM, way: str, asked: list[list[int]]) -> list[tuple[int, ...]]:
    """Return what each prompt is continued with, and what its next turn is."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.engine.flush_cache()
    found = []
    with WAYS[way]():
        for ids in asked:
            first = llm.generate(ids, params).token_ids
            # the next turn starts from a state
            turn = [*ids, *first, *ids[:5]]
            found += [tuple(first), tuple(llm.generate(turn, params).token_ids)]
    return found


def blocking_calls(llm: LLM, way: str, ids: list[int]) -> int:
    """Count the calls by which the host waits in one prompt's prefill, in one chunk."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    with WAYS[way]():
        # memory is there when it counts
        llm.engine.flush_cache()
        llm.generate(ids, params)
        llm.engine.flush_cache()
        llm.engine.submit("counted", ids, params)
        with count_calls() as nothing:
            _finish()
        with count_calls() as counts:
            llm.engine.step()
            _finish()
    while llm.engine.has_work:
        llm.engine.step()
    return sum((counts.blocking - nothing.blocking).values())


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check(llm: LLM, config: dict[str, Any] = MODEL, lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """Both ways give the same tokens, and wait as often as they say."""
    asked = [prompts(1, length, config["vocab_size"], seed=length)[0] for length in lengths]
    differ = tokens_of(llm, "hoisted", asked) != tokens_of(llm, "derived", asked)
    calls = {way: blocking_calls(llm, way, asked[0]) for way in WAYS}
    added = SYNCS_PER_LAYER * config["hybrid_override_pattern"].count("M")
    return [
        result("same tokens", float(differ), 0.0),
        result("hoisted: blocking calls", float(calls["hoisted"]), 0.0),
        result("derived: blocking calls, not as many as asked for",
               float(abs(calls["derived"] - added)), 0.0),
    ]  # fmt: skip


def bench(
    llm: LLM,
    config: dict[str, Any] = MODEL,
    lengths: tuple[int, ...] = LENGTHS,
    rounds: int = ROUNDS,
) -> Rows:
    """Time to first token of one prompt, and prefill throughput of several, in turn."""
    rows = []
    for length in lengths:
        for count, unit in ((1, "first token ms"), (BATCH, "tokens/s")):
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds + 1):
                asked = prompts(count, length, config["vocab_size"], seed=number)
                for way in sorted(WAYS, reverse=number % 2 == 0):
                    with WAYS[way]():
                        seconds = time_requests(llm, asked, 1).first_token_seconds
                    # the first round warms up
                    if number:
                        is_rate = unit == "tokens/s"
                        times[way].append(count * length / seconds if is_rate else seconds * 1e3)
            ratios = [h / d for h, d in zip(times["hoisted"], times["derived"], strict=True)]
            rows.append({
                "tokens": length, "prompts": count, "unit": unit,
                **{way: statistics.median(found) for way, found in times.items()},
                "hoisted/derived": statistics.median(ratios),
                "least": min(ratios), "most": max(ratios), "rounds": times,
            })  # fmt: skip
    return rows


if __name__ == "__main__":
    with engine(MODEL, device="cuda", max_running_requests=BATCH, max_model_len=4096) as served:
        runs = {"check": lambda _: check(served), "bench": lambda _: bench(served)}
        status = main(__doc__, runs)
    sys.exit(status)
