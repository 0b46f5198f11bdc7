"""The device side that prefill and decode share: model, memory, slot table, backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.attention.backend import AttentionBackend, make_backend
from gapless.ops.sampling import sample
from gapless.runner.pools import make_geometry, make_memory
from gapless.runner.slot_table import SlotTable
from gapless.speculative.accept import accept_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.resolve import Config
    from gapless.layers.batch import LayerMemory
    from gapless.layers.placement import Placement
    from gapless.models.decoder import Decoder
    from gapless.ops.step_metadata import Geometry


@dataclass(frozen=True)
class Device:
    """Everything on the device that outlives a step."""

    model: Decoder
    geometry: Geometry
    memory: Sequence[LayerMemory]
    table: SlotTable
    backend: AttentionBackend
    num_page_columns: int
    device: torch.device


def num_positions(config: Config) -> int:
    """Positions that a step may name: the context, and how far steps run ahead of it."""
    return config.max_model_len + 3 * config.max_window


def make_device(model: Decoder, config: Config, place: Placement) -> Device:
    """Allocate pools and slot table for a loaded model."""
    geometry = make_geometry(model.architecture, config)
    num_page_columns = -(-num_positions(config) // config.page_size)
    ssm_dtype: torch.dtype = vars(torch)[config.ssm_dtype]
    return Device(
        model=model,
        geometry=geometry,
        memory=make_memory(model.architecture, geometry, place, ssm_dtype),
        table=SlotTable(geometry, num_page_columns, place.device),
        backend=make_backend(
            "reference",
            page_size=config.page_size,
            max_len=num_page_columns * config.page_size,
            device=config.device,
        ),
        num_page_columns=num_page_columns,
        device=place.device,
    )


@dataclass(frozen=True)
class Verified:
    """What verify hands to accept: the target's logits over B windows, and where those stand."""

    slots: Tensor  # [B]
    seq_lens: Tensor  # [B]: committed length before the window
    checkpoint_len: Tensor  # [B]: checkpoint length once the step is over
    logits: Tensor  # [B * W, V]


@dataclass(frozen=True)
class Emitted:
    """What accept emits."""

    tokens: Tensor  # [B, W] int64
    lens: Tensor  # [B] int64; 0 for padded rows


def accept(device: Device, verified: Verified, *, all_greedy: bool) -> Emitted:
    """Sample every window position, keep what stands, and store the step's outcome in the table.

    The null slot stays at length 0 and done: its rows write back what they found.
    """
    table, slots = device.table, verified.slots
    rows = slots.shape[0]
    window = verified.logits.shape[0] // rows
    sampled_at = verified.seq_lens[:, None] + torch.arange(1, window + 1, device=slots.device)
    tokens = sample(
        verified.logits,
        sampled_at.view(-1),
        table.sampling_rows(slots, repeat=window),
        all_greedy=all_greedy,
    ).view(rows, window)
    outcome = accept_chain(
        tokens,
        table.window_tokens.index_select(0, slots),
        verified.seq_lens + 1,
        table.limit_len.index_select(0, slots),
        table.stop_ids.index_select(0, slots),
    )
    is_null = slots == device.geometry.null_slot
    lens = outcome.lens.masked_fill(is_null, 0)
    table.columns.seq_lens.index_copy_(0, slots, verified.seq_lens + lens)
    table.columns.checkpoint_len.index_copy_(0, slots, verified.checkpoint_len)
    table.columns.done.index_copy_(0, slots, outcome.ends | is_null)
    table.window_tokens.select(1, 0).index_copy_(0, slots, outcome.newest)
    return Emitted(tokens, lens)
