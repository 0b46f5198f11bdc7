"""Packed log-probabilities on their way from the device to the host; moved only when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.core.sampling_params import MAX_LOGPROBS
from gapless.runner.inputs import Download, Ticket

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np


class LogprobBuffer:
    """Rows as `ops.sampling.packed_logprobs` makes them, on the device and on the host."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        size = max_rows * row_len(MAX_LOGPROBS)
        self._flat = torch.zeros(size, dtype=torch.float64, device=device)
        self._download = Download(self._flat)

    def rows(self, count: int, num_top: int) -> Tensor:
        """View of the first `count` rows, to be written by the step."""
        return self._flat[: count * row_len(num_top)].view(count, row_len(num_top))

    def fetch(self, count: int, num_top: int) -> LogprobTicket:
        """Start copying the first `count` rows down."""
        return LogprobTicket(self._download.fetch(count * row_len(num_top)), row_len(num_top))


@dataclass(frozen=True)
class LogprobTicket:
    """A copy under way to the host."""

    _ticket: Ticket
    _row_len: int

    def read(self) -> np.ndarray:
        """Wait for the copy and return the rows, owned by the caller."""
        return self._ticket.read().reshape(-1, self._row_len)


@dataclass(frozen=True)
class PrefillLogprobs:
    """What a prefill chunk says, where a segment asks."""

    prompt: LogprobTicket | None  # a row per token of the chunk
    sampled: LogprobTicket | None  # a row per sampled segment


def row_len(num_top: int) -> int:
    """Numbers per row: the token's log-probability, then ids and log-probabilities of the top."""
    return 1 + 2 * num_top


def num_top(asked: Iterable[int | None]) -> int | None:
    """Return what serves all who ask: none, the tokens alone, or as many as there may be.

    Three answers and no more, since graphs are keyed by them.
    """
    wanted = [count for count in asked if count is not None]
    if not wanted:
        return None
    return MAX_LOGPROBS if any(wanted) else 0
