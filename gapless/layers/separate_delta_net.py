"""Gated DeltaNet whose checkpoints store q, k and v, and what convolves them, apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.layers.delta_net import GatedDeltaNet
from gapless.layers.shard import target

if TYPE_CHECKING:
    from gapless.core.specs.linear import SeparateDeltaSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class SeparateDeltaNet(GatedDeltaNet):
    """`GatedDeltaNet` with a factor of beta and a norm of its own epsilon."""

    def __init__(self, hidden_size: int, spec: SeparateDeltaSpec, place: Placement) -> None:
        super().__init__(hidden_size, spec, place, eps=spec.norm_eps)
        self._beta_scale = spec.beta_scale
        self._key_share = place.share(spec.num_key_heads * spec.key_dim)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        shares = self._shares
        parts = {"q": self._key_share, "k": self._key_share, "v": shares.values}
        rows = {f"{name}_proj": share for name, share in parts.items()}
        rows |= {"g_proj": shares.values, "b_proj": shares.heads, "a_proj": shares.heads}
        found = self._in_proj.targets(prefix, rows) | self._out_proj.targets(f"{prefix}o_proj")
        start = 0
        for name, share in parts.items():
            taps = self._conv.narrow(0, start, share.length).unsqueeze(1)
            found[f"{prefix}{name}_conv1d.weight"] = target(taps, 0, share)
            start += share.length
        return found | {
            f"{prefix}A_log": target(self._neg_decay_rate, 0, shares.heads),
            f"{prefix}dt_bias": target(self._dt_bias, 0, shares.heads),
            f"{prefix}o_norm.weight": self._norm,
        }
