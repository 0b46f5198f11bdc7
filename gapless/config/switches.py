"""Optimisations that can be turned off one by one, and what of them has no effect together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from gapless.errors import ConfigError

if TYPE_CHECKING:
    from gapless.config.config import DeviceInfo
    from gapless.config.options import EngineOptions

logger = logging.getLogger(__name__)


class Graphs(StrEnum):
    """What of a decode step is one graph."""

    STEP = "step"
    """As many stages in a row as have no seam between them."""
    STAGE = "stage"
    NONE = "none"
    """Steps are not captured, and nothing is kept from one to the next."""


@dataclass(frozen=True)
class Switches:
    """How steps are launched; tokens are the same with all of them."""

    attention_backend: str
    """As asked for, auto included."""
    runs_ahead: bool
    """Whether a step is launched before the one before it is read."""
    graphs: Graphs
    fuses_metadata: bool
    """Whether one kernel makes a decode step's index tensors, where there is one."""
    uses_plan_stream: bool
    """Whether host plans of verify run on a stream of their own."""
    has_float8_head: bool
    """Whether drafts are read from a copy of the vocabulary head in float8."""


def wants_float8_head(
    options: EngineOptions, device: DeviceInfo, dtype: str, *, drafter: str
) -> bool:
    """Decide whether drafts are read from a copy of the vocabulary head in float8.

    Args: dtype: type of the model's own head.

    Raises:
        ConfigError: the option has no effect, or the device cannot do it.
    """
    asked = options.draft_head_dtype
    if drafter != "mtp":
        if asked != "auto":
            raise ConfigError(
                f"draft_head_dtype={asked} has no effect without the MTP drafter, the only one "
                "that reads a head; leave it out"
            )
        return False
    if asked == "auto":
        is_chosen = device.converts_float8 and dtype == "bfloat16"
        logger.info(
            "draft_head_dtype = %s (the model is %s, and %s %s float8)",
            "fp8" if is_chosen else "model", dtype, device.kind,
            "converts" if device.converts_float8 else "does not convert",
        )  # fmt: skip
        return is_chosen
    if asked == "fp8" and device.kind == "cuda" and not device.converts_float8:
        raise ConfigError(
            "draft_head_dtype=fp8 wants a GPU that converts float8 (sm_89 and later), which this "
            "one is not; use draft_head_dtype=model"
        )
    return asked == "fp8"


def resolve_switches(
    options: EngineOptions, *, device: str, drafter: str, has_float8_head: bool
) -> Switches:
    """Decide how steps are launched.

    Args: has_float8_head: what `wants_float8_head` said.

    Raises:
        ConfigError: an option has no effect on this device or with another option.
    """
    if device == "cpu" and options.disable_fused_metadata:
        raise ConfigError(
            "disable_fused_metadata has no effect on cpu, which has no such kernel; leave it out"
        )
    if options.disable_cuda_graph and options.stage_graphs:
        raise ConfigError(
            "stage_graphs has no effect with disable_cuda_graph; leave out one of them"
        )
    if options.plan_stream and drafter == "none":
        raise ConfigError(
            "plan_stream has no effect without a drafter: plans overlap drafting; leave it out"
        )
    if options.plan_stream and options.disable_overlap_schedule:
        raise ConfigError(
            "plan_stream has no effect with disable_overlap_schedule: a step is planned once the "
            "one before it is over; leave out one of them"
        )
    if options.plan_stream and options.disable_cuda_graph:
        raise ConfigError(
            "plan_stream has no effect with disable_cuda_graph: launching takes longer than "
            "planning; leave out one of them"
        )
    graphs = Graphs.STAGE if options.stage_graphs else Graphs.STEP
    return Switches(
        attention_backend=options.attention_backend,
        runs_ahead=not options.disable_overlap_schedule,
        graphs=Graphs.NONE if options.disable_cuda_graph else graphs,
        fuses_metadata=not options.disable_fused_metadata,
        uses_plan_stream=options.plan_stream,
        has_float8_head=has_float8_head,
    )
