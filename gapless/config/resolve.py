"""Options, model and device in; one frozen `Config` out, with every automatic choice logged."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from gapless.config.budget import (
    DEFAULT_SNAPSHOT_FRACTION,
    Demand,
    Division,
    divide,
)
from gapless.config.options import EngineOptions
from gapless.config.switches import Switches, resolve_switches, wants_float8_head
from gapless.core.draft_shape import TreeShape, draft_reach
from gapless.core.footprint import Footprint, human
from gapless.core.parallel import check_world_size
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.architecture import Architecture

logger = logging.getLogger(__name__)

# tokens drafted per step where nothing else is asked for, and at most
DEFAULT_DRAFTS = 3
MOST_DRAFTS = 15
# tokens that a step verifies, at most and in a tree where nothing else is asked for
MOST_NODES = 1 + MOST_DRAFTS
DEFAULT_NODES = 8
# drafts that the passes of a step may go on from together: a bit of an integer for each
MOST_BEAM_NODES = 63
DEFAULT_QUEUE = 8192
PREFILL_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class DeviceInfo:
    """What the engine needs to know about the device of one rank, measured by the caller."""

    kind: str  # "cpu" or "cuda"
    free_bytes: int
    num_threads: int
    converts_float8: bool = False
    """Whether it is a GPU with instructions for that."""


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
    num_state_rows: int
    """Rows of running requests and of snapshots."""
    uses_prefix_cache: bool
    num_host_pages: int
    num_host_rows: int
    """Sizes of the cache's host tier; 0 pages: there is none."""
    max_queued_requests: int
    page_bytes: int
    """Bytes of one page; 0 without attention layers."""
    row_bytes: int
    """Bytes of one state row; 0 where a prefix is resumed from its pages alone."""
    replay_len: int  # L
    max_window: int  # W_max
    tree: TreeShape | None
    """How the drafts of a window branch; None: in a row."""
    num_threads: int
    drafter: str  # "none", "mtp" or "ngram"
    switches: Switches
    simulated_acceptance: float | None
    buckets: tuple[int, ...]
    """Batch sizes that decode steps are padded to, ascending; the last is max_running_requests."""
    prefill_buckets: tuple[int, ...]
    """Tokens that prefill chunks are padded to, ascending; longer ones are not."""


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
    drafter, max_window, tree = _drafting(options, architecture, has_mtp_weights=has_mtp_weights)
    footprint = resolve_footprint(options, architecture, checkpoint_dtype, device)
    footprint = replace(
        footprint,
        max_window=max_window,
        tree=tree,
        uses_mtp=drafter == "mtp",
        has_float8_head=wants_float8_head(options, device, footprint.dtype, drafter=drafter),
    )
    on_gpu = device.kind == "cuda"
    wanted = demand(options, footprint, device)
    division = divide(footprint, wanted)
    _report(options, wanted, division)
    num_host_pages, num_host_rows = _host_tier(options, footprint, division)
    chunked_prefill_size = _choose(
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
        max_queued_requests=_choose(
            "max_queued_requests", options.max_queued_requests, DEFAULT_QUEUE
        ),
        page_bytes=footprint.page_bytes,
        row_bytes=footprint.row_bytes,
        replay_len=footprint.replay_len,
        max_window=max_window,
        tree=tree,
        num_threads=_choose("num_threads", options.num_threads, device.num_threads),
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


def _host_tier(options: EngineOptions, footprint: Footprint, division: Division) -> tuple[int, int]:
    """Pages and rows of the host tier, in the proportion that snapshots and pages have by option.

    Raises:
        ConfigError: not even the shortest key fits, or there is no cache to have a tier.
    """
    asked = options.host_cache_gb
    if not asked:
        return 0, 0
    if not division.uses_prefix_cache:
        raise ConfigError(
            f"host_cache_gb={asked} has no effect without a prefix cache; leave it out"
        )
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
) -> tuple[str, int, TreeShape | None]:
    """Decide the drafter, how many tokens a step verifies, and how its drafts branch."""
    asked, num_steps = options.speculative_algorithm, options.speculative_num_steps
    check_drafting(options)
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
        return drafter, *window_shape(options, 0, drafter)
    num_steps = _choose("speculative_num_steps", num_steps, DEFAULT_DRAFTS)
    return drafter, *window_shape(options, num_steps, drafter)


def _check_no_window(options: EngineOptions) -> None:
    for name, default in (
        ("speculative_topk", 1),
        ("speculative_num_draft_tokens", None),
        ("speculative_simulate_acceptance", None),
    ):
        if _field(options, name) != default:
            raise ConfigError(
                f"{name}={_field(options, name)} has no effect without a drafter; leave it out"
            )


