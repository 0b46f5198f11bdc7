"""Traffic between host and device: packed uploads, and results read one step late.

Host buffers are pinned on CUDA, used in turn, and written again only after the event of the copy
that read them. Nothing is allocated per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gapless.ops.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# alignment of each packed array, enough for any element type and for vector loads
ALIGNMENT = 16
# buffers used in turn: one being read by the device, one being written by the host
RING_LEN = 2
# the view of host memory waits for nothing: buffers may grow under `forbid_syncs` too
_view_as_array = Tensor.numpy

TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


@dataclass(frozen=True)
class _HostBuffer:
    array: np.ndarray
    prefixes: Callable[[int], tuple[Tensor, Tensor]]
    """The first so many elements, on the host and on the device."""
    event: Event


def _host_buffers(device: Tensor) -> list[_HostBuffer]:
    """Buffers for copies to or from a flat tensor."""
    buffers = []
    for _ in range(RING_LEN):
        is_pinned = device.device.type == "cuda"
        host = torch.zeros(device.numel(), dtype=device.dtype, pin_memory=is_pinned)
        # steps repeat their sizes, and to make two views takes the host longer than to copy
        prefixes = lru_cache(maxsize=64)(partial(_prefixes, host, device))
        buffers.append(_HostBuffer(_view_as_array(host), prefixes, Event(device.device)))
    return buffers


def _prefixes(host: Tensor, device: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return host[:count], device[:count]


def packed_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Bytes that `arrays` take in an upload."""
    return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values())


class Upload:
    """Sends named arrays to the device in one asynchronous copy.

    The layout follows from the shapes of the arrays in turn, so the first arrays land at equal
    addresses as long as their shapes are equal, and a captured graph finds its inputs again.
    """

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        self._allocate(capacity_bytes, device)

    def reserve(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Make room for `arrays`. Buffers that grow move, so none of them may be in a graph."""
        if not self.holds(arrays):
            self._allocate(2 * packed_bytes(arrays), self._device.device)

    def holds(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether there is room for `arrays`."""
        return packed_bytes(arrays) <= self._device.numel()

    def _allocate(self, capacity_bytes: int, device: torch.device) -> None:
        self._device = torch.zeros(capacity_bytes, dtype=torch.uint8, device=device)
        self._buffers = _host_buffers(self._device)
        self._turn = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Copy `arrays` to where `views` finds them; they stay there until the next call."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % RING_LEN
        buffer.event.wait()
        offset = 0
        for name, array in arrays.items():
            end = offset + array.nbytes
            assert end <= buffer.array.size, f"{name} ends at byte {end} of {buffer.array.size}"
            buffer.array.data[offset:end] = array.tobytes()
            offset = -(-end // ALIGNMENT) * ALIGNMENT
        host, device = buffer.prefixes(offset)
        device.copy_(host, non_blocking=True)
        buffer.event.record()

    def views(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Where arrays of these shapes and types lie on the device, whenever they are sent."""
        views: dict[str, Tensor] = {}
        offset = 0
        for name, array in arrays.items():
            end = offset + array.nbytes
            typed = self._device[offset:end].view(TORCH_DTYPES[array.dtype])
            views[name] = typed.view(array.shape)
            offset = -(-end // ALIGNMENT) * ALIGNMENT
        return views


class Download:
    """Brings a device buffer to the host, read later through a ticket."""

    def __init__(self, source: Tensor) -> None:
        self._buffers = _host_buffers(source)
        self._turn = 0

    def fetch(self, count: int) -> Ticket:
        """Start copying the first `count` elements; the ticket is good for RING_LEN fetches."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % RING_LEN
        host, device = buffer.prefixes(count)
        host.copy_(device, non_blocking=True)
        buffer.event.record()
        return Ticket(buffer.array[:count], buffer.event)


@dataclass(frozen=True)
class Ticket:
    """A copy under way to the host."""

    _array: np.ndarray
    _event: Event

    def read(self) -> np.ndarray:
        """Wait for the copy and return the elements, owned by the caller."""
        self._event.wait()
        return self._array.copy()
