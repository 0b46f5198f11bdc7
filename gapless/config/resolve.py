"""Options, model and device in; one frozen `Config` out, with every automatic choice logged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.config.buckets import batch_buckets, prefill_buckets
from gapless.config.config import Config
from gapless.config.drafting import resolve_drafting
from gapless.config.memory import resolve_division, resolve_footprint, resolve_host_tier
from gapless.config.options import choose
from gapless.config.switches import resolve_switches, wants_float8_head

if TYPE_CHECKING:
    from gapless.config.config import DeviceInfo
    from gapless.config.options import EngineOptions
    from gapless.core.architecture import Architecture

DEFAULT_QUEUE = 8192


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
    drafter, max_window, tree = resolve_drafting(
        options, architecture, has_mtp_weights=has_mtp_weights
    )
    footprint = resolve_footprint(options, architecture, checkpoint_dtype, device)
    footprint = replace(
        footprint,
        max_window=max_window,
        tree=tree,
        uses_mtp=drafter == "mtp",
        has_float8_head=wants_float8_head(options, device, footprint.dtype, drafter=drafter),
    )
    on_gpu = device.kind == "cuda"
    division = resolve_division(options, footprint, device)
    num_host_pages, num_host_rows = resolve_host_tier(options, footprint, division)
    chunked_prefill_size = choose(
        "chunked_prefill_size", options.chunked_prefill_size, 8192 if on_gpu else 512
    )
    return Config(
        device=device.kind,
        tp=options.tp,
        dtype=footprint.dtype,
        ssm_dtype=footprint.ssm_dtype,
        max_model_len=division.max_model_len,
        max_running_requests=division.max_running,
        chunked_prefill_size=chunked_prefill_size,
        page_size=footprint.page_size,
        num_pages=division.num_pages,
        num_state_rows=division.num_state_rows,
        uses_prefix_cache=division.uses_prefix_cache,
        num_host_pages=num_host_pages,
        num_host_rows=num_host_rows,
        max_queued_requests=choose(
            "max_queued_requests", options.max_queued_requests, DEFAULT_QUEUE
        ),
        page_bytes=footprint.page_bytes,
        row_bytes=footprint.row_bytes,
        replay_len=footprint.replay_len,
        max_window=max_window,
        tree=tree,
        num_threads=choose("num_threads", options.num_threads, device.num_threads),
        drafter=drafter,
        switches=resolve_switches(
            options,
            device=device.kind,
            drafter=drafter,
            has_float8_head=footprint.has_float8_head,
        ),
        simulated_acceptance=options.speculative_simulate_acceptance,
        buckets=batch_buckets(division.max_running),
        prefill_buckets=prefill_buckets(device.kind, chunked_prefill_size),
    )
