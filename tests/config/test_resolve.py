"""Options are resolved once, and what cannot be honoured is refused."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import pytest

from gapless import ConfigError, EngineOptions
from gapless.config.resolve import (
    Config,
    DeviceInfo,
    batch_buckets,
    bucket_for,
    resolve,
    resolve_footprint,
)
from gapless.core.architecture import (
    Architecture,
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    Recurrence,
)

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
                 "chunked_prefill_size", "linear_replayssm_cache_len", "num_pages", "num_threads",
                 "ssm_dtype"):  # fmt: skip
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
    assert len(fields(Config)) <= 17


@pytest.mark.parametrize("name", [
    "max_model_len", "max_running_requests", "chunked_prefill_size", "page_size",
    "linear_replayssm_cache_len", "num_threads",
])  # fmt: skip
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_integers_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        _resolve(**{name: value})


@pytest.mark.parametrize("value", [0, -0.1, 1.1, float("nan"), float("inf"), "half"])
def test_mem_fraction_out_of_range(value: Any) -> None:
    with pytest.raises(ConfigError, match="mem_fraction"):
        _resolve(mem_fraction=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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


def test_pool_is_bounded_by_use_and_by_memory(caplog: pytest.LogCaptureFixture) -> None:
    assert _resolve(max_running_requests=2).num_pages == 2 * 63
    page_bytes = 16 * ATTENTION.kv_bytes_per_token("float32")
    small = DeviceInfo("cpu", _fixed_bytes(2) + 40 * page_bytes, 1)
    with caplog.at_level(logging.WARNING):
        config = _resolve(on=small, max_running_requests=2, mem_fraction=1.0)
    assert config.num_pages == 40
    # the last token of a request needs no KV
    assert config.max_model_len == 641
    assert "max_model_len = 641 instead of 1000" in caplog.text


def test_what_does_not_fit_says_so_before_loading() -> None:
    tiny = DeviceInfo("cpu", _fixed_bytes(2) + 2**14, 1)
    with pytest.raises(ConfigError, match="raise mem_fraction, or lower"):
        _resolve(on=tiny, max_running_requests=2, mem_fraction=1.0, max_model_len=1000)
    with pytest.raises(ConfigError, match="needs"):
        _resolve(on=DeviceInfo("cpu", 1000, 1))


def test_larger_fraction_gives_more_pages() -> None:
    device = DeviceInfo("cpu", _fixed_bytes(64) * 4, 1)
    low, high = _resolve(on=device, mem_fraction=0.5), _resolve(on=device, mem_fraction=0.9)
    assert low.num_pages < high.num_pages


def _fixed_bytes(max_running: int) -> int:
    footprint = resolve_footprint(EngineOptions(), HYBRID, None, CPU)
    return footprint.weight_bytes + footprint.pool_bytes(num_requests=max_running, num_pages=0)


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


def test_more_than_one_mtp_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 MTP layers, one is supported"):
        _resolve(replace(MTP, num_mtp_layers=2), has_mtp=True)
