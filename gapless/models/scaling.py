"""Multiplies factors that a model's config gives for activations into the weights behind them.

A factor that meets a product before or behind it is one of the weights, so that a step does not
know of it. Each weight is rounded once more in the engine's dtype.
"""

from __future__ import annotations

from re import fullmatch
from typing import TYPE_CHECKING

import torch

from gapless.layers.shard import Shard, Share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gapless.core.architecture import WeightScale
    from gapless.layers.shard import Target


def scale_weights(targets: Mapping[str, Target], scales: Sequence[WeightScale]) -> None:
    """Multiply every target that a scale's pattern names, in place, on whichever rank."""
    for scale in scales:
        for name, target in targets.items():
            if fullmatch(scale.pattern, name):
                _scale(target, scale)


def _scale(target: Target, scale: WeightScale) -> None:
    if len(scale.factors) == 1:
        tensor = target.tensor if isinstance(target, Shard) else target
        tensor.mul_(scale.factors[0])
        return
    if not isinstance(target, Shard):
        target = Shard(target, 0, Share.whole(target.shape[0]))
    assert target.dim == 0, "blocks of rows are scaled"
    factors = torch.tensor(scale.factors, dtype=torch.float64)
    by_row = factors.repeat_interleave(torch.tensor(scale.rows))
    assert len(by_row) == target.share.size, "every row has a factor"
    for piece, index in target.pieces():
        own = by_row[index[0]].to(piece.device)
        # a factor in the weight's own type would be rounded before it is used
        piece.copy_(piece.to(torch.float64) * own.view(-1, *[1] * (piece.ndim - 1)))
