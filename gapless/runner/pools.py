"""Device memory of a model: KV pools, state rows and rings, allocated once.

Layers whose memory has the same shape lie in one stacked pool, so that what happens to all of them
is one call; each layer sees its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.core.architecture import Architecture, LayerSpec, conv_ring_capacity, ring_capacity
from gapless.core.footprint import mtp_mixer
from gapless.core.parallel import architecture_of_rank
from gapless.core.specs.attention import PagedSpec
from gapless.layers.batch import LayerMemory, LinearMemory
from gapless.ops.linear_replay import ReplayMemory
from gapless.ops.step_metadata import Geometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gapless.config.config import Config
    from gapless.core.specs.linear import LinearSpec
    from gapless.layers.placement import Placement


def make_geometry(architecture: Architecture, config: Config) -> Geometry:
    """Fix the sizes of the device memory."""
    width = architecture.conv_width
    return Geometry(
        num_slots=config.max_running_requests,
        num_pages=config.num_pages,
        page_size=config.page_size,
        num_state_rows=config.num_state_rows,
        replay_len=config.replay_len,
        ring_len=ring_capacity(config.replay_len, config.max_window),
        conv_width=width,
        conv_ring_len=conv_ring_capacity(width, config.max_window),
        max_window=config.max_window,
    )


@dataclass(frozen=True)
class Pools:
    """All memory that layers address by page, slot and state row."""

    kv: tuple[Tensor, ...]
    """[n, entries, *entry] each: n layers with entries of one shape, the MTP layers among them."""
    linear: tuple[LinearMemory, ...]
    """The same for linear layers: every tensor has n in front."""
    linear_specs: tuple[LinearSpec, ...]
    """What the layers of each such pool have in common."""
    layers: tuple[LayerMemory, ...]
    """Each layer's part: of a layer that mixes in several ways one for each, of one without a mixer
    none."""
    mtp_layers: tuple[Tensor, ...]
    """Each MTP layer's part, addressed by the same pages."""
    trunk_kv: tuple[Tensor, ...]
    """`kv` without the MTP layers."""


def make_pools(
    architecture: Architecture,
    geometry: Geometry,
    place: Placement,
    ssm_dtype: torch.dtype,
    *,
    has_mtp: bool,
) -> Pools:
    """Allocate every layer's memory on one rank; what is not a zero entry may hold anything."""
    own = architecture_of_rank(architecture, place.world_size)
    specs = [spec for layer in own.layers for spec in layer.memories]
    num_trunk = len(specs)
    if has_mtp:
        specs += [mtp_mixer(own)] * own.num_mtp_layers
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(specs):
        by_shape.setdefault(_shape(spec), []).append(index)
    kv: list[Tensor] = []
    trunk_kv: list[Tensor] = []
    linear: list[LinearMemory] = []
    linear_specs: list[LinearSpec] = []
    parts: dict[int, Tensor | LinearMemory] = {}
    for members in by_shape.values():
        spec = specs[members[0]]
        if isinstance(spec, PagedSpec):
            kv.append(_kv_pool(spec, geometry, place, len(members)))
            parts |= dict(zip(members, kv[-1].unbind(), strict=True))
            # MTP layers come last
            trunk_kv.append(kv[-1][: sum(index < num_trunk for index in members)])
        else:
            linear.append(_linear_memory(spec, geometry, place, ssm_dtype, len(members)))
            linear_specs.append(spec)
            parts |= dict(zip(members, _layers_of(linear[-1]), strict=True))
    in_order = iter(parts[index] for index in range(num_trunk))
    return Pools(
        kv=tuple(kv),
        linear=tuple(linear),
        linear_specs=tuple(linear_specs),
        layers=tuple(_of_layer(layer, in_order) for layer in own.layers),
        mtp_layers=tuple(
            pool
            for index in range(num_trunk, len(specs))
            for pool in [parts[index]]
            if isinstance(pool, Tensor)
        ),
        trunk_kv=tuple(pool for pool in trunk_kv if pool.shape[0]),
    )


def _of_layer(layer: LayerSpec, parts: Iterator[Tensor | LinearMemory]) -> LayerMemory:
    """Take a layer's memory off the front of all parts."""
    own = tuple(next(parts) for _ in layer.memories)
    return own[0] if len(own) == 1 else own


def _shape(spec: PagedSpec | LinearSpec) -> tuple[object, ...]:
    """What layers of one pool have in common: shapes, and how keys are normalised."""
    if isinstance(spec, PagedSpec):
        return spec.entry_shape
    return (
        spec.num_key_heads, spec.key_dim, spec.num_value_heads, spec.value_dim, spec.decay_dim,
        spec.conv_channels, spec.l2norm_eps,
    )  # fmt: skip


def _kv_pool(spec: PagedSpec, geometry: Geometry, place: Placement, count: int) -> Tensor:
    entries = (geometry.num_pages + 1) * geometry.page_size
    return place.weight(count, entries, *spec.entry_shape)


def _linear_memory(
    spec: LinearSpec, geometry: Geometry, place: Placement, ssm_dtype: torch.dtype, count: int
) -> LinearMemory:
    heads, entries = spec.num_value_heads, geometry.ring_zero + 1
    state = (count, geometry.zero_row + 1, heads, spec.value_dim, spec.key_dim)
    memory = LinearMemory(
        conv_ring=place.weight(count, geometry.num_conv_entries, spec.conv_channels),
        replay=ReplayMemory(
            checkpoint=torch.empty(state, dtype=ssm_dtype, device=place.device),
            d_ring=place.acc_weight(count, entries, heads, spec.value_dim),
            k_ring=place.weight(count, entries, spec.num_key_heads, spec.key_dim),
            g_ring=place.acc_weight(count, entries, heads, spec.decay_dim),
        ),
    )
    memory.conv_ring[:, geometry.conv_zero].zero_()
    memory.replay.checkpoint[:, geometry.zero_row].zero_()
    for ring in (memory.replay.d_ring, memory.replay.k_ring, memory.replay.g_ring):
        ring[:, geometry.ring_zero].zero_()
    return memory


def _layers_of(stacked: LinearMemory) -> Sequence[LinearMemory]:
    """Views of the layers of a stacked pool."""
    replay = stacked.replay
    parts = zip(
        stacked.conv_ring, replay.checkpoint, replay.d_ring, replay.k_ring, replay.g_ring,
        strict=True,
    )  # fmt: skip
    return [LinearMemory(conv, ReplayMemory(*state)) for conv, *state in parts]
