"""Linear mixers, whose past is a state, rings and a convolution: shapes, weights and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gapless.core.dtypes import DTYPE_BYTES

# inside the root of the norm of delta rules' queries and keys, fixed by the model families
# whatever rms_norm_eps says
L2NORM_EPS = 1e-6


class Recurrence(Enum):
    """The three recurrences of the linear layers; formulas in `ops/linear_replay/reference.py`."""

    GATED_DELTA = "gated_delta"  # scalar decay per value head, delta correction
    KIMI_DELTA = "kimi_delta"  # decay per key channel, delta correction
    MAMBA2 = "mamba2"  # scalar decay per head, no correction


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
