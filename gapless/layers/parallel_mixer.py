"""Mamba-2 and attention side by side in one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.layers.attention import Attention
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target
    from gapless.layers.ssm import Mamba2


class ParallelMixer:
    """`ssm(x) + attention(x)`, summed over the ranks once."""

    def __init__(self, ssm: Mamba2, attention: Attention, place: Placement) -> None:
        self._ssm, self._attention = ssm, attention
        self._communicator = place.communicator

    def __call__(
        self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch
    ) -> Tensor:
        """Map `[T, D]` to `[T, D]`, writing the memories of both."""
        assert isinstance(memory, tuple), "each of the two has its own memory"
        state, pool = memory
        total = self._ssm.term(x, state, batch) + self._attention.term(x, rotary, pool, batch)
        return self._communicator.all_reduce(total)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        return self._ssm.targets(f"{prefix}mamba.") | self._attention.targets(f"{prefix}self_attn.")

    def finalize(self) -> None:
        """Finalize both."""
        self._ssm.finalize()
        self._attention.finalize()
