"""Dense gated feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from gapless.layers.linear import Linear, PartialLinear

if TYPE_CHECKING:
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
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        return self._gate_up.targets(
            prefix, {"gate_proj": self._share, "up_proj": self._share}
        ) | self._down.targets(f"{prefix}down_proj")
