"""Full and latent attention with Triton kernels, planned without a word from the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from gapless.attention.backend import PlansOnDevice
from gapless.core.specs.attention import LatentSpec
from gapless.ops.mla import triton as mla
from gapless.ops.mla.tuning import prefill_tiling as latent_prefill_tiling
from gapless.ops.paged_attention.triton import (
    paged_prefill_attention,
    paged_window_attention,
    prefill_tiles,
    prefill_tiling,
    window_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np
    from torch import Tensor

    from gapless.core.specs.attention import PagedSpec
    from gapless.ops.draft_tree import TreeMask
    from gapless.ops.paged_attention import PackedSegment


# up to here a step with fewer splits per row is worth a graph
SHORT_KV_LEN = 2048


@dataclass(frozen=True)
class _Window:
    slots: Tensor  # [B]
    positions: Tensor  # [B, W]
    page_table: Tensor  # [slots + 1, P]
    page_size: int
    kv_len: int
    first: int
    tree: TreeMask | None

    def run(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        return paged_window_attention(
            q,
            kv,
            self.slots,
            self.positions,
            self.page_table,
            scale,
            page_size=self.page_size,
            kv_len=self.kv_len,
            first=self.first,
            tree=self.tree,
        )

    def run_latent(self, q: Tensor, pool: Tensor, scale: float, *, value_dim: int) -> Tensor:
        return mla.paged_window_latent_attention(
            q,
            pool,
            self.slots,
            self.positions,
            self.page_table,
            scale,
            value_dim=value_dim,
            page_size=self.page_size,
            kv_len=self.kv_len,
            first=self.first,
            tree=self.tree,
        )


@dataclass(frozen=True)
class _Prefill:
    kv_read: Tensor  # [S]
    segments: tuple[PackedSegment, ...]
    laid_out: Mapping[int, Tensor] | None  # by tokens per tile
    _sent: dict[int, Tensor] = field(default_factory=dict)

    def run(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // kv.shape[2]
        num_tokens = _tokens_per_tile(group, q.shape[2], q.dtype)
        tiles = self._tiles_of(num_tokens, q.device)
        return paged_prefill_attention(q, kv, self.kv_read, tiles, scale)

    def run_latent(self, q: Tensor, pool: Tensor, scale: float, *, value_dim: int) -> Tensor:
        num_tokens = mla.tokens_per_tile(q.shape[1], latent_prefill_tiling(q.dtype).block_m)
        tiles = self._tiles_of(num_tokens, q.device)
        return mla.paged_prefill_latent_attention(
            q, pool, self.kv_read, tiles, scale, value_dim=value_dim
        )

    def _tiles_of(self, num_tokens: int, device: torch.device) -> Tensor:
        """Tiles that did not come with the chunk are sent up by the first layer of a shape."""
        if self.laid_out is not None:
            tiles = self.laid_out.get(num_tokens)
            assert tiles is not None, f"no tiles of {num_tokens} tokens came with the chunk"
            return tiles
        if num_tokens not in self._sent:
            array = prefill_tiles(self.segments, num_tokens)
            self._sent[num_tokens] = _upload(array, device)
        return self._sent[num_tokens]


class TritonAttention(PlansOnDevice):
    """Walks page tables on the device; the reference's plan arguments, nothing gathered."""

    needs_cpu_seq_lens = False
    captures_prefill = True

    def __init__(
        self,
        *,
        page_size: int,
        max_len: int,
        device: str,
        layers: Collection[PagedSpec] = (),
        dtype: str = "float32",
    ) -> None:
        """Args: layers, dtype: of the layers that run."""
        del max_len, device
        self._page_size = page_size
        self._layers = frozenset(layers)
        self._dtype: torch.dtype = vars(torch)[dtype]
        self._tile_sizes = sorted({_tile_size(layer, self._dtype) for layer in layers})

    def kv_lens(self, limit: int) -> tuple[int, ...]:
        """See `AttentionBackend`: rows read their own lengths, and the bound only limits splits."""
        return (SHORT_KV_LEN, limit) if limit > SHORT_KV_LEN else (limit,)

    def window_bytes(self, num_rows: int, width: int, kv_len: int) -> int:
        """See `AttentionBackend`: partial results of the layer that has most."""
        tokens, dtype = num_rows * width, self._dtype
        found = [0]
        for layer in self._layers:
            if isinstance(layer, LatentSpec):
                shape = (layer.num_heads, layer.kv_lora_rank)
                found.append(mla.window_bytes(tokens, width, *shape, dtype, kv_len=kv_len))
            else:
                heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
                found.append(window_bytes(tokens, width, *heads, dtype, kv_len=kv_len))
        return max(found)

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
        return _Window(slots, positions, page_table, self._page_size, kv_len, first, tree)

    def prefill_tiles(
        self,
        segments: tuple[PackedSegment, ...],
        room: tuple[int, int] | None = None,
    ) -> dict[int, np.ndarray]:
        """See `AttentionBackend`."""
        return {
            size: prefill_tiles(segments, size, None if room is None else room[0] // size + room[1])
            for size in self._tile_sizes
        }

    def plan_prefill(
        self,
        kv_read: Tensor,
        segments: tuple[PackedSegment, ...],
        tiles: Mapping[int, Tensor] | None = None,
    ) -> _Prefill:
        """See `AttentionBackend`."""
        return _Prefill(kv_read, segments, tiles)


def _tile_size(layer: PagedSpec, dtype: torch.dtype) -> int:
    """Tokens of a layer's tile."""
    if isinstance(layer, LatentSpec):
        return mla.tokens_per_tile(layer.num_heads, latent_prefill_tiling(dtype).block_m)
    group = layer.num_heads // layer.num_kv_heads
    return _tokens_per_tile(group, layer.head_dim, dtype)


def _tokens_per_tile(group: int, head_dim: int, dtype: torch.dtype) -> int:
    return prefill_tiling(group, head_dim, dtype).block_m // group


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Send an array up without waiting; the caching allocator keeps its pinned copy until then."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host, non_blocking=True)
