"""Feed-forward blocks, of one network or of experts: their shapes and weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


BlockSpec = MlpSpec | MoeSpec
