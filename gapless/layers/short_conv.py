"""Gated short convolution: what it keeps of the past is its last inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.parallel import linear_of_rank
from gapless.layers.linear import Linear, PartialLinear
from gapless.layers.recurrence import convolve, linear_inputs
from gapless.layers.shard import target

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import ShortConvSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class ShortConv:
    """`out(C * conv(B * x))`, with B, C and x from one projection and nothing behind the sum.

    A rank keeps a share of the channels.
    """

    def __init__(self, hidden_size: int, spec: ShortConvSpec, place: Placement) -> None:
        size = spec.num_channels
        self._in_share, self._channels = place.share(size, size, size), place.share(size)
        self._spec = spec = linear_of_rank(spec, place.world_size)
        self._communicator = place.communicator
        self._in_proj = Linear(hidden_size, 3 * spec.num_channels, place, has_bias=spec.has_bias)
        self._out_proj = PartialLinear(self._channels, hidden_size, place, has_bias=spec.has_bias)
        self._conv = place.weight(spec.num_channels, spec.conv_width)
        self._conv_bias = place.weight(spec.num_channels) if spec.has_bias else None

    def __call__(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor:
        """Map `[T, D]` to `[T, D]`, writing the convolution's ring."""
        memory, batch = linear_inputs(memory, batch)
        before, after, values = self._in_proj(x).chunk(3, dim=-1)
        mixed = convolve(
            before * values, self._conv, memory, batch, bias=self._conv_bias, activation="none"
        )
        return self._communicator.all_reduce(self._out_proj(after * mixed))

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        found = self._in_proj.targets(prefix, {"in_proj": self._in_share})
        found |= self._out_proj.targets(f"{prefix}out_proj")
        found[f"{prefix}conv.weight"] = target(self._conv.unsqueeze(1), 0, self._channels)
        if self._conv_bias is not None:
            found[f"{prefix}conv.bias"] = target(self._conv_bias, 0, self._channels)
        return found

    def finalize(self) -> None:
        """Nothing is derived from the weights."""
