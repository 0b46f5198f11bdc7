"""Sparse mixture-of-experts feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.core.specs.feed_forward import MlpSpec
from gapless.layers.linear import Linear
from gapless.layers.mlp import GatedMlp
from gapless.layers.shard import Share, target
from gapless.ops.moe import Shared, mix_experts, route, takes_shared

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from gapless.core.specs.feed_forward import MoeSpec
    from gapless.layers.mlp import SquaredReluMlp
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


def shared_part(
    block: GatedMlp | SquaredReluMlp | None,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate: Tensor | None = None,
) -> dict[str, Any]:
    """Return what `mix_experts` wants of a shared expert: its matrices, or its term."""
    if block is None:
        return {}
    if takes_shared(x, weights, experts):
        return {"shared": Shared(*block.matrices, gate)}
    return {"extra": (block.term(x), gate)}


class SparseMlp:
    """Weighted sum of the chosen experts, plus `sigmoid(gate(x)) * shared(x)`.

    A rank keeps a share of every expert's intermediate features, and the whole router.
    """

    def __init__(self, hidden_size: int, spec: MoeSpec, place: Placement) -> None:
        self._spec = spec
        # the router and the shared block's gate read the same input: one product
        self._gates = Linear(hidden_size, spec.num_experts + (1 if spec.shared_size else 0), place)
        self._communicator = place.communicator
        self._share = place.share(spec.intermediate_size)
        self._gate_up_share = place.share(spec.intermediate_size, spec.intermediate_size)
        size = self._share.length
        self._gate_up = place.weight(spec.num_experts, 2 * size, hidden_size)
        self._down = place.weight(spec.num_experts, hidden_size, size)
        self._shared: GatedMlp | None = None
        if spec.shared_size:
            self._shared = GatedMlp(hidden_size, MlpSpec(spec.shared_size), place)

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Map `[T, D]` to `[T, D]`; tokens outside of `live` [T] are routed to no expert."""
        gates = self._gates(x)
        weights, experts = route(
            gates[:, : self._spec.num_experts],
            self._spec.num_active,
            renormalises=self._spec.renormalises,
        )
        out = mix_experts(
            x, weights, experts, self._gate_up, self._down, live=live,
            **shared_part(self._shared, x, weights, experts, gates[:, self._spec.num_experts :]),
        )  # fmt: skip
        return self._communicator.all_reduce(out)

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go; experts as the files have them, fused or split."""
        num_experts = self._spec.num_experts
        parts = {"gate": Share.whole(num_experts)}
        found: dict[str, Target] = {}
        if self._shared is not None:
            parts["shared_expert_gate"] = Share.whole(1)
            found |= self._shared.targets(f"{prefix}shared_expert.")
        found |= self._gates.targets(prefix, parts)
        fused = {
            f"{prefix}experts.gate_up_proj": target(self._gate_up, 1, self._gate_up_share),
            f"{prefix}experts.down_proj": target(self._down, 2, self._share),
        }
        if any(name in stored_names for name in fused):
            return found | fused
        for expert in range(num_experts):
            gate, up = self._gate_up[expert].chunk(2)
            name = f"{prefix}experts.{expert}."
            found[f"{name}gate_proj.weight"] = target(gate, 0, self._share)
            found[f"{name}up_proj.weight"] = target(up, 0, self._share)
            found[f"{name}down_proj.weight"] = target(self._down[expert], 1, self._share)
        return found
