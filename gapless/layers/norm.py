"""Root-mean-square norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.norm import add_rms_norm, rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.layers.placement import Placement


class RmsNorm:
    """RMSNorm over the last axis. A zero-centred checkpoint stores `w` where `1 + w` multiplies."""

    def __init__(self, size: int, eps: float, place: Placement, *, is_zero_centred: bool) -> None:
        self.weight = place.acc_weight(size)
        self.eps = eps
        self._is_zero_centred = is_zero_centred

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise `[..., size]`."""
        return rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, term: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `x + term`, or x without a term, and its norm, all `[..., size]`."""
        if term is None:
            return x, self(x)
        return add_rms_norm(x, term, self.weight, self.eps)

    def finalize(self) -> None:
        """Turn the loaded weight into the multiplier, once."""
        if self._is_zero_centred:
            self.weight.add_(1.0)
