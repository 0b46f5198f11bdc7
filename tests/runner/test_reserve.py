"""What lies in the memory that weights and pools leave over: its sizes, and too little of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined

from gapless.attention.triton import TritonAttention
from gapless.core.architecture import ring_capacity
from gapless.core.footprint import human
from gapless.core.specs.attention import AttentionSpec, LatentSpec
from gapless.core.specs.linear import LinearSpec, Recurrence
from gapless.engine import load
from gapless.errors import ConfigError
from gapless.ops.step_metadata import Geometry
from gapless.runner.masks import MaskUpload
from gapless.runner.reserve import StepMemory, within_memory
from tests.engine_fixtures import runner_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless import LLM

DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"
# layers of the 35B-A3B shape
FULL = AttentionSpec(16, 2, 256, 64, 1e7, has_qk_norm=True, has_output_gate=True)
DELTA = LinearSpec(Recurrence.GATED_DELTA, 16, 32, 128, 128, 4)
KDA = LinearSpec(Recurrence.KIMI_DELTA, 32, 32, 128, 128, 4)
VOCAB_SIZE, NUM_SLOTS, MAX_LEN = 248_320, 256, 32768


def geometry_of(window: int) -> Geometry:
    return Geometry(
        num_slots=NUM_SLOTS, num_pages=1, page_size=16, num_state_rows=1, replay_len=16,
        ring_len=ring_capacity(16, window), conv_width=4, conv_ring_len=8, max_window=window,
    )  # fmt: skip


def backend_of(*layers: Any) -> TritonAttention:
    return TritonAttention(
        page_size=16, max_len=MAX_LEN, device="cuda", layers=layers, dtype="bfloat16"
    )


def sizes_of(window: int, linear: LinearSpec = DELTA) -> StepMemory:
    return StepMemory.of(
        geometry_of(window), backend_of(FULL), [linear],
        vocab_size=VOCAB_SIZE, max_len=MAX_LEN, device="cuda",
    )  # fmt: skip


def test_the_docs_give_the_figures() -> None:
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("|")]
    shown = {row[1].split()[0]: [cell.strip() for cell in row[2:5]] for row in rows}
    sizes = [sizes_of(window) for window in (1, 4, 16)]
    for word, name in (
        ("logits", "logits"),
        ("attention's", "attention"),
        ("records", "recurrence"),
    ):
        assert shown[word] == [human(vars(size)[name]) for size in sizes]
    per_channel = [sizes_of(window, KDA).recurrence for window in (1, 4, 16)]
    assert shown["such"] == [human(size) for size in per_channel]
    masks = [4 * (NUM_SLOTS * window + 1) * VOCAB_SIZE // 32 for window in (1, 4, 16)]
    assert shown["masks"] == [human(size) for size in masks]
    assert shown["slot"] == 3 * [human(5 * (NUM_SLOTS + 1) * VOCAB_SIZE)]


def test_static_buffers_are_as_large_as_the_docs_say(make_llm: Callable[..., LLM]) -> None:
    device = runner_of(make_llm(speculative_algorithm="ngram")).device
    vocab_size, geometry = device.model.architecture.vocab_size, device.geometry
    counts = device.table.in_prompt.nbytes + device.table.output_counts.nbytes
    assert counts == 5 * (geometry.num_slots + 1) * vocab_size
    masks = MaskUpload(device, geometry.num_slots, geometry.max_window)
    rows = masks.rows(geometry.num_slots, geometry.max_window)
    positions = geometry.num_slots * geometry.max_window
    assert rows.masks.nbytes == 4 * (positions + 1) * -(-vocab_size // 32)


def test_the_layer_that_takes_most_counts() -> None:
    latent = LatentSpec(
        num_heads=16, q_lora_rank=0, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128,
        scale=0.1, rotary=None,
    )  # fmt: skip
    backend = backend_of(FULL, latent)
    alone = [backend_of(layer).window_bytes(256, 4, MAX_LEN) for layer in (FULL, latent)]
    assert backend.window_bytes(256, 4, MAX_LEN) == max(alone) == alone[1] > alone[0]
    assert backend_of().window_bytes(256, 4, MAX_LEN) == 0
    # the bound of short steps has fewer splits
    assert backend.window_bytes(256, 4, 64) < alone[1]


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


def test_too_little_for_steps_names_the_options(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "make_device", lambda *_: run_out())
    message = (
        r"^CUDA out of memory. Tried to allocate 2.00 GiB: what mem_fraction leaves over does not "
        "hold the steps of 5 requests with windows of 1 tokens, and prompts of 7; lower "
        "mem_fraction, max_running_requests or chunked_prefill_size$"
    )
    options = {"max_running_requests": 5, "chunked_prefill_size": 7}
    with pytest.raises(ConfigError, match=message):
        make_llm(**options, speculative_algorithm="none")


def test_it_is_found_beneath_the_end_of_a_capture(make_llm: Callable[..., LLM]) -> None:
    config = make_llm().engine.config

    def capture() -> None:
        try:
            run_out()
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(ConfigError, match="lower mem_fraction"), within_memory(config):
        capture()
    with pytest.raises(RuntimeError, match="something else"), within_memory(config):
        raise RuntimeError("something else")
