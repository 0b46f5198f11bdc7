"""What the layers of one forward share: index tensors decided once, read by every layer.

A `WindowBatch` is a decode step (B rows of W tokens, flattened); a `PrefillBatch` is a chunk of
packed prompt segments. Both are complete when built and never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from gapless.attention.backend import PlannedAttention
    from gapless.ops.causal_conv import SegmentIndices
    from gapless.ops.linear_chunk import ChunkIndices
    from gapless.ops.linear_replay import ReplayIndices, ReplayMemory


@dataclass(frozen=True)
class AttentionBatch:
    """Tokens of a forward through attention layers alone, such as a draft pass; T in all."""

    positions: Tensor  # [T]
    kv_write: Tensor  # [T]
    attention: PlannedAttention
    live: Tensor | None  # [T] bool: tokens of no padded row; None is all of them


@dataclass(frozen=True)
class WindowBatch(AttentionBatch):
    """Tokens of a decode step, `T = B * W`."""

    num_rows: int
    replay: ReplayIndices
    conv_write: Tensor  # [T]
    conv_taps: Tensor  # [width, T], entries of the convolution ring
    ancestors: Tensor | None  # [B, W] int64: `draft_tree.ancestor_bits`; None is a chain


@dataclass(frozen=True)
class PrefillBatch(AttentionBatch):
    """Tokens of a prefill chunk, T in all, segments in a row."""

    chunks: ChunkIndices
    conv: SegmentIndices


@dataclass(frozen=True)
class LinearMemory:
    """One linear layer's state: convolution inputs, checkpoints and replay ring.

    A short convolution has no heads, and so nothing in the latter two.
    """

    conv_ring: Tensor  # [entries, C]: the slots' rings, a zero entry, the state rows' tails
    replay: ReplayMemory


LayerMemory = Tensor | LinearMemory | tuple[Tensor | LinearMemory, ...]
"""An attention layer's pool `[entries, *entry]`, or a linear layer's state; of a layer that mixes
in several ways one of them for each, of one that mixes nothing none."""
