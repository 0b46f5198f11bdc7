"""One description of a model, layer by layer, from which weights, pools and budgets follow.

What mixers and blocks are like is in `core/specs`; what each rank has, in `core/parallel.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from gapless.core.specs.attention import AttentionSpec, PagedSpec
from gapless.core.specs.linear import LinearSpec, SsmSpec

if TYPE_CHECKING:
    from gapless.core.specs.feed_forward import BlockSpec


@dataclass(frozen=True)
class ParallelSpec:
    """Mamba-2 and attention side by side: both read a layer's input, and their outputs are
    added."""

    ssm: SsmSpec
    attention: AttentionSpec

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return f"{self.ssm.kind} beside {self.attention.kind}"

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of both."""
        return self.ssm.num_parameters(hidden_size) + self.attention.num_parameters(hidden_size)

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type."""
        return self.ssm.num_acc_parameters + self.attention.num_acc_parameters


MixerSpec = PagedSpec | LinearSpec | ParallelSpec


@dataclass(frozen=True)
class LayerSpec:
    """A pre-norm decoder layer: mixer, then feed-forward; families that number them apart have
    layers with one of the two."""

    mixer: MixerSpec | None
    mlp: BlockSpec | None

    @property
    def memories(self) -> tuple[PagedSpec | LinearSpec, ...]:
        """What of the layer remembers earlier tokens: each has its own memory, in this order."""
        match self.mixer:
            case None:
                return ()
            case ParallelSpec(ssm, attention):
                return ssm, attention
            case mixer:
                return (mixer,)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of mixer, block and the norms before them."""
        return sum(part.num_parameters(hidden_size) + hidden_size for part in self._parts)

    def num_acc_parameters(self, hidden_size: int) -> int:
        """Those of them that are kept in the accumulation type."""
        return sum(part.num_acc_parameters + hidden_size for part in self._parts)

    @property
    def _parts(self) -> list[MixerSpec | BlockSpec]:
        return [part for part in (self.mixer, self.mlp) if part is not None]


@dataclass(frozen=True)
class NormedResidualSpec(LayerSpec):
    """A layer whose norms are on the residual stream itself: `a norm(x) + mixer(norm(x))`, and
    the same of the block."""

    mixer_factor: float
    """What a norm's output is multiplied by beside the mixer."""
    mlp_factor: float
    """The same beside the block."""


@dataclass(frozen=True)
class WeightScale:
    """Factors of stored weights, which are multiplied in once, after loading."""

    pattern: str
    """Regular expression that the whole usual name matches, however the family spells it."""
    factors: tuple[float, ...]
    """One factor, or one for each block of rows."""
    rows: tuple[int, ...] = ()
    """Rows of each block, where there are several."""


class MtpNames(Enum):
    """Where checkpoints have their MTP layer."""

    SEPARATE = "mtp.*"  # beside the model; Qwen
    NEXT_LAYER = "model.layers.N.*"  # as one more layer after the last; DeepSeek, GLM
    PARTS = "mtp.layers.N.*"  # beside the model, its mixer and its block numbered apart; Nemotron-H


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
    mtp_names: MtpNames = MtpNames.SEPARATE
    own_mtp_layer: LayerSpec | None = None
    """The MTP layer, where it is not like the model's last that attends over pages."""
    embedding_scale: float = 1.0
    """What embeddings are multiplied by."""
    logit_scale: float = 1.0
    """What logits are multiplied by."""
    weight_scales: tuple[WeightScale, ...] = ()

    @property
    def attention_layers(self) -> tuple[PagedSpec, ...]:
        """What attends over pages, in order."""
        return tuple(m for s in self.layers for m in s.memories if isinstance(m, PagedSpec))

    @property
    def linear_layers(self) -> tuple[LinearSpec, ...]:
        """What has a linear layer's memory, in order."""
        return tuple(m for s in self.layers for m in s.memories if isinstance(m, LinearSpec))

    @property
    def conv_width(self) -> int:
        """Taps of the widest convolution; rings and tails of all are made for it."""
        return max((spec.conv_width for spec in self.linear_layers), default=1)

    @property
    def num_parameters(self) -> int:
        """Weights that decoding uses; the MTP layers are not counted."""
        d = self.hidden_size
        embeddings = self.vocab_size * d * (1 if self.ties_embeddings else 2)
        return embeddings + sum(s.num_parameters(d) for s in self.layers) + d

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(spec.kv_bytes_per_token(dtype) for spec in self.attention_layers)

    def state_bytes_per_row(self, ssm_dtype: str) -> int:
        """Bytes of one state row in all linear layers."""
        return sum(spec.checkpoint_bytes(ssm_dtype) for spec in self.linear_layers)

    def ring_bytes_per_slot(self, dtype: str, replay_len: int, max_window: int) -> int:
        """Bytes of one slot's rings in all linear layers."""
        ring_len = ring_capacity(replay_len, max_window)
        conv_ring_len = conv_ring_capacity(self.conv_width, max_window)
        return sum(spec.ring_bytes(dtype, ring_len, conv_ring_len) for spec in self.linear_layers)


def ring_capacity(replay_len: int, max_window: int) -> int:
    """Entries of a replay ring: L + 2 W, so that a window never lands on entries being folded."""
    return replay_len + 2 * max_window


def conv_ring_capacity(conv_width: int, max_window: int) -> int:
    """Entries of a convolution ring: the taps before a window, and the window."""
    return conv_width - 1 + max_window
