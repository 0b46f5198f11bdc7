"""Dense gated feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.layers.linear import Linear, PartialLinear
from gapless.ops.silu_mul import silu_mul

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.architecture import MlpSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`; a rank keeps a share of the intermediate features."""

    def __init__(self, hidden_size: int, spec: MlpSpec, place: Placement) -> None:
        self._share = place.share(spec.intermediate_size)
        self._gate_up = Linear(hidden_size, 2 * self._share.length, place)
        self._down = PartialLinear(self._share, hidden_size, place)
        self._communicator = place.communicator

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to `[T, D]`."""
        return self._communicator.all_reduce(self.term(x))

    def term(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to this rank's term `[T, D]` of the output."""
        return self._down(silu_mul(self._gate_up(x)))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        return self._gate_up.targets(
            prefix, {"gate_proj": self._share, "up_proj": self._share}
        ) | self._down.targets(f"{prefix}down_proj")
