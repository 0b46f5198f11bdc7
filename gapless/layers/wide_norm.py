"""Root-mean-square norms over features that are split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.layers.shard import target
from gapless.ops.norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gapless.layers.placement import Placement
    from gapless.layers.shard import Share, Target


class WideNorms:
    """RMSNorms of several rows of each token; of each a rank keeps a share of the features.

    Squares are summed over the ranks, in one exchange for all rows. Features that several ranks
    keep are counted as often on each of them, so that their mean is the same.
    """

    def __init__(self, shares: Sequence[Share], eps: float, place: Placement) -> None:
        self._shares = tuple(shares)
        self.weights = tuple(place.acc_weight(share.length) for share in shares)
        self.eps = eps
        self._world_size = place.world_size
        self._communicator = place.communicator

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Normalise this rank's features `[T, share]` of each row, in the rows' type."""
        if self._world_size == 1:
            pairs = zip(rows, self.weights, strict=True)
            return tuple(rms_norm(row, weight, self.eps) for row, weight in pairs)
        wide = [row.to(self.weights[0].dtype) for row in rows]
        sums = torch.stack([row.square().sum(-1) for row in wide], dim=-1)
        sums = self._communicator.all_reduce(sums)
        return tuple(
            (row * (total / (row.shape[1] * self._world_size) + self.eps).rsqrt() * weight).to(
                rows[0].dtype
            )
            for row, weight, total in zip(wide, self.weights, sums.split(1, dim=-1), strict=True)
        )

    def targets(self, names: Sequence[str]) -> dict[str, Target]:
        """Name each row's weight for the loader."""
        return {
            f"{name}.weight": target(weight, 0, share)
            for name, weight, share in zip(names, self.weights, self._shares, strict=True)
        }
