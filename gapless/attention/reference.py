"""Full and latent attention with torch operations: the definition, and the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.attention.backend import PlansOnDevice
from gapless.ops.draft_tree import MAX_NODES, TreeMask
from gapless.ops.mla import prefill_latent_attention, window_latent_attention
from gapless.ops.paged_attention import PackedSegment, prefill_attention, window_attention

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np

    from gapless.core.specs.attention import PagedSpec


@dataclass(frozen=True)
class _Window:
    kv_read: Tensor  # [B, S]
    mask: Tensor  # [B, W, S] bool, True where a token attends

    def run(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        rows, window, _ = self.mask.shape
        out = window_attention(
            q.view(rows, window, *q.shape[1:]), kv, self.kv_read, self.mask, scale
        )
        return out.reshape(q.shape)

    def run_latent(self, q: Tensor, pool: Tensor, scale: float, *, value_dim: int) -> Tensor:
        rows, window, _ = self.mask.shape
        wide = q.view(rows, window, *q.shape[1:])
        out = window_latent_attention(
            wide, pool, self.kv_read, self.mask, scale, value_dim=value_dim
        )
        return out.flatten(0, 1)


@dataclass(frozen=True)
class _Prefill:
    kv_read: Tensor  # [S]
    segments: tuple[PackedSegment, ...]

    def run(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        return prefill_attention(q, kv, self.kv_read, self.segments, scale)

    def run_latent(self, q: Tensor, pool: Tensor, scale: float, *, value_dim: int) -> Tensor:
        return prefill_latent_attention(
            q, pool, self.kv_read, self.segments, scale, value_dim=value_dim
        )


# on a CPU, bounds are multiples of so many positions
KV_LEN_STEP = 64


class ReferenceAttention(PlansOnDevice):
    """Gathers each row's pages and attends with a mask; needs nothing from the host."""

    needs_cpu_seq_lens = False
    captures_prefill = False

    def __init__(
        self,
        *,
        page_size: int,
        max_len: int,
        device: str,
        layers: Collection[PagedSpec] = (),
        dtype: str = "float32",
    ) -> None:
        del layers, dtype
        self._kv_positions = torch.arange(max_len, device=device)
        self._page_index = self._kv_positions // page_size
        self._offset = self._kv_positions % page_size
        self._page_size = page_size
        self._is_on_gpu = device != "cpu"

    def kv_lens(self, limit: int) -> tuple[int, ...]:
        """See `AttentionBackend`: time follows the bound, but each is a capture on a GPU."""
        if not self._is_on_gpu:
            return (*range(KV_LEN_STEP, limit, KV_LEN_STEP), limit)
        powers = (2**exponent for exponent in range(8, 40))
        return (*takewhile(lambda kv_len: kv_len < limit, powers), limit)

    def window_bytes(self, num_rows: int, width: int, kv_len: int) -> int:
        """See `AttentionBackend`: nothing is known."""
        del num_rows, width, kv_len
        return 0

    def plan_window(
        self,
        slots: Tensor,
        positions: Tensor,
        page_table: Tensor,
        *,
        kv_len: int,
        first: int = 0,
        host_plan: str | None = None,
        tree: TreeMask | None = None,
    ) -> _Window:
        """See `AttentionBackend`."""
        pages = page_table.index_select(0, slots).index_select(1, self._page_index[first:kv_len])
        entries = pages * self._page_size + self._offset[first:kv_len]
        kv_positions = self._kv_positions[first:kv_len]
        if tree is None:
            mask = kv_positions <= positions[:, :, None]
            # what lies past a row's window belongs to nobody and may be NaN: read the first instead
            beyond = kv_positions > positions[:, -1:]
            return _Window(torch.where(beyond, entries[:, :1], entries), mask)
        mask = _tree_mask(tree, kv_positions)
        # a position that no query sees may be NaN too: read one that some query sees instead
        is_seen = mask.any(1)
        seen = entries.gather(1, is_seen.long().argmax(1, keepdim=True))
        return _Window(torch.where(is_seen, entries, seen), mask)

    def prefill_tiles(
        self,
        segments: tuple[PackedSegment, ...],
        room: tuple[int, int] | None = None,
    ) -> dict[int, np.ndarray]:
        """See `AttentionBackend`: nothing."""
        del segments, room
        return {}

    def plan_prefill(
        self,
        kv_read: Tensor,
        segments: tuple[PackedSegment, ...],
        tiles: Mapping[int, Tensor] | None = None,
    ) -> _Prefill:
        """See `AttentionBackend`."""
        del tiles
        return _Prefill(kv_read, segments)


def _tree_mask(tree: TreeMask, kv_positions: Tensor) -> Tensor:  # [B, Q, S] bool
    node = kv_positions - tree.start[:, None]
    bits = tree.bits[:, :, None] >> node.clamp(0, MAX_NODES)[:, None]
    return (node < 0)[:, None] | (bits & 1 == 1)
