"""Dense feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from gapless.layers.linear import Linear, PartialLinear
from gapless.ops.silu_mul import silu_mul

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

    from gapless.core.specs.feed_forward import MlpSpec, SquaredReluSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`; a rank keeps a share of the intermediate features."""

    def __init__(self, hidden_size: int, spec: MlpSpec, place: Placement) -> None:
        self._share = place.share(spec.intermediate_size)
        self._gate_up_share = place.share(spec.intermediate_size, spec.intermediate_size)
        self._gate_up = Linear(hidden_size, 2 * self._share.length, place)
        self._down = PartialLinear(self._share, hidden_size, place)
        self._communicator = place.communicator

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Map `[T, D]` to `[T, D]`, tokens that are not `live` [T] like all others."""
        return self._communicator.all_reduce(self.term(x))

    def term(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to this rank's term `[T, D]` of the output."""
        return self._down(silu_mul(self._gate_up(x)))

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Rows of gate and then up [2 I, D], and down [D, I], this rank's share."""
        return self._gate_up.weight, self._down.weight

    def targets(self, prefix: str, stored_names: Collection[str] = ()) -> dict[str, Target]:
        """Checkpoint names and where they go; gate and up as the files have them, fused or not."""
        parts = {"gate_proj": self._share, "up_proj": self._share}
        if f"{prefix}gate_up_proj.weight" in stored_names:
            parts = {"gate_up_proj": self._gate_up_share}
        return self._gate_up.targets(prefix, parts) | self._down.targets(f"{prefix}down_proj")


class SquaredReluMlp:
    """`down(relu(up(x)) ** 2)`; a rank keeps a share of the intermediate features.

    So et al. 2021, "Primer: Searching for Efficient Transformers for Language Modeling", section 3.
    """

    def __init__(self, hidden_size: int, spec: SquaredReluSpec, place: Placement) -> None:
        self._share = place.share(spec.intermediate_size)
        self._up = Linear(hidden_size, self._share.length, place)
        self._down = PartialLinear(self._share, hidden_size, place)
        self._communicator = place.communicator

    def __call__(self, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Map `[T, D]` to `[T, D]`, tokens that are not `live` [T] like all others."""
        return self._communicator.all_reduce(self.term(x))

    def term(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to this rank's term `[T, D]` of the output."""
        return self._down(F.relu(self._up(x)).square())

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """Rows of up [I, D], and down [D, I], this rank's share."""
        return self._up.weight, self._down.weight

    def targets(self, prefix: str, stored_names: Collection[str] = ()) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        return self._up.targets(prefix, {"up_proj": self._share}) | self._down.targets(
            f"{prefix}down_proj"
        )
