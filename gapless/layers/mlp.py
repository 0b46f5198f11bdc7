"""Dense gated feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from gapless.layers.linear import Linear

if TYPE_CHECKING:
    from gapless.core.architecture import MlpSpec
    from gapless.layers.placement import Placement


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, spec: MlpSpec, place: Placement) -> None:
        self._size = spec.intermediate_size
        self._gate_up = Linear(hidden_size, 2 * self._size, place)
        self._down = Linear(self._size, hidden_size, place)

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to `[T, D]`."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names and where they go."""
        return self._gate_up.targets(
            prefix, {"gate_proj": self._size, "up_proj": self._size}
        ) | self._down.targets(prefix, {"down_proj": self._down.weight.shape[0]})
