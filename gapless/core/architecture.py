"""One description of a model, layer by layer, from which weights, pools and budgets follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Recurrence(Enum):
    """The three recurrences of the linear layers; formulas in `ops/linear_replay/reference.py`."""

    GATED_DELTA = "gated_delta"  # scalar decay per value head, delta correction
    KIMI_DELTA = "kimi_delta"  # decay per key channel, delta correction
    MAMBA2 = "mamba2"  # scalar decay per head, no correction


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

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        q_size = self.num_heads * self.head_dim
        in_rows = q_size * (2 if self.has_output_gate else 1)
        in_rows += 2 * self.num_kv_heads * self.head_dim
        bias = in_rows + hidden_size if self.has_bias else 0
        norms = 2 * self.head_dim if self.has_qk_norm else 0
        return (in_rows + q_size) * hidden_size + bias + norms

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class LinearSpec:
    """A linear-attention layer: recurrent state `[HV, V, K]` and a short convolution."""

    recurrence: Recurrence
    num_key_heads: int  # H
    num_value_heads: int  # HV
    key_dim: int  # K
    value_dim: int  # V
    conv_width: int
    has_grouped_rows: bool = False
    """Whether checkpoints store the input projections by key head, q, k, v and z of each."""

    @property
    def conv_channels(self) -> int:
        """Channels under the convolution: all q, all k, all v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def decay_dim(self) -> int:
        """Decays per value head: 1, or one per key channel."""
        return self.key_dim if self.recurrence is Recurrence.KIMI_DELTA else 1

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        value_size = self.num_value_heads * self.value_dim
        rows = self.conv_channels + 2 * value_size + 2 * self.num_value_heads
        small = self.conv_channels * self.conv_width + 2 * self.num_value_heads + self.value_dim
        return rows * hidden_size + small

    def checkpoint_bytes(self, ssm_dtype: str) -> int:
        """Bytes of one state row in one layer."""
        return self.num_value_heads * self.value_dim * self.key_dim * DTYPE_BYTES[ssm_dtype]

    def ring_bytes(self, dtype: str, ring_len: int, conv_ring_len: int) -> int:
        """Bytes of one slot's replay and convolution rings in one layer."""
        fp = max(4, DTYPE_BYTES[dtype])
        entry = self.num_value_heads * (self.value_dim + self.decay_dim) * fp
        entry += self.num_key_heads * self.key_dim * DTYPE_BYTES[dtype]
        return ring_len * entry + conv_ring_len * self.conv_channels * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward block (SwiGLU)."""

    intermediate_size: int

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the block."""
        return 3 * hidden_size * self.intermediate_size


@dataclass(frozen=True)
class MoeSpec:
    """A sparse mixture of gated feed-forward blocks, with or without a shared one beside it."""

    num_experts: int  # E
    num_active: int  # k
    intermediate_size: int  # I, of one expert
    shared_size: int
    """Intermediate size of the shared block, whose output a gate scales; 0: there is none."""
    renormalises: bool
    """Whether the chosen experts' weights are divided by their sum."""

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of all experts, router and shared block."""
        gates = self.num_experts + (1 if self.shared_size else 0)
        sizes = self.num_experts * self.intermediate_size + self.shared_size
        return (gates + 3 * sizes) * hidden_size


@dataclass(frozen=True)
class LayerSpec:
    """A pre-norm decoder layer: mixer, then feed-forward."""

    mixer: AttentionSpec | LinearSpec
    mlp: MlpSpec | MoeSpec


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model."""

    model_type: str
    vocab_size: int
    hidden_size: int  # D
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    ties_embeddings: bool
    max_position: int
    """Tokens of context the model was trained for."""
    num_mtp_layers: int = 0

    @property
    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """Specs of the full-attention layers, in order."""
        return tuple(s.mixer for s in self.layers if isinstance(s.mixer, AttentionSpec))

    @property
    def linear_layers(self) -> tuple[LinearSpec, ...]:
        """Specs of the linear-attention layers, in order."""
        return tuple(s.mixer for s in self.layers if isinstance(s.mixer, LinearSpec))

    @property
    def num_parameters(self) -> int:
        """Weights that decoding uses; the MTP layers are not counted."""
        d = self.hidden_size
        embeddings = self.vocab_size * d * (1 if self.ties_embeddings else 2)
        layers = sum(
            s.mixer.num_parameters(d) + s.mlp.num_parameters(d) + 2 * d for s in self.layers
        )
        return embeddings + layers + d

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(spec.kv_bytes_per_token(dtype) for spec in self.attention_layers)

    def state_bytes_per_row(self, ssm_dtype: str) -> int:
        """Bytes of one state row in all linear layers."""
        return sum(spec.checkpoint_bytes(ssm_dtype) for spec in self.linear_layers)

    def ring_bytes_per_slot(self, dtype: str, replay_len: int, max_window: int) -> int:
        """Bytes of one slot's rings in all linear layers."""
        ring_len = ring_capacity(replay_len, max_window)
        return sum(
            spec.ring_bytes(dtype, ring_len, conv_ring_capacity(spec.conv_width, max_window))
            for spec in self.linear_layers
        )


def ring_capacity(replay_len: int, max_window: int) -> int:
    """Entries of a replay ring: L + 2 W, so that a window never lands on entries being folded."""
    return replay_len + 2 * max_window


def conv_ring_capacity(conv_width: int, max_window: int) -> int:
    """Entries of a convolution ring: the taps before a window, and the window."""
    return conv_width - 1 + max_window
