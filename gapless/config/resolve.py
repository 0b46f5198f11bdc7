"""Options, model and device in; one frozen `Config` out, with every automatic choice logged."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from gapless.config.options import EngineOptions
from gapless.core.footprint import Footprint
from gapless.core.parallel import check_world_size
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.architecture import Architecture

logger = logging.getLogger(__name__)

# tokens drafted per step where nothing else is asked for, and at most
DEFAULT_DRAFTS = 3
MOST_DRAFTS = 15


@dataclass(frozen=True)
class DeviceInfo:
    """What the engine needs to know about the device of one rank, measured by the caller."""

    kind: str  # "cpu" or "cuda"
    free_bytes: int
    num_threads: int


@dataclass(frozen=True)
class Config:
    """Every setting of a running engine, decided; nothing here changes afterwards."""

    device: str
    tp: int
    """Ranks; memory and threads are those of one."""
    dtype: str
    ssm_dtype: str
    max_model_len: int
    max_running_requests: int
    chunked_prefill_size: int
    page_size: int
    num_pages: int
    replay_len: int  # L
    max_window: int  # W_max
    num_threads: int
    drafter: str  # "none", "mtp" or "ngram"
    simulated_acceptance: float | None
    buckets: tuple[int, ...]
    """Batch sizes that decode steps are padded to, ascending; the last is max_running_requests."""


def resolve(
    options: EngineOptions,
    architecture: Architecture,
    checkpoint_dtype: str | None,
    device: DeviceInfo,
    *,
    has_mtp_weights: bool,
) -> Config:
    """Decide every setting.

    Args:
        checkpoint_dtype: type the checkpoint declares for its weights, if it does.
        has_mtp_weights: whether the checkpoint's MTP layer can be loaded.

    Raises:
        ConfigError: an option is out of range, has no effect on this model or device, or does
            not fit the memory.
    """
    drafter, num_drafts = _drafting(options, architecture, has_mtp_weights=has_mtp_weights)
    footprint = replace(
        resolve_footprint(options, architecture, checkpoint_dtype, device),
        max_window=1 + num_drafts,
        uses_mtp=drafter == "mtp",
    )
    on_gpu = device.kind == "cuda"
    max_running = _choose(
        "max_running_requests", options.max_running_requests, 256 if on_gpu else 64
    )
    num_pages, max_model_len = _size_pool(
        options,
        footprint,
        max_model_len=context_len(options, architecture),
        max_running=max_running,
        device=device,
    )
    return Config(
        device=device.kind,
        tp=options.tp,
        dtype=footprint.dtype,
        ssm_dtype=footprint.ssm_dtype,
        max_model_len=max_model_len,
        max_running_requests=max_running,
        chunked_prefill_size=_choose(
            "chunked_prefill_size", options.chunked_prefill_size, 8192 if on_gpu else 512
        ),
        page_size=footprint.page_size,
        num_pages=num_pages,
        replay_len=footprint.replay_len,
        max_window=footprint.max_window,
        num_threads=_choose("num_threads", options.num_threads, device.num_threads),
        drafter=drafter,
        simulated_acceptance=options.speculative_simulate_acceptance,
        buckets=batch_buckets(max_running),
    )


def resolve_footprint(
    options: EngineOptions,
    architecture: Architecture,
    checkpoint_dtype: str | None,
    device: DeviceInfo,
) -> Footprint:
    """Decide what sizes in memory depend on, but for requests, pages and drafts: the window is 1.

    Raises:
        ConfigError: an option is out of range, or has no effect on this model or device.
    """
    _check_ranges(options)
    check_world_size(architecture, options.tp)
    _check_effective(options, architecture, device)
    dtype = _dtype(options, checkpoint_dtype, on_gpu=device.kind == "cuda")
    return Footprint(
        architecture=architecture,
        device=device.kind,
        dtype=dtype,
        ssm_dtype=_ssm_dtype(options, architecture, dtype),
        page_size=_choose("page_size", options.page_size, 16),
        replay_len=_choose("linear_replayssm_cache_len", options.linear_replayssm_cache_len, 16),
        max_window=1,
        world_size=options.tp,
    )


def _drafting(
    options: EngineOptions, architecture: Architecture, *, has_mtp_weights: bool
) -> tuple[str, int]:
    """Decide the drafter and how many tokens it drafts per step."""
    asked, num_steps = options.speculative_algorithm, options.speculative_num_steps
    _check_drafting(options)
    drafter: str = asked
    if asked == "auto":
        drafter = "mtp" if has_mtp_weights and num_steps != 0 else "none"
        found = "has" if has_mtp_weights else "has no"
        logger.info("speculative_algorithm = %s (the checkpoint %s MTP weights)", drafter, found)
    if drafter == "mtp" and not has_mtp_weights:
        raise ConfigError(
            f"speculative_algorithm=mtp: this checkpoint of {architecture.model_type} has no MTP "
            "weights (mtp.fc.weight, mtp.norm.weight, mtp.layers.0.*); use "
            "speculative_algorithm=ngram, or a checkpoint that has them"
        )
    if drafter == "mtp" and architecture.num_mtp_layers != 1:
        raise ConfigError(
            f"speculative_algorithm=mtp: the model has {architecture.num_mtp_layers} MTP layers, "
            "one is supported; use speculative_algorithm=ngram or none"
        )
    if drafter == "none":
        if num_steps:
            raise ConfigError(
                f"speculative_num_steps={num_steps} has no effect without a drafter; use "
                "speculative_algorithm=ngram, or leave it out"
            )
        if options.speculative_simulate_acceptance is not None:
            raise ConfigError(
                "speculative_simulate_acceptance has no effect without a drafter; leave it out"
            )
        return drafter, 0
    return drafter, _choose("speculative_num_steps", num_steps, DEFAULT_DRAFTS)


def _check_drafting(options: EngineOptions) -> None:
    asked, num_steps = options.speculative_algorithm, options.speculative_num_steps
    if num_steps is not None and (
        isinstance(num_steps, bool)
        or not isinstance(num_steps, int)
        or not 0 <= num_steps <= MOST_DRAFTS
    ):
        raise ConfigError(f"speculative_num_steps={num_steps!r}: want 0 to {MOST_DRAFTS}")
    if asked in ("mtp", "ngram") and num_steps == 0:
        raise ConfigError(
            f"speculative_algorithm={asked} drafts nothing with speculative_num_steps=0; leave out "
            "the one or the other"
        )
    wanted = options.speculative_simulate_acceptance
    if wanted is None:
        return
    if options.load_format != "dummy":
        raise ConfigError(
            "speculative_simulate_acceptance changes the tokens: it is for benchmarks with "
            "load_format=dummy only"
        )
    most = 1 + (DEFAULT_DRAFTS if num_steps is None else num_steps)
    if not isinstance(wanted, (int, float)) or not 1 <= wanted <= most:
        raise ConfigError(
            f"speculative_simulate_acceptance={wanted!r}: want 1 to {most} tokens per step"
        )


def num_ranks(options: EngineOptions) -> int:
    """Processes that the model is split over.

    Raises:
        ConfigError: it is no integer of at least 1.
    """
    _check_at_least_1("tp", options.tp)
    return options.tp


def memory_budget(options: EngineOptions, device: DeviceInfo) -> int:
    """Bytes that weights, state and KV pages may take together."""
    fraction = options.mem_fraction
    if fraction is None:
        fraction = 0.9 if device.kind == "cuda" else 0.5
        logger.info("mem_fraction = %.2f (default)", fraction)
    return int(device.free_bytes * fraction)


def batch_buckets(max_running: int) -> tuple[int, ...]:
    """Batch sizes to pad decode steps to: 1, 2, 4, 8, then every 8."""
    sizes = [1, 2, 4, *range(8, max_running, 8)]
    return (*(size for size in sizes if size < max_running), max_running)


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `count` rows."""
    return next(size for size in buckets if size >= count)


