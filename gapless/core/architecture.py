"""One description of a model, layer by layer, from which weights, pools and budgets follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import prod

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


# inside the root of the norm of delta rules' queries and keys, fixed by the model families
# whatever rms_norm_eps says
L2NORM_EPS = 1e-6


class Recurrence(Enum):
    """The three recurrences of the linear layers; formulas in `ops/linear_replay/reference.py`."""

    GATED_DELTA = "gated_delta"  # scalar decay per value head, delta correction
    KIMI_DELTA = "kimi_delta"  # decay per key channel, delta correction
    MAMBA2 = "mamba2"  # scalar decay per head, no correction


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
    def kind(self) -> str:
        """What people call the layer."""
        return self.recurrence.value.replace("_", " ")

    @property
    def conv_channels(self) -> int:
        """Channels under the convolution: all q, all k, all v."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def decay_dim(self) -> int:
        """Decays per value head: 1, or one per key channel."""
        return self.key_dim if self.recurrence is Recurrence.KIMI_DELTA else 1

    @property
    def l2norm_eps(self) -> float | None:
        """Inside the root of the norm of queries and keys; None: they are not normalised."""
        return None if self.recurrence is Recurrence.MAMBA2 else L2NORM_EPS

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        value_size = self.num_value_heads * self.value_dim
        rows = self.conv_channels + 2 * value_size + 2 * self.num_value_heads
        small = self.conv_channels * self.conv_width + self.num_acc_parameters
        return rows * hidden_size + small

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: decays, their biases, the norm."""
        return 2 * self.num_value_heads + self.value_dim

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
class SeparateDeltaSpec(LinearSpec):
    """Gated DeltaNet with a stored projection and convolution for each of q, k and v, and with a
    norm whose epsilon is not the model's."""

    beta_scale: float = field(kw_only=True)
    """What beta is multiplied by; with 2, decays may be negative."""
    norm_eps: float = field(kw_only=True)


@dataclass(frozen=True)
class KdaSpec(LinearSpec):
    """Kimi Delta Attention: as many key as value heads; two gates of low rank, one of which is the
    decay of every key channel."""

    gate_rank: int = field(kw_only=True)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        heads, rank = self.num_value_heads, self.gate_rank
        rows = self.conv_channels + heads + 2 * rank
        gates = heads * (self.key_dim + self.value_dim) * rank
        outputs = heads * self.value_dim * hidden_size
        convolution = self.conv_channels * self.conv_width
        return rows * hidden_size + gates + outputs + convolution + self.num_acc_parameters

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: decays, their biases, the norm."""
        return self.num_value_heads * (1 + self.key_dim) + self.value_dim


class GateOrder(Enum):
    """How a Mamba-2 layer's output meets its gate `silu(z)` and its norm."""

    GATE_ALONE = "gate_alone"  # there is no norm
    GATE_FIRST = "gate_first"
    NORM_FIRST = "norm_first"


@dataclass(frozen=True)
class SsmSpec(LinearSpec):
    """Mamba-2: key heads are the groups that share B (keys) and C (queries), value heads have x.

    Of the norm a group's channels are one row.
    """

    gate_order: GateOrder = field(kw_only=True)
    has_conv_bias: bool = field(kw_only=True)
    has_bias: bool = field(kw_only=True)
    """Whether the input projection has a bias."""
    has_output_bias: bool = field(kw_only=True)
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the discretised time step."""

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return "Mamba-2"

    @property
    def inner_size(self) -> int:
        """Channels of x, of its gate and of the norm."""
        return self.num_value_heads * self.value_dim

    @property
    def num_rows(self) -> int:
        """Rows of the input projection: z, then x, B and C, then the time steps."""
        return self.inner_size + self.conv_channels + self.num_value_heads

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        matrices = (self.num_rows + self.inner_size) * hidden_size
        convolution = self.conv_channels * (self.conv_width + self.has_conv_bias)
        biases = self.num_rows * self.has_bias + hidden_size * self.has_output_bias
        return matrices + convolution + biases + self.num_acc_parameters

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: decays, D, time-step biases, the
        norm."""
        norm = 0 if self.gate_order is GateOrder.GATE_ALONE else self.inner_size
        return 3 * self.num_value_heads + norm


