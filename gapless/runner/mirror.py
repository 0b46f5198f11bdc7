"""The host's late copy of `seq_lens`, for backends that plan on the host.

A decode step's lengths come down through pinned buffers once accept has stored them, and what
follows in the step runs beside the copy. Reading them waits for the event of that copy alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from gapless.runner.inputs import Download, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.core.plan import PrefillSegment


@dataclass(frozen=True)
class _Known:
    """Lengths that the host has known all along."""

    _lens: list[int]

    def read(self) -> np.ndarray:
        return np.array(self._lens, np.int64)


class LengthMirror:
    """Lengths by slot, as the device will find them when the next decode step starts.

    A slot that is done has length 0 here, as on the device the null slot that its row is renamed
    to; until its end is read, and where prefill ended it, it may still have the last one.
    """

    def __init__(self, num_slots: int, max_rows: int, device: torch.device) -> None:
        self._lens = np.zeros(num_slots + 1, np.int64)
        self._stored = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._down = Download(self._stored)
        # what has changed since, in the order of the device
        self._changes: deque[tuple[np.ndarray, Ticket | _Known]] = deque()

    def store(self, seq_lens: Tensor, live_slots: Tensor, null_slot: int) -> None:
        """Keep, on the device, a decode step's lengths [B], 0 for rows that are not live."""
        stored = self._stored[: seq_lens.shape[0]]
        torch.mul(seq_lens, live_slots != null_slot, out=stored)

    def fetch(self, slots: np.ndarray) -> None:
        """Start to bring down what was stored for the rows of a step; they name `slots` [B]."""
        # a ticket is good for a few fetches only
        self._resolve()
        self._changes.append((slots, self._down.fetch(slots.size)))

    def admit(self, segments: Sequence[PrefillSegment]) -> None:
        """Take note of a prefill chunk, launched after the last decode step and before the next."""
        slots = np.array([segment.slot for segment in segments], np.int64)
        self._changes.append((slots, _Known([segment.end for segment in segments])))

    def lens(self, slots: np.ndarray) -> np.ndarray:
        """Return the lengths [B] of slots; blocks until the last fetch has arrived."""
        self._resolve()
        lens: np.ndarray = self._lens[slots]
        return lens

    def _resolve(self) -> None:
        while self._changes:
            slots, lens = self._changes.popleft()
            self._lens[slots] = lens.read()
