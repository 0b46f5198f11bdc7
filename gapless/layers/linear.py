"""Dense projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from gapless.layers.placement import Placement


class Linear:
    """`x W^T (+ b)`. Projections of the same input are merged: their rows follow each other."""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, has_bias: bool = False
    ) -> None:
        self.weight = place.matrix(out_features, in_features)
        self.bias = place.weight(out_features) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """Project `[..., in_features]` to `[..., out_features]`."""
        return F.linear(x, self.weight, self.bias)

    def targets(self, prefix: str, parts: dict[str, int]) -> dict[str, Tensor]:
        """Name the row blocks for the loader: part name to number of rows, in order."""
        found: dict[str, Tensor] = {}
        start = 0
        for name, rows in parts.items():
            found[f"{prefix}{name}.weight"] = self.weight.narrow(0, start, rows)
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = self.bias.narrow(0, start, rows)
            start += rows
        assert start == self.weight.shape[0], "parts cover the projection"
        return found
