"""Sparse feed-forward block whose experts have no gate, in a latent space or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.specs.feed_forward import Scoring, SquaredReluSpec
from gapless.layers.linear import Linear
from gapless.layers.mlp import SquaredReluMlp
from gapless.layers.moe import shared_part
from gapless.layers.shard import Share, target
from gapless.ops.group_routing import route_in_groups
from gapless.ops.moe import mix_experts

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from gapless.core.specs.feed_forward import SquaredReluMoeSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class SquaredReluMoe:
    """`back(sum of the chosen experts of into(x)) + shared(x)`; projections only where the
    experts live in a latent space.

    A rank keeps a share of every expert's intermediate features, and router and projections whole.
    """

    def __init__(self, hidden_size: int, spec: SquaredReluMoeSpec, place: Placement) -> None:
        assert spec.scoring is Scoring.BIASED_SIGMOID, "the router has a bias"
        self._spec = spec
        self._communicator = place.communicator
        self._router = Linear(hidden_size, spec.num_experts, place)
        self._bias = place.acc_weight(spec.num_experts)
        width = spec.latent_size or hidden_size
        self._into = self._back = None
        if spec.latent_size:
            self._into = Linear(hidden_size, width, place)
            self._back = Linear(width, hidden_size, place)
        self._share = place.share(spec.intermediate_size)
        self._up = place.weight(spec.num_experts, self._share.length, width)
        self._down = place.weight(spec.num_experts, width, self._share.length)
        self._shared: SquaredReluMlp | None = None
        if spec.shared_size:
            self._shared = SquaredReluMlp(hidden_size, SquaredReluSpec(spec.shared_size), place)

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Map `[T, D]` to `[T, D]`; tokens outside of `live` [T] are routed to no expert."""
        weights, experts = route_in_groups(self._router(x), self._bias, self._spec)
        if self._into is None or self._back is None:
            out = mix_experts(
                x, weights, experts, self._up, self._down, live=live,
                **shared_part(self._shared, x, weights, experts),
            )  # fmt: skip
        else:
            latent = mix_experts(self._into(x), weights, experts, self._up, self._down, live=live)
            out = self._back(latent)
            if self._shared is not None:
                out = out + self._shared.term(x)
        return self._communicator.all_reduce(out)

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go; experts as the files have them, fused or split."""
        spec = self._spec
        found = self._router.targets(prefix, {"gate": Share.whole(spec.num_experts)})
        found[f"{prefix}gate.e_score_correction_bias"] = self._bias
        for name, linear in (("fc1_latent_proj", self._into), ("fc2_latent_proj", self._back)):
            if linear is not None:
                found |= linear.targets(prefix, {name: Share.whole(linear.weight.shape[0])})
        if self._shared is not None:
            found |= self._shared.targets(f"{prefix}shared_experts.")
        fused = {
            f"{prefix}experts.up_proj": target(self._up, 1, self._share),
            f"{prefix}experts.down_proj": target(self._down, 2, self._share),
        }
        if any(name in stored_names for name in fused):
            return found | fused
        for expert in range(spec.num_experts):
            name = f"{prefix}experts.{expert}."
            found[f"{name}up_proj.weight"] = target(self._up[expert], 0, self._share)
            found[f"{name}down_proj.weight"] = target(self._down[expert], 1, self._share)
        return found
