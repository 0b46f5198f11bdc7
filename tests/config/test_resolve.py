"""Options are resolved once, and what cannot be honoured is refused."""

from __future__ import annotations

import logging
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from gapless import ConfigError, EngineOptions
from gapless.config.buckets import batch_buckets, bucket_for
from gapless.config.config import Config, DeviceInfo
from gapless.config.memory import resolve_footprint
from gapless.config.resolve import resolve
from gapless.config.switches import Graphs, Switches
from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.draft_shape import TreeShape
from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.feed_forward import MlpSpec
from gapless.core.specs.linear import LinearSpec, Recurrence

ATTENTION = AttentionSpec(4, 2, 32, 8, 1e4, has_qk_norm=True, has_output_gate=True)
LINEAR = LinearSpec(Recurrence.GATED_DELTA, 2, 4, 16, 24, 4)
HYBRID = Architecture(
    model_type="hybrid", vocab_size=256, hidden_size=64,
    layers=(LayerSpec(LINEAR, MlpSpec(112)), LayerSpec(ATTENTION, MlpSpec(112))),
    norm_eps=1e-6, ties_embeddings=False, max_position=1000,
)  # fmt: skip
DENSE = replace(HYBRID, model_type="dense", layers=HYBRID.layers[1:])
LINEAR_ONLY = replace(HYBRID, model_type="linear", layers=HYBRID.layers[:1])
CPU = DeviceInfo("cpu", 2**30, 2)
GPU = DeviceInfo("cuda", 2**34, 1)


MTP = replace(HYBRID, model_type="mtp", num_mtp_layers=1)


def _resolve(
    architecture: Architecture = HYBRID,
    on: DeviceInfo = CPU,
    *,
    has_mtp: bool = False,
    **options: Any,
) -> Config:
    asked = EngineOptions.from_dict(options)
    return resolve(asked, architecture, "bfloat16", on, has_mtp_weights=has_mtp)


def test_defaults_by_device() -> None:
    cpu, gpu = _resolve(), _resolve(on=GPU)
    assert (cpu.dtype, gpu.dtype) == ("float32", "bfloat16")
    assert cpu.ssm_dtype == gpu.ssm_dtype == "float32"
    assert (cpu.max_running_requests, gpu.max_running_requests) == (64, 256)
    assert cpu.max_model_len == 1000
    assert cpu.replay_len == 16
    assert _resolve(dtype="float64").ssm_dtype == "float64"


def test_every_automatic_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = _resolve()
    logged = caplog.text
    for name in ("dtype", "max_model_len", "max_running_requests", "mem_fraction", "page_size",
                 "chunked_prefill_size", "linear_replayssm_cache_len", "num_threads", "ssm_dtype",
                 "max_queued_requests", "snapshot_fraction"):  # fmt: skip
        assert f"{name} = " in logged
    caplog.clear()
    with caplog.at_level(logging.INFO):
        _resolve(max_model_len=100, page_size=4, dtype="float32")
    assert "page_size" not in caplog.text
    assert "max_model_len" not in caplog.text
    assert config.page_size == 16


def test_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        _resolve().page_size = 3  # type: ignore[misc]
    assert len(fields(Config)) <= 25


@pytest.mark.parametrize("name", [
    "max_model_len", "max_running_requests", "max_queued_requests", "chunked_prefill_size",
    "page_size", "linear_replayssm_cache_len", "num_threads",
])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_integers_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        _resolve(**{name: value})


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan"), float("inf"), "half"])
def test_mem_fraction_out_of_range(value: Any) -> None:
    with pytest.raises(ConfigError, match="mem_fraction"):
        _resolve(mem_fraction=value)


