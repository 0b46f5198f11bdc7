"""What an attention backend is, full and latent, and which one serves a device.

A backend turns page tables into a `PlannedAttention` once per forward; every layer then runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Protocol

import torch

from gapless.attention.measured import faster_for_latents
from gapless.core.specs.attention import LatentSpec
from gapless.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np
    from torch import Tensor

    from gapless.core.specs.attention import PagedSpec
    from gapless.ops.draft_tree import TreeMask
    from gapless.ops.paged_attention import PackedSegment

logger = logging.getLogger(__name__)

BACKENDS = {
    "reference": "gapless.attention.reference:ReferenceAttention",
    "triton": "gapless.attention.triton:TritonAttention",
}


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

    def run_latent(
        self,
        q: Tensor,  # [T, H, C], absorbed
        pool: Tensor,  # [entries, C], this forward's own latents included
        scale: float,
        *,
        value_dim: int,  # R
    ) -> Tensor:  # [T, H, R]
        """Attend to latents in the same way; contract in `ops/mla/reference.py`.

        Only called on a backend that was chosen for layers with such entries.
        """
        ...


class AttentionBackend(Protocol):
    """Plans attention for decode windows and prefill chunks."""

    needs_cpu_seq_lens: bool
    """Whether planning a window reads lengths on the host, which cuts the step with a seam."""
    captures_prefill: bool
    """Whether a planned prefill chunk depends on its segments through its tiles alone."""

    def kv_lens(self, limit: int) -> tuple[int, ...]:
        """Bounds that are worth a graph of their own, ascending, `limit` the last."""
        ...

    def window_bytes(self, num_rows: int, width: int, kv_len: int) -> int:
        """Bytes that a layer's window takes at least, beside arguments and result, as it runs."""
        ...

    def plan_window(
        self,
        slots: Tensor,  # [B]
        positions: Tensor,  # [B, W]
        page_table: Tensor,  # [slots + 1, P]
        *,
        kv_len: int,
        first: int = 0,
        tree: TreeMask | None = None,
        host_plan: str | None = None,
    ) -> PlannedAttention:
        """Plan a window with device operations.

        `kv_len` bounds every row's length, window included; positions below `first` do not exist.
        A row's positions ascend, and its length is its last position + 1.

        Without `tree` a token sees the positions up to its own. With it `positions` are storage
        positions, and a token sees those below the row's `start` and those of its bits, its own
        among them; `start` is at most the row's first position. The queries may be some nodes of a
        larger tree, as long as no node that they see is stored past the row's length. What no
        query of a row sees is never read into a result, and may hold NaN.

        `host_plan` names the plan that `plan_host` makes of these rows, where it makes one: before
        the window runs, and again before each replay.
        """
        ...

    def plan_host(
        self,
        name: str,
        ends: np.ndarray,  # [B] int64
        *,
        width: int,  # W
        kv_len: int,
        first: int = 0,
    ) -> None:
        """Plan a window on the host, whose rows' last positions are those before `ends`.

        Called if the backend `needs_cpu_seq_lens`, on the stream that the window will wait for.
        Rows that name the null slot may have any end. Never waits for the device.
        """
        ...

    def update_verify_buffers_to_fill_after_draft(self, name: str) -> None:
        """Fill again what of a host plan depends on drafts: links and masks of draft trees.

        Called on the stream of the step, once drafting is over, if the plan was made beside it.
        A backend that plans trees on the host must implement it.
        """
        ...

    def prefill_tiles(
        self,
        segments: tuple[PackedSegment, ...],
        room: tuple[int, int] | None = None,
    ) -> dict[int, np.ndarray]:
        """Return what layers want to know of a prefill chunk on the device, by tokens per tile.

        Args: room: most tokens and segments, which then decide the arrays' shapes.
        """
        ...

    def plan_prefill(
        self,
        kv_read: Tensor,  # entries of the positions that the segments name
        segments: tuple[PackedSegment, ...],
        tiles: Mapping[int, Tensor] | None = None,
    ) -> PlannedAttention:
        """Plan a prefill chunk.

        Queries after the segments are padding, and get anything.

        Args: tiles: the device's copies of `prefill_tiles`; without, a layer sends them up.
        """
        ...


