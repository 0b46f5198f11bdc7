"""The host's copies of cached keys: stores beside the steps, loads in the steps' own stream.

A page of the host is one contiguous block for each stacked pool, layers in front; so is a row. On a
GPU the memory is pinned, and stores run on a stream of their own behind an event of the step that
plans them; what they read is locked by the cache until they have arrived.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from gapless.config.config import Config
    from gapless.core.plan import StepPlan, Transfer
    from gapless.runner.device import Device


class _Blocks:
    """One pool's pages or rows, on the device and on the host."""

    def __init__(self, pool: Tensor, count: int) -> None:
        """Args: pool: [n, blocks, ...], a view of the device's memory. count: host blocks."""
        self._pool = pool
        self._host = torch.empty(
            count, pool.shape[0], *pool.shape[2:], dtype=pool.dtype, pin_memory=pool.is_cuda
        )

    def store(self, source: int, target: int) -> None:
        # gathered on the device first: one contiguous copy goes over the bus
        self._host[target].copy_(self._pool[:, source].contiguous(), non_blocking=True)

    def load(self, source: int, target: int) -> None:
        block = self._host[source].to(self._pool.device, non_blocking=True)
        self._pool[:, target].copy_(block)


class HostTier:
    """Moves pages and state rows between device and host."""

    def __init__(self, device: Device, config: Config) -> None:
        self._pages = [_Blocks(pool, config.num_host_pages) for pool in device.page_blocks()]
        self._rows = [_Blocks(pool, config.num_host_rows) for pool in device.row_blocks()]
        self._stream = torch.cuda.Stream() if device.device.type == "cuda" else None
        # ranks see stores arrive at different times, and rank 0 speaks for all of them
        self._is_one_of_many = config.tp > 1
        self._under_way: deque[torch.cuda.Event] = deque()
        self._num_arrived = 0

    def run(self, plan: StepPlan) -> None:
        """Copy what a plan loads to the device, and begin to copy what it stores to the host."""
        if self._stream is not None and self._is_one_of_many:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._load(plan.loads)
        if plan.stores:
            self._begin(plan.stores)

    def _load(self, loads: Sequence[Transfer]) -> None:
        for load in loads:
            for source, target in zip(load.host_pages, load.device_pages, strict=True):
                for pages in self._pages:
                    pages.load(source, target)
            if load.host_row is not None and load.device_row is not None:
                for rows in self._rows:
                    rows.load(load.host_row, load.device_row)

    def _begin(self, stores: Sequence[Transfer]) -> None:
        with self._beside():
            for store in stores:
                for source, target in zip(store.device_pages, store.host_pages, strict=True):
                    for pages in self._pages:
                        pages.store(source, target)
                if store.host_row is not None and store.device_row is not None:
                    for rows in self._rows:
                        rows.store(store.device_row, store.host_row)
                self._mark()

    def num_arrived(self, *, waits: bool) -> int:
        """Stores that have arrived since the start; with `waits`, all of them once they have."""
        while self._under_way and (waits or self._under_way[0].query()):
            self._under_way.popleft().synchronize()
            self._num_arrived += 1
        return self._num_arrived

    def _beside(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def _mark(self) -> None:
        if self._stream is None:
            self._num_arrived += 1
            return
        event = torch.cuda.Event()
        event.record(self._stream)
        self._under_way.append(event)