def _choose(name: str, asked: int | None, default: int) -> int:
    if asked is not None:
        return asked
    logger.info("%s = %d (default)", name, default)
    return default


def _check_ranges(options: EngineOptions) -> None:
    for name in (
        "max_model_len",
        "max_running_requests",
        "chunked_prefill_size",
        "page_size",
        "linear_replayssm_cache_len",
        "num_threads",
    ):
        value = _field(options, name)
        if value is not None:
            _check_at_least_1(name, value)
    num_ranks(options)
    if options.max_model_len == 1:
        raise ConfigError("max_model_len=1: want at least 2, one token of prompt and one of output")
    fraction = options.mem_fraction
    if fraction is not None and not (
        isinstance(fraction, (int, float)) and math.isfinite(fraction) and 0 < fraction <= 1
    ):
        raise ConfigError(f"mem_fraction={fraction!r}: want a number above 0 and at most 1")
    hints = get_type_hints(EngineOptions)
    for name in ("load_format", "device", "dtype", "ssm_dtype", "speculative_algorithm"):
        value, allowed = _field(options, name), get_args(hints[name])
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}: want one of {', '.join(allowed)}")


def _check_at_least_1(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: want an integer of at least 1")


def _field(options: EngineOptions, name: str) -> Any:
    return vars(options)[name]


def _check_effective(
    options: EngineOptions, architecture: Architecture, device: DeviceInfo
) -> None:
    if not architecture.linear_layers:
        for name, default in (("ssm_dtype", "auto"), ("linear_replayssm_cache_len", None)):
            if _field(options, name) != default:
                raise ConfigError(
                    f"{name}={_field(options, name)!r} has no effect: "
                    f"{architecture.model_type} has no linear-attention layer; leave it out"
                )
    if not architecture.attention_layers and options.page_size is not None:
        raise ConfigError(
            f"page_size={options.page_size} has no effect: {architecture.model_type} has no "
            "attention layer; leave it out"
        )
    if device.kind != "cpu" and options.num_threads is not None:
        raise ConfigError(
            f"num_threads={options.num_threads} has no effect on {device.kind}; leave it out"
        )
    if options.revision is not None and options.model is None:
        raise ConfigError(
            f"revision={options.revision!r} has no effect on the bundled model; name a hub model"
        )


def _dtype(options: EngineOptions, checkpoint_dtype: str | None, *, on_gpu: bool) -> str:
    if options.dtype != "auto":
        if on_gpu and options.dtype == "float64":
            raise ConfigError(
                "dtype=float64 is for the CPU reference path; use float32 or bfloat16"
            )
        return options.dtype
    if not on_gpu:
        logger.info("dtype = float32 (the CPU's fastest type)")
        return "float32"
    dtype = checkpoint_dtype if checkpoint_dtype in ("float32", "bfloat16") else "bfloat16"
    logger.info("dtype = %s (the checkpoint says %s)", dtype, checkpoint_dtype)
    return dtype


def _ssm_dtype(options: EngineOptions, architecture: Architecture, dtype: str) -> str:
    if options.ssm_dtype != "auto":
        return options.ssm_dtype
    chosen = "float64" if dtype == "float64" else "float32"
    if architecture.linear_layers:
        logger.info("ssm_dtype = %s (rounding must not depend on chunking)", chosen)
    return chosen


def context_len(options: EngineOptions, architecture: Architecture) -> int:
    """Most tokens of one request, as far as the model goes; memory may hold less.

    Raises:
        ConfigError: more is asked for than the model was trained for.
    """
    asked = options.max_model_len
    if asked is None:
        logger.info(
            "max_model_len = %d (what the model was trained for)", architecture.max_position
        )
        return architecture.max_position
    if asked > architecture.max_position:
        raise ConfigError(
            f"max_model_len={asked} is more than the {architecture.max_position} positions of "
            f"{architecture.model_type}; ask for at most that"
        )
    return asked


def _size_pool(
    options: EngineOptions,
    footprint: Footprint,
    *,
    max_model_len: int,
    max_running: int,
    device: DeviceInfo,
) -> tuple[int, int]:
    """Pages that the budget allows, never more than all requests together can use."""
    budget = memory_budget(options, device)
    fixed = footprint.weight_bytes + footprint.pool_bytes(num_requests=max_running, num_pages=0)
    useful = max_running * footprint.num_pages(max_model_len)
    affordable = (budget - fixed) // footprint.page_bytes if footprint.page_bytes else useful
    num_pages = min(useful, affordable) if budget >= fixed else 0
    page_size, longest = footprint.page_size, footprint.longest_request(num_pages)
    if longest >= max_model_len:
        reason = "all requests at full length" if num_pages == useful else "what the memory holds"
        logger.info("num_pages = %d of %d tokens (%s)", num_pages, page_size, reason)
        return num_pages, max_model_len
    if options.max_model_len is None and longest >= 2:
        logger.warning(
            "max_model_len = %d instead of %d: the memory holds %d pages of %d tokens",
            longest, max_model_len, num_pages, page_size,
        )  # fmt: skip
        return num_pages, longest
    needed = fixed + footprint.num_pages(max_model_len) * footprint.page_bytes
    raise ConfigError(
        f"one request of {max_model_len} tokens needs {needed / 2**20:.1f} MiB with weights and "
        f"state, the budget is {budget / 2**20:.1f} MiB; raise mem_fraction, or lower "
        "max_model_len or max_running_requests"
    )
