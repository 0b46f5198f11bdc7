"""Bytes of the pools that a config asks for, counted without taking the memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from gapless.layers.placement import Placement
from gapless.runner.pools import make_geometry, make_pools
from gapless.speculative.mtp import MtpDrafter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gapless.config.config import Config
    from gapless.core.architecture import Architecture


def pool_bytes(spec: Architecture, config: Config) -> int:
    """Allocate what outlives a step on one rank, but for the slot table, and count it."""
    place = Placement(torch.device("meta"), vars(torch)[config.dtype], config.tp - 1, config.tp)
    geometry = make_geometry(spec, config)
    has_mtp = config.drafter == "mtp"
    pools = make_pools(spec, geometry, place, vars(torch)[config.ssm_dtype], has_mtp=has_mtp)
    found = [*pools.kv, *(t for memory in pools.linear for t in tensors(memory))]
    if has_mtp:
        drafter = MtpDrafter(
            SimpleNamespace(architecture=spec), None, pools.mtp_layers, backend=None,
            page_table=None, geometry=geometry, place=place,
        )  # fmt: skip
        found += [value for value in vars(drafter).values() if isinstance(value, torch.Tensor)]
    return num_bytes(found)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of nested dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in vars(value).values() for t in tensors(part)]


def num_bytes(found: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors together."""
    return sum(t.nbytes for t in found)
