"""What options want of memory, and what they get; `config/budget.py` divides it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gapless.config.budget import DEFAULT_SNAPSHOT_FRACTION, Demand, Division, divide
from gapless.config.checks import check_effective, check_left_out, check_ranges
from gapless.config.options import choose
from gapless.core.footprint import Footprint, human
from gapless.core.parallel import check_world_size
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.config.config import DeviceInfo
    from gapless.config.options import EngineOptions
    from gapless.core.architecture import Architecture

logger = logging.getLogger(__name__)


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
    check_ranges(options)
    check_world_size(architecture, options.tp)
    check_effective(options, architecture, device)
    dtype = _dtype(options, checkpoint_dtype, on_gpu=device.kind == "cuda")
    return Footprint(
        architecture=architecture,
        device=device.kind,
        dtype=dtype,
        ssm_dtype=_ssm_dtype(options, architecture, dtype),
        page_size=choose("page_size", options.page_size, 16),
        replay_len=choose("linear_replayssm_cache_len", options.linear_replayssm_cache_len, 16),
        max_window=1,
        world_size=options.tp,
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


def demand(options: EngineOptions, footprint: Footprint, device: DeviceInfo) -> Demand:
    """Decide what memory is wanted for, whether there is enough of it or not.

    Raises:
        ConfigError: snapshot_fraction has no effect.
    """
    asked = options.snapshot_fraction
    why = ""
    if options.disable_prefix_cache:
        why = "with disable_prefix_cache"
    elif footprint.row_bytes == 0:
        why = f"on {footprint.architecture.model_type}, which resumes a prefix from its pages alone"
    if why:
        check_left_out(options, ("snapshot_fraction",), why)
    elif asked is None:
        logger.info("snapshot_fraction = %.2f (default)", DEFAULT_SNAPSHOT_FRACTION)
    default_running = 256 if device.kind == "cuda" else 64
    return Demand(
        budget_bytes=memory_budget(options, device),
        max_running=choose("max_running_requests", options.max_running_requests, default_running),
        max_model_len=context_len(options, footprint.architecture),
        keeps_len=options.max_model_len is not None,
        uses_prefix_cache=not options.disable_prefix_cache,
        snapshot_fraction=DEFAULT_SNAPSHOT_FRACTION if asked is None else asked,
    )


def memory_budget(options: EngineOptions, device: DeviceInfo) -> int:
    """Bytes that weights, state and KV pages may take together."""
    fraction = options.mem_fraction
    if fraction is None:
        fraction = 0.9 if device.kind == "cuda" else 0.5
        logger.info("mem_fraction = %.2f (default)", fraction)
    return int(device.free_bytes * fraction)


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


def resolve_division(options: EngineOptions, footprint: Footprint, device: DeviceInfo) -> Division:
    """Divide the memory, and log how.

    Raises:
        ConfigError: not even one request fits, or an option has no effect or cannot be honoured.
    """
    wanted = demand(options, footprint, device)
    found = divide(footprint, wanted)
    _report(options, wanted, found)
    return found


def _report(options: EngineOptions, wanted: Demand, found: Division) -> None:
    """Log how memory is divided, and warn of what had to be less than was wanted."""
    sizes = found.footprint
    left = found.budget_bytes - sizes.weight_bytes - sizes.fixed_bytes
    if found.max_running < wanted.max_running:
        logger.warning(
            "max_running_requests = %d instead of %d: each takes %s of state and rings, and "
            "weights leave %s, also for the pages of a long request; raise mem_fraction, or set a "
            "lower max_model_len",
            found.max_running, wanted.max_running, human(sizes.request_bytes), human(left),
        )  # fmt: skip
    if found.max_model_len < wanted.max_model_len:
        logger.warning(
            "max_model_len = %d instead of %d: the memory holds %d pages of %d tokens",
            found.max_model_len, wanted.max_model_len, found.num_pages, sizes.page_size,
        )  # fmt: skip
    if wanted.uses_prefix_cache and not found.uses_prefix_cache:
        _report_no_snapshots(options, wanted, found)
    for part in found.parts:
        logger.info("memory: %-13s %s", part.name, part)


def _report_no_snapshots(options: EngineOptions, wanted: Demand, found: Division) -> None:
    sizes = found.footprint
    left = found.budget_bytes - sizes.weight_bytes - sizes.fixed_bytes
    left -= found.max_running * sizes.request_bytes
    reason = (
        f"one state snapshot takes {human(sizes.row_bytes)}, and {human(left)} are left for "
        f"snapshots and pages, {wanted.snapshot_fraction} of them for snapshots at most"
    )
    remedy = "raise mem_fraction, or lower max_running_requests or max_model_len"
    if options.snapshot_fraction is not None:
        raise ConfigError(
            f"snapshot_fraction={options.snapshot_fraction} gives no snapshot: {reason}; {remedy}"
        )
    logger.warning("the prefix cache is off: %s; %s", reason, remedy)


def resolve_host_tier(
    options: EngineOptions, footprint: Footprint, division: Division
) -> tuple[int, int]:
    """Pages and rows of the host tier, in the proportion that snapshots and pages have by option.

    Raises:
        ConfigError: not even the shortest key fits, or there is no cache to have a tier.
    """
    asked = options.host_cache_gb
    if not division.uses_prefix_cache:
        check_left_out(options, ("host_cache_gb",), "without a prefix cache")
    if not asked:
        return 0, 0
    num_bytes = int(asked * 2**30) // options.tp
    fraction = options.snapshot_fraction or DEFAULT_SNAPSHOT_FRACTION
    rows = int(num_bytes * fraction) // footprint.row_bytes if footprint.row_bytes else 0
    left = num_bytes - rows * footprint.row_bytes
    # without attention layers a page is a number only, and rows are what is scarce
    pages = left // footprint.page_bytes if footprint.page_bytes else max(1, rows) * 4096
    if not pages or (footprint.row_bytes and not rows):
        raise ConfigError(
            f"host_cache_gb={asked} holds {rows} snapshots of {human(footprint.row_bytes)} and "
            f"{pages} pages of {human(footprint.page_bytes)}; want at least one of each: raise it"
        )
    logger.info("host tier = %d pages, %d snapshots (%s)", pages, rows, human(num_bytes))
    return pages, rows
