"""Latent attention windows by FlashInfer's MLA kernels, whose plans are made on the host.

FlashInfer divides rows among multiprocessors on the host and needs each row's exact length there;
the plan goes up as a block of integers that the captured kernels read. Its own `plan` takes device
tensors and reads them back, which waits for the device. Here that is called once for each kind of
window, to fill the wrapper; from then on plans are made of arrays that the host knows, in pinned
buffers used in turn, and go to the same device buffers. Page lists never leave the device: the
window itself writes them before its first layer.

Prefill chunks, the drafting after them, and windows without a host plan are planned on the device.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gapless.core.specs.attention import LatentSpec
from gapless.ops.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from gapless.attention.backend import AttentionBackend, PlannedAttention
    from gapless.core.specs.attention import PagedSpec
    from gapless.ops.draft_tree import TreeMask
    from gapless.ops.paged_attention import PackedSegment

# what is compiled: one kernel, of these channels, for bfloat16 alone
RANK, ROPE_DIM, DTYPE = 512, 64, "bfloat16"
IS_CAUSAL = True
# from 0.7 on `plan` keeps more than the plan, and cannot be made again from outside
MIN_VERSION, END_VERSION = (0, 5, 3), (0, 7)
# queries that one program holds; a head count that divides it has no query at a program's edge
TILE = 64
# partial results of at most two tiles on each multiprocessor
FLOAT_WORKSPACE_BYTES = 128 << 20
# FlashInfer's arrays of 16384 pieces of work, nine of them, and some per multiprocessor
INT_WORKSPACE_BYTES = 1 << 20
# plans under way at once: a step has one for each pass of the drafter, and the next step's follow
RING_LEN = 8

# the view of host memory waits for nothing
_view = torch.Tensor.numpy


def unsupported(layers: Collection[PagedSpec], dtype: str) -> str | None:
    """Say what of installation and model these kernels do not serve; None if they serve it all."""
    if importlib.util.find_spec("flashinfer") is None:
        return "installation without flashinfer (want pip install gapless[flashinfer])"
    version = importlib.metadata.version("flashinfer-python")
    if not MIN_VERSION <= _numbers(version) < END_VERSION:
        return f"flashinfer-python {version} (want at least 0.5.3, below 0.7)"
    return _unsupported_layers(layers, dtype)


def _unsupported_layers(layers: Collection[PagedSpec], dtype: str) -> str | None:
    if dtype != DTYPE:
        return f"dtype {dtype} (want {DTYPE})"
    latents = [layer for layer in layers if isinstance(layer, LatentSpec)]
    if not latents or len(latents) < len(layers):
        return "attention over keys and values (want latent attention alone)"
    for layer in latents:
        if (layer.kv_lora_rank, layer.rope_dim) != (RANK, ROPE_DIM):
            return (
                f"latents of {layer.kv_lora_rank} + {layer.rope_dim} channels (want {RANK} + "
                f"{ROPE_DIM})"
            )
        if TILE % layer.num_heads and layer.num_heads % (2 * TILE):
            return f"{layer.num_heads} heads of a rank (want a divisor of {TILE}, or {2 * TILE})"
    kinds = {(layer.num_heads, layer.scale) for layer in latents}
    if len(kinds) > 1:
        return "layers of various head counts or scales (want one)"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = (part for part in version.split(".")[:3] if part.isdigit())
    return tuple(int(part) for part in parts)


def _wrapper_class() -> Callable[..., Any]:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper: Callable[..., Any] = BatchMLAPagedAttentionWrapper
    return wrapper


@dataclass(frozen=True)
class _Staging:
    """Host buffers of one plan under way."""

    block: Tensor  # [INT_WORKSPACE_BYTES] uint8: the plan
    kv_lens: Tensor  # [max rows] int32
    kv_starts: Tensor  # [max rows + 1] int32
    event: Event


@dataclass
class _HostWindow:
    """A wrapper for windows of one name and shape, and what its plans are made with."""

    wrapper: Any
    query_starts: Tensor  # [B + 1] int32, on the host
    layout: list[int]
    """What the last plan says of its block: captured kernels rely on it, so it never changes."""


@dataclass(frozen=True)
class _Window:
    wrapper: Any
    page_size: int
    scale: float

    def run(self, q: Tensor, kv: Tensor, scale: float) -> Tensor:
        raise AssertionError("this backend is chosen for latent attention alone")

    def run_latent(self, q: Tensor, pool: Tensor, scale: float, *, value_dim: int) -> Tensor:
        assert scale == self.scale, f"planned with scale {self.scale}, run with {scale}"
        pages = pool.unflatten(0, (-1, self.page_size))
        out: Tensor = self.wrapper.run(
            q[..., :value_dim], q[..., value_dim:], pages[..., :value_dim], pages[..., value_dim:]
        )
        return out


class FlashInferAttention:
    """Plans windows on the host; all else is planned on the device, by another backend."""

    needs_cpu_seq_lens = True

    def __init__(
        self,
        *,
        page_size: int,
        max_len: int,
        max_rows: int,
        device: str,
        spec: LatentSpec,
        dtype: torch.dtype,
        on_device: AttentionBackend,
        wrapper_class: Callable[..., Any] | None = None,
    ) -> None:
        """Args: spec: that of every layer, with the heads of a rank. on_device: plans all else."""
        self._spec = spec
        self._dtype = dtype
        self._page_size = page_size
        self._max_len = max_len
        self._max_rows = max_rows
        self._device = torch.device(device)
        self._on_device = on_device
        self.captures_prefill = on_device.captures_prefill
        self._make_wrapper = wrapper_class or _wrapper_class()
        self._float_workspace = self._empty(FLOAT_WORKSPACE_BYTES, torch.uint8)
        # blocks are read while a window of their name runs: rows of any number share one
        self._blocks: dict[str, Tensor] = {}
        self._windows: dict[tuple[str, int, int, int], _HostWindow] = {}
        # lists of pages, and of single positions where windows begin inside of a page
        self._indices: dict[int, Tensor] = {}
        self._offsets = torch.arange(page_size, device=device)
        self._ring = [self._staging() for _ in range(RING_LEN)]
        self._turn = 0

    def kv_lens(self, limit: int) -> tuple[int, ...]:
        """See `AttentionBackend`: those of the backend that plans all else."""
        return self._on_device.kv_lens(limit)

    def window_bytes(self, num_rows: int, width: int, kv_len: int) -> int:
        """See `AttentionBackend`: nothing, partial results lie in a workspace that is kept."""
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
        tree: TreeMask | None = None,
        host_plan: str | None = None,
    ) -> PlannedAttention:
        """See `AttentionBackend`: write the rows' page lists, which the host has planned for."""
        if host_plan is None:
            return self._on_device.plan_window(
                slots, positions, page_table, kv_len=kv_len, first=first, tree=tree
            )
        if tree is not None:
            raise NotImplementedError("FlashInfer masks chains only: a tree needs another backend")
        window = self._windows[(host_plan, *positions.shape, first)]
        rows = page_table.index_select(0, slots)
        if first:
            pages = rows[:, : -(-kv_len // self._page_size)]
            entries = (pages[:, :, None] * self._page_size + self._offsets).flatten(1)
            rows = entries[:, first:kv_len]
        else:
            rows = rows[:, : self._row_len(kv_len, first)]
        self._indices_of(first)[: rows.numel()].view(rows.shape).copy_(rows)
        return _Window(window.wrapper, 1 if first else self._page_size, self._spec.scale)

    def plan_host(
        self, name: str, ends: np.ndarray, *, width: int, kv_len: int, first: int = 0
    ) -> None:
        """See `AttentionBackend`."""
        lens = ends - first
        assert lens.max() <= kv_len - first, f"{name}: a row of {lens.max()} in {kv_len} - {first}"
        key = name, lens.size, width, first
        staging = self._ring[self._turn]
        self._turn = (self._turn + 1) % RING_LEN
        staging.event.wait()
        kv_lens = staging.kv_lens[: lens.size]
        kv_starts = staging.kv_starts[: lens.size + 1]
        _view(kv_lens)[:] = lens
        _view(kv_starts)[:] = np.arange(lens.size + 1) * self._row_len(kv_len, first)
        if key in self._windows:
            self._refresh(self._windows[key], staging, kv_lens, kv_starts)
        else:
            self._windows[key] = self._first_plan(key, staging, kv_lens, kv_starts)
        staging.event.record()

    def update_verify_buffers_to_fill_after_draft(self, name: str) -> None:
        """See `AttentionBackend`: there is nothing to fill, for trees are refused."""
        raise NotImplementedError("FlashInfer masks chains only: a tree needs another backend")

    def prefill_tiles(
        self,
        segments: tuple[PackedSegment, ...],
        room: tuple[int, int] | None = None,
    ) -> dict[int, np.ndarray]:
        """See `AttentionBackend`: as the backend that plans all else."""
        return self._on_device.prefill_tiles(segments, room)

    def plan_prefill(
        self,
        kv_read: Tensor,
        segments: tuple[PackedSegment, ...],
        tiles: Mapping[int, Tensor] | None = None,
    ) -> PlannedAttention:
        """See `AttentionBackend`: as the backend that plans all else."""
        return self._on_device.plan_prefill(kv_read, segments, tiles)

    def _first_plan(
        self,
        key: tuple[str, int, int, int],
        staging: _Staging,
        kv_lens: Tensor,
        kv_starts: Tensor,
    ) -> _HostWindow:
        """Make a wrapper and fill it by its own `plan`."""
        name, rows, width, first = key
        block = self._blocks.setdefault(name, self._empty(INT_WORKSPACE_BYTES, torch.uint8))
        query_starts = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32)
        indices = self._indices_of(first)
        wrapper = self._make_wrapper(
            self._float_workspace,
            use_cuda_graph=True,
            qo_indptr=self._empty(rows + 1, torch.int32),
            kv_indptr=self._empty(rows + 1, torch.int32),
            kv_indices=indices,
            kv_len_arr=self._empty(rows, torch.int32),
            backend="auto",
        )
        # it makes large buffers of its own, of which all windows together need few
        wrapper._int_workspace_buffer = block
        wrapper._pin_memory_int_workspace_buffer = staging.block
        wrapper.plan(
            query_starts,
            kv_starts,
            indices[:0],
            kv_lens,
            self._spec.num_heads,
            self._spec.kv_lora_rank,
            self._spec.rope_dim,
            1 if first else self._page_size,
            IS_CAUSAL,
            self._spec.scale,
            self._dtype,
            self._dtype,
        )
        return _HostWindow(wrapper, query_starts, list(wrapper._plan_info))

    def _refresh(
        self, window: _HostWindow, staging: _Staging, kv_lens: Tensor, kv_starts: Tensor
    ) -> None:
        """Plan again without the wrapper, from the host's arrays, into the same device buffers."""
        wrapper = window.wrapper
        wrapper._kv_len_arr_buf.copy_(kv_lens, non_blocking=True)
        wrapper._kv_indptr_buf.copy_(kv_starts, non_blocking=True)
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            staging.block,
            window.query_starts,
            kv_starts,
            kv_lens,
            self._spec.num_heads,
            self._spec.kv_lora_rank,
            IS_CAUSAL,
        )
        assert list(wrapper._plan_info) == window.layout, "a plan's layout follows from its shape"

    def _row_len(self, kv_len: int, first: int) -> int:
        """Entries of a row in the list of pages, or of positions."""
        return kv_len - first if first else -(-kv_len // self._page_size)

    def _indices_of(self, first: int) -> Tensor:
        if first not in self._indices:
            size = self._max_rows * self._row_len(self._max_len, first)
            self._indices[first] = self._empty(size, torch.int32)
        return self._indices[first]

    def _staging(self) -> _Staging:
        def pinned(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, pin_memory=self._device.type == "cuda")

        return _Staging(
            pinned(INT_WORKSPACE_BYTES, torch.uint8),
            pinned(self._max_rows, torch.int32),
            pinned(self._max_rows + 1, torch.int32),
            Event(self._device),
        )

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)