@pytest.mark.parametrize("value", [0, -0.1, 1, 1.1, float("nan"), "half"])
def test_snapshot_fraction_out_of_range(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"snapshot_fraction=.*above 0 and below 1"):
        _resolve(snapshot_fraction=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disable_prefix_cache": "no"}, "disable_prefix_cache='no': want True or False"),
        ({"dtype": "int8"}, "want one of auto, float32, bfloat16, float64"),
        ({"device": "tpu"}, "want one of auto, cpu, cuda"),
        ({"load_format": "pickle"}, "want one of safetensors, dummy"),
        ({"ssm_dtype": "fp8"}, "want one of"),
        ({"max_model_len": 1}, "at least 2"),
        ({"max_model_len": 1001}, "more than the 1000 positions"),
        ({"revision": "main"}, "no effect on the bundled model"),
        ({"max_modellen": 5}, "did you mean 'max_model_len'"),
        ({"zzz": 5}, "known options: model"),
    ],
)
def test_refused_with_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(**options)


@pytest.mark.parametrize(
    ("architecture", "device", "options"),
    [
        (DENSE, CPU, {"ssm_dtype": "float32"}),
        (DENSE, CPU, {"linear_replayssm_cache_len": 16}),
        (LINEAR_ONLY, CPU, {"page_size": 16}),
        (HYBRID, GPU, {"num_threads": 2}),
        (HYBRID, CPU, {"snapshot_fraction": 0.5, "disable_prefix_cache": True}),
        (DENSE, CPU, {"snapshot_fraction": 0.5}),
    ],
)
def test_option_without_effect_is_refused(
    architecture: Architecture, device: DeviceInfo, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        _resolve(architecture, device, **options)


def test_float64_is_for_the_cpu() -> None:
    with pytest.raises(ConfigError, match="CPU reference path"):
        _resolve(on=GPU, dtype="float64")


# 63 pages hold a request of 1000 tokens
NUM_FULL = 63


@pytest.mark.parametrize(
    ("options", "num_pages", "num_rows"),
    [({}, 2 * 2 * NUM_FULL, 2 + 16 * 2), ({"disable_prefix_cache": True}, 2 * NUM_FULL, 2)],
)
def test_pools_are_bounded_by_use(options: dict[str, Any], num_pages: int, num_rows: int) -> None:
    config = _resolve(max_running_requests=2, **options)
    assert (config.num_pages, config.num_state_rows) == (num_pages, num_rows)
    assert config.uses_prefix_cache is not options.get("disable_prefix_cache", False)


def test_models_without_linear_layers_keep_no_snapshots() -> None:
    config = _resolve(DENSE, max_running_requests=2)
    assert (config.num_state_rows, config.row_bytes) == (2, 0)
    assert config.uses_prefix_cache
    assert config.num_pages == 2 * 2 * NUM_FULL
    # but the MTP layer needs a hidden state
    drafting = _resolve(replace(DENSE, num_mtp_layers=1), has_mtp=True, max_running_requests=2)
    assert (drafting.num_state_rows, drafting.row_bytes) == (2 + 16 * 2, 64 * 4)


def test_models_without_attention_take_no_memory_for_pages() -> None:
    config = _resolve(LINEAR_ONLY, max_running_requests=2)
    assert (config.page_bytes, config.num_pages) == (0, 2 * 2 * NUM_FULL)
    assert config.num_state_rows == 2 + 16 * 2


def test_pool_is_bounded_by_memory(caplog: pytest.LogCaptureFixture) -> None:
    small = _memory(num_requests=2, num_pages=40)
    options = {"max_running_requests": 2, "mem_fraction": 1.0, "disable_prefix_cache": True}
    with caplog.at_level(logging.WARNING):
        config = _resolve(on=small, **options)
    assert (config.num_pages, config.max_running_requests) == (40, 2)
    # the last token of a request needs no KV
    assert config.max_model_len == 641
    assert "max_model_len = 641 instead of 1000" in caplog.text


@pytest.mark.parametrize("asked", [{}, {"max_running_requests": 50}])
def test_fewer_requests_run_where_all_would_leave_no_room(
    caplog: pytest.LogCaptureFixture, asked: dict[str, int]
) -> None:
    small = _memory(num_requests=5, num_pages=NUM_FULL)
    with caplog.at_level(logging.WARNING):
        config = _resolve(on=small, mem_fraction=1.0, max_model_len=1000, **asked)
    assert (config.max_running_requests, config.num_pages) == (5, NUM_FULL)
    assert config.buckets[-1] == 5
    wanted = asked.get("max_running_requests", 64)
    warning = f"max_running_requests = 5 instead of {wanted}: each takes "
    assert warning in caplog.text
    assert "raise mem_fraction" in caplog.text
    # a request more is one too many
    more = _resolve(
        on=_memory(num_requests=6, num_pages=NUM_FULL), mem_fraction=1.0, max_model_len=1000
    )
    assert more.max_running_requests == 6


def test_the_prefix_cache_is_off_without_a_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    options = {"mem_fraction": 1.0, "max_model_len": 1000, "max_running_requests": 2}
    small = _memory(num_requests=2, num_pages=NUM_FULL)
    with caplog.at_level(logging.WARNING):
        config = _resolve(on=small, **options)
    assert not config.uses_prefix_cache
    assert config.num_state_rows == 2
    assert "the prefix cache is off: one state snapshot takes " in caplog.text
    with pytest.raises(ConfigError, match=r"snapshot_fraction=0\.5 gives no snapshot: one state"):
        _resolve(on=small, snapshot_fraction=0.5, **options)
    # what was switched off on purpose is no reason to warn
    caplog.clear()
    _resolve(on=small, disable_prefix_cache=True, **options)
    assert not caplog.records


def test_memory_is_shown_as_a_table(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        _resolve(max_running_requests=2)
    lines = [line.partition("memory: ")[2] for line in caplog.messages if "memory: " in line]
    assert [line[:13].rstrip() for line in lines] == [
        "weights", "pages", "running rows", "snapshot rows", "rings", "fixed", "free"
    ]  # fmt: skip
    assert lines[1].endswith("(252 x 16 tokens)")
    assert lines[3].endswith("(32)")
    assert re.search(r" [\d.]+ [KM]iB$", lines[0])


def test_what_does_not_fit_says_so_before_loading() -> None:
    tiny = _memory(num_requests=1, num_pages=NUM_FULL - 1)
    message = r"one request of 1000 tokens needs .*for weights.*raise mem_fraction, or lower max_mo"
    with pytest.raises(ConfigError, match=message):
        _resolve(on=tiny, max_running_requests=2, mem_fraction=1.0, max_model_len=1000)
    with pytest.raises(ConfigError, match=r"needs .* the budget is 500 B; raise mem_fraction, or"):
        _resolve(on=DeviceInfo("cpu", 1000, 1))


def test_larger_fraction_gives_more_pages() -> None:
    device = _memory(num_requests=64, num_pages=500)
    low, high = _resolve(on=device, mem_fraction=0.7), _resolve(on=device, mem_fraction=0.9)
    assert low.num_pages < high.num_pages


def _memory(*, num_requests: int, num_pages: int) -> DeviceInfo:
    """A CPU with memory for HYBRID, so many running requests and pages, and no more."""
    footprint = resolve_footprint(EngineOptions(), HYBRID, None, CPU)
    pools = footprint.pool_bytes(num_requests=num_requests, num_pages=num_pages)
    return DeviceInfo("cpu", footprint.weight_bytes + pools, 1)


@pytest.mark.parametrize("max_running", [1, 2, 3, 4, 5, 8, 9, 33, 64])
def test_buckets_hold_every_batch(max_running: int) -> None:
    buckets = batch_buckets(max_running)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_running
    for count in range(1, max_running + 1):
        assert bucket_for(count, buckets) >= count


def test_drafting_follows_the_checkpoint() -> None:
    plain, mtp = _resolve(MTP), _resolve(MTP, has_mtp=True)
    assert (plain.drafter, plain.max_window) == ("none", 1)
    assert (mtp.drafter, mtp.max_window) == ("mtp", 4)
    assert _resolve(MTP, has_mtp=True, speculative_num_steps=0).max_window == 1
    assert _resolve(MTP, has_mtp=True, speculative_algorithm="none").drafter == "none"
    assert _resolve(MTP, has_mtp=True, speculative_num_steps=5).max_window == 6
    ngram = _resolve(DENSE, speculative_algorithm="ngram", speculative_num_steps=2)
    assert (ngram.drafter, ngram.max_window) == ("ngram", 3)


@pytest.mark.parametrize(
    ("has_mtp", "options", "message"),
    [
        (False, {"speculative_algorithm": "mtp"}, r"mtp\.fc\.weight.*speculative_algorithm=ngram"),
        (False, {"speculative_num_steps": 3}, "no effect without a drafter"),
        (True, {"speculative_algorithm": "none", "speculative_num_steps": 3}, "no effect"),
        (True, {"speculative_algorithm": "mtp", "speculative_num_steps": 0}, "drafts nothing"),
        (True, {"speculative_num_steps": 16}, "want 0 to 15"),
        (True, {"speculative_num_steps": -1}, "want 0 to 15"),
        (True, {"speculative_num_steps": 1.5}, "want 0 to 15"),
        (True, {"speculative_algorithm": "eagle"}, "want one of auto, mtp, ngram, none"),
        (True, {"speculative_simulate_acceptance": 3.0}, "load_format=dummy only"),
        (
            True,
            {"speculative_simulate_acceptance": 4.5, "load_format": "dummy"},
            "want 1 to 4 tokens per step",
        ),
        (
            False,
            {"speculative_simulate_acceptance": 3.0, "load_format": "dummy"},
            "no effect without a drafter",
        ),
    ],
)
def test_drafting_that_cannot_be_is_refused(
    has_mtp: bool, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(MTP, has_mtp=has_mtp, **options)


RECENT_GPU = replace(GPU, converts_float8=True)


@pytest.mark.parametrize(
    ("device", "options", "dtype"),
    [
        (RECENT_GPU, {}, "fp8"),
        (RECENT_GPU, {"draft_head_dtype": "model"}, "model"),
        (RECENT_GPU, {"speculative_topk": 2}, "fp8"),
        (RECENT_GPU, {"dtype": "float32"}, "model"),
        (RECENT_GPU, {"dtype": "float32", "draft_head_dtype": "fp8"}, "fp8"),
        (RECENT_GPU, {"speculative_algorithm": "ngram"}, "model"),
        (RECENT_GPU, {"speculative_algorithm": "none"}, "model"),
        (GPU, {}, "model"),
        (CPU, {}, "model"),
        (CPU, {"dtype": "bfloat16"}, "model"),
        (CPU, {"dtype": "float64", "draft_head_dtype": "fp8"}, "fp8"),
    ],
)
def test_drafts_read_float8_where_it_is_fast(
    device: DeviceInfo, options: dict[str, Any], dtype: str
) -> None:
    config = _resolve(MTP, device, has_mtp=True, **options)
    assert config.switches.has_float8_head == (dtype == "fp8")


@pytest.mark.parametrize("asked", ["model", "fp8"])
@pytest.mark.parametrize("algorithm", ["ngram", "none"])
def test_a_draft_head_without_the_drafter_that_reads_it_is_refused(
    algorithm: str, asked: str
) -> None:
    options = {"draft_head_dtype": asked, "speculative_algorithm": algorithm}
    message = f"draft_head_dtype={asked} has no effect without the MTP drafter"
    for device in (CPU, RECENT_GPU):
        with pytest.raises(ConfigError, match=message):
            _resolve(MTP, device, has_mtp=True, **options)


def test_a_draft_head_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"wants a GPU that converts float8 .*sm_89"):
        _resolve(MTP, GPU, has_mtp=True, draft_head_dtype="fp8")
    with pytest.raises(ConfigError, match="draft_head_dtype='fp4': want one of auto, model, fp8"):
        _resolve(MTP, has_mtp=True, draft_head_dtype="fp4")


def test_the_copy_of_the_head_takes_its_part_of_the_budget() -> None:
    # a byte an entry, and a scale of four bytes a row
    copy = 256 * 64 + 256 * 4
    tight = replace(RECENT_GPU, free_bytes=4 << 20)
    pages = [
        _resolve(
            MTP, replace(tight, free_bytes=tight.free_bytes + more), has_mtp=True,
            mem_fraction=1.0, max_model_len=1000, disable_prefix_cache=True, draft_head_dtype=head,
        ).num_pages
        for head, more in (("model", 0), ("fp8", copy), ("fp8", 0))
    ]  # fmt: skip
    assert pages[0] == pages[1] > pages[2]


@pytest.mark.parametrize(
    ("options", "window", "tree"),
    [
        ({"speculative_topk": 2}, 8, TreeShape(3, 2)),
        ({"speculative_topk": 2, "speculative_num_steps": 2}, 7, TreeShape(2, 2)),
        ({"speculative_topk": 12, "speculative_num_steps": 2}, 13, TreeShape(2, 12)),
        ({"speculative_topk": 4, "speculative_num_draft_tokens": 16}, 16, TreeShape(3, 4)),
        ({"speculative_topk": 3, "speculative_num_draft_tokens": 4}, 4, TreeShape(3, 3)),
        ({"speculative_num_draft_tokens": 4}, 4, None),
        ({"speculative_num_steps": 6, "speculative_num_draft_tokens": 7}, 7, None),
    ],
)
def test_windows_hold_the_root_and_its_drafts(
    options: dict[str, Any], window: int, tree: TreeShape | None
) -> None:
    config = _resolve(MTP, has_mtp=True, **options)
    assert (config.max_window, config.tree) == (window, tree)


@pytest.mark.parametrize(
    ("has_mtp", "options", "message"),
    [
        (True, {"speculative_topk": 0}, "speculative_topk=0: want an integer of at least 1"),
        (True, {"speculative_topk": 2.0}, "want an integer"),
        (True, {"speculative_topk": 16}, "want at most 15 drafts after a token"),
        (True, {"speculative_topk": 5, "speculative_num_steps": 15}, "70 drafts; want at most 63"),
        (True, {"speculative_num_draft_tokens": 5}, "chain of speculative_num_steps=3 has 4"),
        (True, {"speculative_num_draft_tokens": 17}, "want 2 to 16"),
        (True, {"speculative_num_draft_tokens": 1}, "want 2 to 16"),
        (True, {"speculative_topk": 2, "speculative_num_draft_tokens": 3}, "want 4 to 11"),
        (True, {"speculative_topk": 2, "speculative_num_draft_tokens": 12}, "want 4 to 11"),
        (False, {"speculative_topk": 2}, "speculative_topk=2 has no effect without a drafter"),
        (False, {"speculative_num_draft_tokens": 4}, "no effect without a drafter"),
        (
            False,
            {"speculative_simulate_acceptance": 2, "load_format": "dummy"},
            "speculative_simulate_acceptance=2 has no effect without a drafter",
        ),
        (True, {"speculative_algorithm": "ngram", "speculative_topk": 2}, "drafts chains only"),
        (
            True,
            {
                "speculative_topk": 2,
                "speculative_simulate_acceptance": 2.0,
                "load_format": "dummy",
            },
            "leave out speculative_topk",
        ),
    ],
)
def test_trees_that_cannot_be_are_refused(
    has_mtp: bool, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(MTP, has_mtp=has_mtp, **options)


def test_more_than_one_mtp_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 MTP layers, one is supported"):
        _resolve(replace(MTP, num_mtp_layers=2), has_mtp=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disable_cuda_graph": True, "stage_graphs": True}, "stage_graphs has no effect with"),
        ({"disable_fused_metadata": True}, "disable_fused_metadata has no effect on cpu"),
        ({"plan_stream": True}, "plan_stream has no effect without a drafter"),
        (
            {
                "plan_stream": True,
                "disable_overlap_schedule": True,
                "speculative_algorithm": "ngram",
            },
            "plan_stream has no effect with disable_overlap_schedule",
        ),
        ({"stage_graphs": 1}, "stage_graphs=1: want True or False"),
    ],
)
def test_switches_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(**options)


def test_switches() -> None:
    assert _resolve().switches == Switches(
        attention_backend="auto",
        runs_ahead=True,
        graphs=Graphs.STEP,
        fuses_metadata=True,
        uses_plan_stream=False,
        has_float8_head=False,
    )
    asked = _resolve(on=GPU, stage_graphs=True, disable_fused_metadata=True).switches
    assert (asked.graphs, asked.fuses_metadata) == (Graphs.STAGE, False)
    asked = _resolve(disable_cuda_graph=True, disable_overlap_schedule=True).switches
    assert (asked.graphs, asked.runs_ahead) == (Graphs.NONE, False)
