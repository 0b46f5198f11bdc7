"""Device memory of a model: KV pools, state rows and rings, allocated once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.core.architecture import (
    Architecture,
    AttentionSpec,
    LinearSpec,
    conv_ring_capacity,
    ring_capacity,
)
from gapless.core.footprint import mtp_layer
from gapless.core.parallel import architecture_of_rank
from gapless.errors import UnsupportedModel
from gapless.layers.batch import LayerMemory, LinearMemory
from gapless.ops.linear_replay import ReplayMemory
from gapless.ops.step_metadata import Geometry

if TYPE_CHECKING:
    from gapless.config.resolve import Config
    from gapless.layers.placement import Placement


def make_geometry(architecture: Architecture, config: Config) -> Geometry:
    """Fix the sizes of the device memory."""
    widths = {spec.conv_width for spec in architecture.linear_layers} or {1}
    if len(widths) > 1:
        raise UnsupportedModel(
            f"linear layers with convolutions of different widths {sorted(widths)}; want one width"
        )
    width = widths.pop()
    return Geometry(
        num_slots=config.max_running_requests,
        num_pages=config.num_pages,
        page_size=config.page_size,
        num_state_rows=config.max_running_requests,
        replay_len=config.replay_len,
        ring_len=ring_capacity(config.replay_len, config.max_window),
        conv_width=width,
        conv_ring_len=conv_ring_capacity(width, config.max_window),
        max_window=config.max_window,
    )


def make_memory(
    architecture: Architecture, geometry: Geometry, place: Placement, ssm_dtype: torch.dtype
) -> list[LayerMemory]:
    """Allocate every layer's memory on one rank; what is not a zero entry may hold anything."""
    architecture = architecture_of_rank(architecture, place.world_size)
    return [
        _kv_pool(layer.mixer, geometry, place)
        if isinstance(layer.mixer, AttentionSpec)
        else _linear_memory(layer.mixer, geometry, place, ssm_dtype)
        for layer in architecture.layers
    ]


def make_mtp_memory(
    architecture: Architecture, geometry: Geometry, place: Placement
) -> list[LayerMemory]:
    """Allocate the KV pools of the MTP layers, addressed by the same pages."""
    mixer = mtp_layer(architecture_of_rank(architecture, place.world_size)).mixer
    assert isinstance(mixer, AttentionSpec), "an MTP layer attends"
    return [_kv_pool(mixer, geometry, place) for _ in range(architecture.num_mtp_layers)]


def _kv_pool(spec: AttentionSpec, geometry: Geometry, place: Placement) -> Tensor:
    entries = (geometry.num_pages + 1) * geometry.page_size
    return place.weight(entries, 2, spec.num_kv_heads, spec.head_dim)


def _linear_memory(
    spec: LinearSpec, geometry: Geometry, place: Placement, ssm_dtype: torch.dtype
) -> LinearMemory:
    heads, entries = spec.num_value_heads, geometry.ring_zero + 1
    rows = geometry.zero_row + 1
    memory = LinearMemory(
        conv_ring=place.weight(geometry.conv_zero + 1, spec.conv_channels),
        replay=ReplayMemory(
            checkpoint=torch.empty(
                rows, heads, spec.value_dim, spec.key_dim, dtype=ssm_dtype, device=place.device
            ),
            d_ring=place.acc_weight(entries, heads, spec.value_dim),
            k_ring=place.weight(entries, spec.num_key_heads, spec.key_dim),
            g_ring=place.acc_weight(entries, heads, spec.decay_dim),
        ),
    )
    memory.conv_ring[geometry.conv_zero].zero_()
    memory.replay.checkpoint[geometry.zero_row].zero_()
    for ring in (memory.replay.d_ring, memory.replay.k_ring, memory.replay.g_ring):
        ring[geometry.ring_zero].zero_()
    return memory
