"""Keeps what slots hold for later requests, and copies pages, at the start of a step.

One call serves all layers whose memory lies in one pool: layer i's entry e is entry
`i * entries + e` of the flattened pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from gapless.ops.linear_replay import ReplayMemory, materialize
from gapless.runner.inputs import Upload
from gapless.speculative.drafter import SavedSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.core.plan import PageCopy, SlotSave
    from gapless.layers.batch import LinearMemory
    from gapless.ops.step_metadata import Geometry
    from gapless.runner.device import Device

# slots whose states are folded at once: all layers' states of them are in flight together
SAVES_AT_ONCE = 8
# upload room to start with, in bytes; it grows with the largest step
UPLOAD_BYTES = 4096


class Saver:
    """Runs a step's saves and its page copies."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._upload = Upload(UPLOAD_BYTES, device.device)
        self._replayed = torch.arange(device.geometry.num_replayed, device=device.device)

    def save(self, saves: Sequence[SlotSave]) -> None:
        """Store states, convolution tails and hidden states, in order."""
        device = self._device
        inputs = self._send(
            slots=[s.slot for s in saves],
            positions=[s.position for s in saves],
            rows=[s.row for s in saves],
            **_tails(saves, device.geometry),
        )
        saved = SavedSlots(inputs["slots"], inputs["positions"], inputs["rows"])
        for first in range(0, len(saves), SAVES_AT_ONCE):
            self._fold(saved, slice(first, first + SAVES_AT_ONCE))
        for memory in device.pools.linear:
            tails = memory.conv_ring.index_select(1, inputs["ring_entries"])
            memory.conv_ring.index_copy_(1, inputs["tail_entries"], tails)
        if device.drafter is not None:
            device.drafter.save(saved)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages of all layers, MTP layers included: all are read before any is written."""
        inputs = self._send(sources=[c.source for c in copies], targets=[c.target for c in copies])
        for pages in self._device.page_blocks():
            found = pages.index_select(1, inputs["sources"])
            pages.index_copy_(1, inputs["targets"], found)

    def _send(self, **integers: list[int]) -> dict[str, Tensor]:
        arrays = {name: np.array(values, np.int64) for name, values in integers.items()}
        self._upload.reserve(arrays)
        self._upload.send(arrays)
        return self._upload.views(arrays)

    def _fold(self, saved: SavedSlots, part: slice) -> None:
        """Write some slots' states at their positions into their rows, in all linear layers."""
        geometry, columns = self._device.geometry, self._device.table.columns
        slots = saved.slots[part]
        checkpoint_len = columns.checkpoint_len.index_select(0, slots)
        rows = columns.state_rows.index_select(0, slots)
        replayed = checkpoint_len[:, None] + self._replayed
        ring_read = (slots * geometry.ring_len)[:, None] + replayed % geometry.ring_len
        mask = replayed < saved.positions[part, None]
        read_rows = rows.masked_fill(checkpoint_len == 0, geometry.zero_row)
        pools = self._device.pools
        for memory, spec in zip(pools.linear, pools.linear_specs, strict=True):
            if not spec.num_value_heads:
                continue
            replay, num_layers = _flattened(memory), memory.conv_ring.shape[0]
            materialize(
                replay,
                _in_all_layers(ring_read, num_layers, geometry.ring_zero + 1),
                mask.repeat(num_layers, 1),
                read_rows=_in_all_layers(read_rows, num_layers, geometry.zero_row + 1),
                out_rows=_in_all_layers(saved.rows[part], num_layers, geometry.zero_row + 1),
                l2norm_eps=spec.l2norm_eps,
            )


def _tails(saves: Sequence[SlotSave], geometry: Geometry) -> dict[str, list[int]]:
    """Entries of the convolution inputs before each position, in the slot's ring and in the row's
    tail; below position 0 there are none."""
    ring_len = geometry.conv_ring_len
    entries = [
        (save.slot * ring_len + position % ring_len, tail)
        for save in saves
        for tail, position in zip(
            geometry.conv_tail(save.row),
            range(save.position - geometry.conv_width + 1, save.position),
            strict=True,
        )
        if position >= 0
    ]
    return {
        "ring_entries": [ring for ring, _ in entries],
        "tail_entries": [tail for _, tail in entries],
    }


def _flattened(memory: LinearMemory) -> ReplayMemory:
    replay = memory.replay
    return ReplayMemory(
        checkpoint=replay.checkpoint.flatten(0, 1),
        d_ring=replay.d_ring.flatten(0, 1),
        k_ring=replay.k_ring.flatten(0, 1),
        g_ring=replay.g_ring.flatten(0, 1),
    )


def _in_all_layers(index: Tensor, num_layers: int, stride: int) -> Tensor:
    """Repeat `index` [B, ...] for each layer of a flattened pool: [num_layers * B, ...]."""
    layers = torch.arange(0, num_layers * stride, stride, device=index.device)
    return (layers.view(-1, *[1] * index.ndim) + index).flatten(0, 1)