@dataclass(frozen=True)
class LightningSpec(LinearSpec):
    """Lightning attention: as many key as value heads, each with a fixed decay, no convolution,
    and one norm for all heads."""

    slope_scale: float = field(kw_only=True)
    """What the decays of the layer are multiplied by."""
    norm_eps: float = field(kw_only=True)

    @classmethod
    def of(
        cls, num_heads: int, head_dim: int, *, slope_scale: float, norm_eps: float
    ) -> LightningSpec:
        """Describe a layer of `num_heads` heads."""
        return cls(
            recurrence=Recurrence.MAMBA2, num_key_heads=num_heads, num_value_heads=num_heads,
            key_dim=head_dim, value_dim=head_dim, conv_width=1, slope_scale=slope_scale,
            norm_eps=norm_eps,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return "lightning attention"

    @property
    def conv_channels(self) -> int:
        """There is no convolution."""
        return 0

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def log_decays(self) -> tuple[float, ...]:
        """Each head's log decay of a token: slopes fall from 1/2^(8/H) to 1/2^8."""
        num_heads = self.num_value_heads
        return tuple(
            -self.slope_scale * 2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)
        )

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        return 5 * self.inner_size * hidden_size + self.num_acc_parameters

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: the norm."""
        return self.inner_size


@dataclass(frozen=True)
class ShortConvSpec(LinearSpec):
    """A gated short convolution: what it keeps of the past is a convolution's inputs alone, so it
    is a recurrence without heads."""

    num_channels: int = field(kw_only=True)
    has_bias: bool = field(kw_only=True)
    """Whether convolution and projections have biases."""

    @classmethod
    def of(cls, num_channels: int, conv_width: int, *, has_bias: bool) -> ShortConvSpec:
        """Describe the convolution of `num_channels`."""
        return cls(
            recurrence=Recurrence.MAMBA2, num_key_heads=0, num_value_heads=0, key_dim=1,
            value_dim=1, conv_width=conv_width, num_channels=num_channels, has_bias=has_bias,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """What people call the layer."""
        return "short convolution"

    @property
    def conv_channels(self) -> int:
        """Channels under the convolution."""
        return self.num_channels

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the mixer."""
        matrices = 4 * self.num_channels * hidden_size
        biases = (4 * self.num_channels + hidden_size) * self.has_bias
        return matrices + self.num_channels * self.conv_width + biases

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type."""
        return 0


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward block (SwiGLU)."""

    intermediate_size: int

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the block."""
        return 3 * hidden_size * self.intermediate_size

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type."""
        return 0


@dataclass(frozen=True)
class SquaredReluSpec(MlpSpec):
    """A feed-forward block without a gate, `down(relu(up(x)) ** 2)`."""

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of the block."""
        return 2 * hidden_size * self.intermediate_size


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

    def expert_parameters(self, hidden_size: int) -> int:
        """Weights of one expert."""
        return 3 * self.intermediate_size * hidden_size

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of all experts, router and shared block."""
        gates = self.num_experts + (1 if self.shared_size else 0)
        sizes = self.num_experts * self.intermediate_size + self.shared_size
        return (gates + 3 * sizes) * hidden_size

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type."""
        return 0


class Scoring(Enum):
    """How a router of groups scores experts and groups; formulas in `ops/group_routing`."""

    SOFTMAX = "softmax"  # a group is worth its best expert
    BIASED_SIGMOID = "biased_sigmoid"  # a bias in the choice; a group is worth its two best


@dataclass(frozen=True)
class GroupedMoeSpec(MoeSpec):
    """Experts in groups, chosen from the best groups; the shared block has no gate."""

    scoring: Scoring
    num_groups: int
    num_active_groups: int
    scale: float
    """What the chosen experts' weights are multiplied by in the end."""
    sum_eps: float = 1e-20
    """Beside the sum that weights are divided by."""

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of all experts, router and shared block."""
        sizes = self.num_experts * self.intermediate_size + self.shared_size
        return (self.num_experts + 3 * sizes) * hidden_size + self.num_acc_parameters

    @property
    def num_acc_parameters(self) -> int:
        """Those of them that are kept in the accumulation type: the router's bias."""
        return self.num_experts if self.scoring is Scoring.BIASED_SIGMOID else 0


@dataclass(frozen=True)
class SquaredReluMoeSpec(GroupedMoeSpec):
    """The same with experts and a shared block that are `SquaredReluSpec`s."""

    latent_size: int = 0
    """Size that the experts' inputs are projected to, and their sum back from; 0: it is not."""

    def expert_parameters(self, hidden_size: int) -> int:
        """Weights of one expert."""
        return 2 * self.intermediate_size * (self.latent_size or hidden_size)

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of all experts, router, projections and shared block."""
        experts = self.num_experts * self.expert_parameters(hidden_size)
        rows = self.num_experts + 2 * self.shared_size + 2 * self.latent_size
        return experts + rows * hidden_size + self.num_acc_parameters


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


PagedSpec = AttentionSpec | LatentSpec
"""A mixer that attends over pages."""
MixerSpec = PagedSpec | LinearSpec | ParallelSpec
BlockSpec = MlpSpec | MoeSpec


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
