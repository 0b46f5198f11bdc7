"""Sparse feed-forward block whose router chooses groups of experts first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.specs.feed_forward import MlpSpec, Scoring
from gapless.layers.mlp import GatedMlp
from gapless.layers.moe import SparseMlp, shared_part
from gapless.ops.group_routing import route_in_groups
from gapless.ops.moe import mix_experts

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from gapless.core.specs.feed_forward import GroupedMoeSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class GroupedMlp(SparseMlp):
    """Weighted sum of the chosen experts, plus `shared(x)`; experts as in `SparseMlp`."""

    def __init__(self, hidden_size: int, spec: GroupedMoeSpec, place: Placement) -> None:
        # what is shared here has no gate in the router's product
        super().__init__(hidden_size, replace(spec, shared_size=0), place)
        self._routing = spec
        self._always: GatedMlp | None = None
        if spec.shared_size:
            self._always = GatedMlp(hidden_size, MlpSpec(spec.shared_size), place)
        self._bias: Tensor | None = None
        if spec.scoring is Scoring.BIASED_SIGMOID:
            self._bias = place.acc_weight(spec.num_experts)

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Map `[T, D]` to `[T, D]`; tokens outside of `live` [T] are routed to no expert."""
        weights, experts = route_in_groups(self._gates(x), self._bias, self._routing)
        out = mix_experts(
            x, weights, experts, self._gate_up, self._down, live=live,
            **shared_part(self._always, x, weights, experts),
        )  # fmt: skip
        return self._communicator.all_reduce(out)

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go; experts as the files have them, fused or split."""
        found = super().targets(prefix, stored_names)
        if self._bias is not None:
            found[f"{prefix}gate.e_score_correction_bias"] = self._bias
        if self._always is not None:
            found |= self._always.targets(f"{prefix}shared_experts.", stored_names)
        return found
