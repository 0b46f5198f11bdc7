"""Mixers that attend over pages: their shapes, weights and bytes, and how they rotate."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gapless.core.dtypes import DTYPE_BYTES


@dataclass(frozen=True)
class YarnSpec:
    """Rotary frequencies stretched beyond the trained context; formulas in `ops/rope/yarn.py`."""

    factor: float
    """By how much the slow frequencies are divided."""
    original_max_position: int
    """Tokens of context before stretching."""
    beta_fast: float
    beta_slow: float
    """Turns within that context above and below which a frequency is kept, and fully divided."""
    attention_factor: float
    """What cosines and sines are multiplied by."""
    truncates: bool = True
    """Whether the bounds between kept and divided channels are rounded outwards."""


@dataclass(frozen=True)
class RotarySpec:
    """A rotary embedding."""

    dim: int
    """Channels that are rotated, of each head."""
    theta: float
    yarn: YarnSpec | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention over pages."""

    num_heads: int  # H
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    has_qk_norm: bool
    has_output_gate: bool
    has_bias: bool = False
    """Whether the projections of q, k and v have biases."""
    has_output_bias: bool = False
    yarn: YarnSpec | None = None
    score_scale: float | None = None
    """What scores are multiplied by before the softmax; None: head_dim ** -0.5."""

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return "full attention"

    @property
    def rotary(self) -> RotarySpec | None:
        """How queries and keys are rotated; None: not at all."""
        if not self.rotary_dim:
            return None
        return RotarySpec(self.rotary_dim, self.rope_theta, self.yarn)

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """Shape of one token's entry in the pages: its keys, then its values."""
        return 2, self.num_kv_heads, self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        q_size = self.num_heads * self.head_dim
        in_rows = q_size * (2 if self.has_output_gate else 1)
        in_rows += 2 * self.num_kv_heads * self.head_dim
        bias = in_rows if self.has_bias else 0
        bias += hidden_size if self.has_output_bias else 0
        return (in_rows + q_size) * hidden_size + bias + self.num_acc_parameters

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: norms."""
        return 2 * self.head_dim if self.has_qk_norm else 0

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in one layer."""
        return prod(self.entry_shape) * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class WideNormSpec(AttentionSpec):
    """The same with one norm for the queries of all heads and one for the keys of all heads."""

    @property
    def num_acc_parameters(self) -> int:
        """Those of its weights that are kept in the accumulation type: norms."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (MLA): pages hold one low-rank latent and one rotated key a
    token, from which every head has its keys and values; formulas in `ops/mla/reference.py`."""

    num_heads: int  # H
    q_lora_rank: int
    """Size of the latent that queries come from; 0: they come from the input."""
    kv_lora_rank: int  # R
    nope_dim: int  # N, channels of a head's query and key that are not rotated
    rope_dim: int
    """Channels of a query, and of the key that all heads share, that are rotated."""
    value_dim: int  # V
    scale: float
    """What scores are multiplied by before the softmax."""
    rotary: RotarySpec | None
    """None: the `rope_dim` channels are there and not rotated."""
    is_interleaved: bool = True
    """Whether checkpoints store rotated channels in pairs (2 i, 2 i + 1), not in two halves."""

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return "latent attention"

    @property
    def head_dim(self) -> int:
        """Channels that a query meets in the pages: those of a whole entry."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """Shape of one token's entry in the pages: its latent, then its rotated key."""
        return (self.head_dim,)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        q_rows = self.num_heads * (self.nope_dim + self.rope_dim)
        kv_rows = self.num_heads * (self.nope_dim + self.value_dim)
        rank = self.q_lora_rank
        queries = (hidden_size + q_rows) * rank if rank else hidden_size * q_rows
        latents = self.head_dim * hidden_size + kv_rows * self.kv_lora_rank
        outputs = self.num_heads * self.value_dim * hidden_size
        return queries + latents + outputs + self.num_acc_parameters

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: norms of the latents."""
        return self.q_lora_rank + self.kv_lora_rank

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's entry in one layer."""
        return prod(self.entry_shape) * DTYPE_BYTES[dtype]


PagedSpec = AttentionSpec | LatentSpec
"""A mixer that attends over pages."""
