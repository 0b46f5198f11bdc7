"""What a full-attention backend is, and which one serves a device.

A backend turns page tables into a `PlannedAttention` once per forward; every layer then runs it.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

BACKENDS = {"reference": "gapless.attention.reference:ReferenceAttention"}


class PlannedAttention(Protocol):
    """Attention of one forward's tokens over their pages."""

    def run(
        self,
        q: Tensor,  # [T, H, head_dim]
        kv: Tensor,  # [entries, 2, KVH, head_dim], this forward's own keys and values included
        scale: float,
    ) -> Tensor:  # [T, H, head_dim]
        """Attend causally, each token to its own request's positions up to its own."""
        ...


class AttentionBackend(Protocol):
    """Plans attention for decode windows and prefill chunks."""

    needs_cpu_seq_lens: bool
    """Whether planning a window reads lengths on the host, which cuts the step with a seam."""

    def plan_window(
        self,
        slots: Tensor,  # [B]
        positions: Tensor,  # [B, W]
        page_table: Tensor,  # [slots + 1, P]
        *,
        kv_len: int,
        first: int = 0,
    ) -> PlannedAttention:
        """Plan a window with device operations.

        `kv_len` bounds every row's length, window included; positions below `first` do not exist.
        """
        ...

    def plan_prefill(
        self,
        kv_read: Tensor,  # [S]: entries of each segment's positions 0 .. end, segments in a row
        segments: tuple[tuple[int, int, int, int], ...],
    ) -> PlannedAttention:
        """Plan a prefill chunk; a segment is `(q_start, q_end, kv_start, kv_end)`."""
        ...


def make_backend(name: str, *, page_size: int, max_len: int, device: str) -> AttentionBackend:
    """Make the backend `name`; its size arguments are those of the page table."""
    module, _, attribute = BACKENDS[name].partition(":")
    logger.info("attention backend = %s", name)
    backend: AttentionBackend = vars(importlib.import_module(module))[attribute](
        page_size=page_size, max_len=max_len, device=device
    )
    return backend