def window_shape(
    options: EngineOptions, num_steps: int, drafter: str
) -> tuple[int, TreeShape | None]:
    """Decide how many tokens a step verifies, and how its drafts branch.

    Raises:
        ConfigError: the options contradict each other, or have no effect on this drafter.
    """
    if drafter == "none":
        _check_no_window(options)
        return 1, None
    topk, asked = options.speculative_topk, options.speculative_num_draft_tokens
    if topk > 1 and drafter != "mtp":
        raise ConfigError(
            f"speculative_topk={topk}: speculative_algorithm={drafter} drafts chains only; use "
            "speculative_algorithm=mtp, or leave it out"
        )
    if topk == 1:
        if asked not in (None, num_steps + 1):
            raise ConfigError(
                f"speculative_num_draft_tokens={asked}: a chain of speculative_num_steps="
                f"{num_steps} has {num_steps + 1}, the newest token among them; leave it out, or "
                "set speculative_topk above 1 for a tree"
            )
        return num_steps + 1, None
    tree = TreeShape(num_steps, topk)
    # fewer nodes than the deepest path has would leave the last passes without effect, and fewer
    # than the root and its children would leave some of these
    least = 1 + max(num_steps, topk)
    most = min(MOST_NODES, 1 + tree.num_candidates)
    if least > most:
        raise ConfigError(
            f"speculative_topk={topk}: want at most {MOST_NODES - 1} drafts after a token; lower it"
        )
    if draft_reach(MOST_NODES, tree) > MOST_BEAM_NODES:
        raise ConfigError(
            f"speculative_topk={topk} with speculative_num_steps={num_steps} goes on from "
            f"{draft_reach(MOST_NODES, tree)} drafts; want at most {MOST_BEAM_NODES}: lower one"
        )
    default = min(max(DEFAULT_NODES, least), most)
    num_nodes = _choose("speculative_num_draft_tokens", asked, default)
    if not least <= num_nodes <= most:
        raise ConfigError(
            f"speculative_num_draft_tokens={num_nodes}: with speculative_topk={topk} and "
            f"speculative_num_steps={num_steps} want {least} to {most}, the newest token among them"
        )
    return num_nodes, tree


def check_drafting(options: EngineOptions) -> None:
    """Check options of speculation by themselves, whatever the model.

    Raises:
        ConfigError: one is out of range, or they contradict each other.
    """
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
    _check_tree_ranges(options)
    wanted = options.speculative_simulate_acceptance
    if wanted is None:
        return
    if options.speculative_topk > 1:
        raise ConfigError(
            "speculative_simulate_acceptance: a tree has no path that is sure to be as long as "
            "pretended; leave out speculative_topk"
        )
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


def _check_tree_ranges(options: EngineOptions) -> None:
    topk, num_nodes = options.speculative_topk, options.speculative_num_draft_tokens
    _check_at_least_1("speculative_topk", topk)
    if num_nodes is None:
        return
    _check_at_least_1("speculative_num_draft_tokens", num_nodes)
    if not 2 <= num_nodes <= MOST_NODES:
        raise ConfigError(
            f"speculative_num_draft_tokens={num_nodes}: want 2 to {MOST_NODES}, the newest token "
            "among them"
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
    """Batch sizes to pad decode steps to: 1, 2, 4, every 8 up to 64, then every 16."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_running, 16)]
    return (*(size for size in sizes if size < max_running), max_running)


def prefill_buckets(device: str, chunked_prefill_size: int) -> tuple[int, ...]:
    """Tokens to pad prefill chunks to: on a GPU powers of two, as far as launches may take longer
    than the work; on a CPU none, where padding is work and launches are nothing."""
    if device == "cpu":
        return ()
    longest = min(chunked_prefill_size, PREFILL_BUCKETS[-1])
    return (*(size for size in PREFILL_BUCKETS if size < longest), longest)


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest of some ascending sizes that holds `count`."""
    return buckets[bisect_left(buckets, count)]


def _choose(name: str, asked: int | None, default: int) -> int:
    if asked is not None:
        return asked
    logger.info("%s = %d (default)", name, default)
    return default


def _check_ranges(options: EngineOptions) -> None:
    for name in (
        "max_model_len",
        "max_running_requests",
        "max_queued_requests",
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
    if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
        raise ConfigError(f"mem_fraction={fraction!r}: want a number above 0 and at most 1")
    fraction = options.snapshot_fraction
    if fraction is not None and not (_is_number(fraction) and 0 < fraction < 1):
        raise ConfigError(f"snapshot_fraction={fraction!r}: want a number above 0 and below 1")
    host_gb = options.host_cache_gb
    if isinstance(host_gb, bool) or not (_is_number(host_gb) and host_gb >= 0):
        raise ConfigError(f"host_cache_gb={host_gb!r}: want GiB, 0 or more")
    hints = get_type_hints(EngineOptions)
    for name, hint in hints.items():
        value = _field(options, name)
        if hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: want True or False")
    for name in (
        "load_format", "device", "dtype", "ssm_dtype", "attention_backend",
        "speculative_algorithm", "draft_head_dtype",
    ):  # fmt: skip
        value, allowed = _field(options, name), get_args(hints[name])
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}: want one of {', '.join(allowed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


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
    if not architecture.attention_layers:
        for name, default in (("page_size", None), ("attention_backend", "auto")):
            if _field(options, name) != default:
                raise ConfigError(
                    f"{name}={_field(options, name)!r} has no effect: "
                    f"{architecture.model_type} has no attention layer; leave it out"
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
        why = f"{footprint.architecture.model_type} resumes a prefix from its pages alone"
    if asked is not None and why:
        raise ConfigError(f"snapshot_fraction={asked} has no effect: {why}; leave it out")
    if asked is None and not why:
        logger.info("snapshot_fraction = %.2f (default)", DEFAULT_SNAPSHOT_FRACTION)
    default_running = 256 if device.kind == "cuda" else 64
    return Demand(
        budget_bytes=memory_budget(options, device),
        max_running=_choose("max_running_requests", options.max_running_requests, default_running),
        max_model_len=context_len(options, footprint.architecture),
        keeps_len=options.max_model_len is not None,
        uses_prefix_cache=not options.disable_prefix_cache,
        snapshot_fraction=DEFAULT_SNAPSHOT_FRACTION if asked is None else asked,
    )


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
