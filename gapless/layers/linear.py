"""Dense projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.layers.shard import target
from gapless.ops.skinny_linear import skinny_linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gapless.layers.placement import Placement
    from gapless.layers.shard import Share, Target


class Linear:
    """`x W^T (+ b)`. Projections of the same input are merged: their rows follow each other.

    Of each projection a rank may keep a share of the rows, and so of the output features.
    """

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, has_bias: bool = False
    ) -> None:
        self.weight = place.matrix(out_features, in_features)
        self.bias = place.weight(out_features) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[..., in_features]` to `[..., out_features]`."""
        return skinny_linear(x, self.weight, self.bias)

    def targets(self, prefix: str, parts: Mapping[str, Share]) -> dict[str, Target]:
        """Name the row blocks for the loader: part name to share of its rows, in order."""
        found: dict[str, Target] = {}
        start = 0
        for name, share in parts.items():
            rows = self.weight.narrow(0, start, share.length)
            found[f"{prefix}{name}.weight"] = target(rows, 0, share)
            if self.bias is not None:
                own = self.bias.narrow(0, start, share.length)
                found[f"{prefix}{name}.bias"] = target(own, 0, share)
            start += share.length
        assert start == self.weight.shape[0], "parts cover the projection"
        return found


class PartialLinear:
    """A rank's term of `x W^T (+ b)`: it keeps a share of the columns, and so of the input.

    The sum over the ranks is the product; the bias is in rank 0's term.
    """

    def __init__(
        self, share: Share, out_features: int, place: Placement, *, has_bias: bool = False
    ) -> None:
        self._share = share
        self.weight = place.matrix(out_features, share.length)
        self._bias = place.weight(out_features) if has_bias else None
        self._own_bias = self._bias if place.rank == 0 else None

    def __call__(self, x: Tensor) -> Tensor:
        """Map this rank's input features `[..., share]` to `[..., out_features]`."""
        return skinny_linear(x, self.weight, self._own_bias)

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        found = {f"{name}.weight": target(self.weight, 1, self._share)}
        if self._bias is not None:
            found[f"{name}.bias"] = self._bias
        return found
