"""Options that are out of range, or that have no effect on a model or device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args, get_type_hints

from gapless.config.options import EngineOptions
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.config import DeviceInfo
    from gapless.core.architecture import Architecture


def check_ranges(options: EngineOptions) -> None:
    """Check what can be said of options by themselves, but for those of drafting.

    Raises:
        ConfigError: one is of the wrong type, or out of range.
    """
    for name in (
        "max_model_len",
        "max_running_requests",
        "max_queued_requests",
        "chunked_prefill_size",
        "page_size",
        "linear_replayssm_cache_len",
        "num_threads",
    ):
        value = vars(options)[name]
        if value is not None:
            check_at_least_1(name, value)
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
        value = vars(options)[name]
        if hint is bool and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r}: want True or False")
    for name in (
        "load_format", "device", "dtype", "ssm_dtype", "attention_backend",
        "speculative_algorithm", "draft_head_dtype",
    ):  # fmt: skip
        value, allowed = vars(options)[name], get_args(hints[name])
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}: want one of {', '.join(allowed)}")


def check_effective(options: EngineOptions, architecture: Architecture, device: DeviceInfo) -> None:
    """Check that options do something with this model and on this device.

    Raises:
        ConfigError: one does not.
    """
    family = architecture.model_type
    if not architecture.linear_layers:
        why = f"on {family}, which has no linear-attention layer"
        check_left_out(options, ("ssm_dtype", "linear_replayssm_cache_len"), why)
    if not architecture.attention_layers:
        why = f"on {family}, which has no attention layer"
        check_left_out(options, ("page_size", "attention_backend"), why)
    if device.kind != "cpu":
        check_left_out(options, ("num_threads",), f"on {device.kind}")
    if options.revision is not None and options.model is None:
        raise ConfigError(
            f"revision={options.revision!r} has no effect on the bundled model; name a hub model"
        )


def num_ranks(options: EngineOptions) -> int:
    """Processes that the model is split over.

    Raises:
        ConfigError: it is no integer of at least 1.
    """
    check_at_least_1("tp", options.tp)
    return options.tp


def check_left_out(options: EngineOptions, names: Sequence[str], why: str) -> None:
    """Check that options that have no effect are as they are when left out.

    Args: why: what follows "has no effect", such as "without a drafter".

    Raises:
        ConfigError: one of them is set.
    """
    for name in names:
        value = vars(options)[name]
        if value != vars(EngineOptions)[name]:
            raise ConfigError(f"{name}={value!r} has no effect {why}; leave it out")


def check_at_least_1(name: str, value: object) -> None:
    """Check an option that counts something.

    Raises:
        ConfigError: it is no integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: want an integer of at least 1")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