class PlansOnDevice:
    """What a backend has that needs no plan on the host."""

    def plan_host(
        self, name: str, ends: np.ndarray, *, width: int, kv_len: int, first: int = 0
    ) -> None:
        """See `AttentionBackend`: nothing, all is planned on the device."""

    def update_verify_buffers_to_fill_after_draft(self, name: str) -> None:
        """See `AttentionBackend`: nothing, all is planned on the device."""


def choose_backend(
    name: str,
    *,
    device: str,
    layers: Collection[PagedSpec],
    dtype: str,
    has_tree: bool = False,
) -> str:
    """Return the backend that `name` stands for, and log why it is that one.

    Raises:
        BackendUnavailable: `name` is asked for and cannot serve this device or model.
    """
    missing = _triton_lacks(device, layers, dtype)
    if name == "triton" and missing:
        raise BackendUnavailable(
            f"attention_backend=triton on {missing}; use attention_backend=reference or auto"
        )
    if name == "flashinfer":
        lacks = _flashinfer_lacks(device, layers, dtype, has_tree=has_tree) or missing
        if lacks:
            raise BackendUnavailable(
                f"attention_backend=flashinfer on {lacks}; use attention_backend=triton or auto"
            )
    if name != "auto":
        logger.info("attention backend = %s (asked for)", name)
        return name
    if missing:
        logger.info("attention backend = reference (the triton kernels serve no %s)", missing)
        return "reference"
    if not _flashinfer_lacks(device, layers, dtype, has_tree=has_tree):
        gpu = torch.cuda.get_device_name(device)
        faster = faster_for_latents(gpu)
        logger.info("attention backend = %s (the faster as measured on %s)", faster, gpu)
        return faster
    logger.info("attention backend = triton (device %s)", device)
    return "triton"


def make_backend(
    name: str,
    *,
    page_size: int,
    max_len: int,
    max_rows: int,
    device: str,
    layers: Collection[PagedSpec],
    dtype: str,
    has_tree: bool = False,
) -> AttentionBackend:
    """Make the backend `name`, or with "auto" the fastest that serves this device and model.

    Args: page_size, max_len: of the page table. max_rows: most rows of a window. layers: all that
    attend over pages, as one rank has them. has_tree: whether windows may be draft trees.

    Raises:
        BackendUnavailable: `name` is asked for and cannot serve this device or model.
    """
    name = choose_backend(name, device=device, layers=layers, dtype=dtype, has_tree=has_tree)
    is_host_planned = name == "flashinfer"
    module, _, attribute = BACKENDS["triton" if is_host_planned else name].partition(":")
    backend: AttentionBackend = vars(importlib.import_module(module))[attribute](
        page_size=page_size, max_len=max_len, device=device, layers=layers, dtype=dtype
    )
    if not is_host_planned:
        return backend
    from gapless.attention.flashinfer import FlashInferAttention

    spec = next(iter(layers))
    assert isinstance(spec, LatentSpec), "chosen for latent attention alone"
    return FlashInferAttention(
        page_size=page_size,
        max_len=max_len,
        max_rows=max_rows,
        device=device,
        spec=spec,
        dtype=vars(torch)[dtype],
        on_device=backend,
    )


def _flashinfer_lacks(
    device: str, layers: Collection[PagedSpec], dtype: str, *, has_tree: bool
) -> str | None:
    """What of device, model and windows FlashInfer does not serve; None if it serves it all."""
    if not device.startswith("cuda"):
        return f"device {device} (want cuda)"
    if has_tree:
        return "draft trees (want chains: speculative_topk=1)"
    from gapless.attention.flashinfer import unsupported

    return unsupported(layers, dtype)


def _triton_lacks(device: str, layers: Collection[PagedSpec], dtype: str) -> str | None:
    """What of device and model the Triton kernels do not serve; None if they serve it all."""
    if not device.startswith("cuda"):
        return f"device {device} (want cuda)"
    if importlib.util.find_spec("triton") is None:
        return "installation without the triton package"
    from gapless.ops.mla import triton as mla
    from gapless.ops.paged_attention import triton as full

    found = [
        mla.unsupported(layer.kv_lora_rank, layer.rope_dim, dtype)
        if isinstance(layer, LatentSpec)
        else full.unsupported(layer.head_dim, dtype)
        for layer in layers
    ]
    return next((reason for reason in found if reason), None)
