"""Where a layer's tensors live, in which type, and which part of them a rank keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from gapless.layers.shard import Share


class Communicator(Protocol):
    """Exchanges tensors between the ranks of a model; every rank makes the same calls in order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, the same bits on each; may overwrite `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` [N, C] side by side, [N, world_size * C]."""
        ...


class Alone:
    """The communicator of the only rank."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x


@dataclass(frozen=True)
class Placement:
    """Device and type of weights and activations, and one rank's place among all."""

    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world_size: int = 1
    communicator: Communicator = field(default_factory=Alone)

    @property
    def acc_dtype(self) -> torch.dtype:
        """Type of norms, gates, decays and logits: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def is_input_major(self) -> bool:
        """Whether matrices lie in memory with their input axis first.

        Measured on CPUs: products of 1 to 16 rows with `[in, out]` run 1.4 to 1.8 times as fast
        as with `[out, in]`, from the same bytes.
        """
        return self.device.type == "cpu"

    def matrix(self, out_features: int, in_features: int) -> torch.Tensor:
        """Make an unwritten `[out, in]` matrix in the layout that the device multiplies best."""
        if self.is_input_major:
            return self.weight(in_features, out_features).t()
        return self.weight(out_features, in_features)

    def weight(self, *shape: int) -> torch.Tensor:
        """Make an unwritten weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def acc_weight(self, *shape: int) -> torch.Tensor:
        """Make an unwritten weight that is kept in the accumulation type."""
        return torch.empty(shape, dtype=self.acc_dtype, device=self.device)

    def share(self, *sizes: int) -> Share:
        """Split each of several parts that follow each other on an axis evenly over the ranks."""
        if self.world_size == 1:
            return Share.whole(sum(sizes))
        ranges: list[tuple[int, int]] = []
        start = 0
        for size in sizes:
            assert size % self.world_size == 0, f"{size} entries over {self.world_size} ranks"
            own = size // self.world_size
            ranges.append((start + self.rank * own, own))
            start += size
        return Share(start, tuple(ranges))

    def head_share(self, num_heads: int, head_dim: int) -> Share:
        """Split heads over the ranks; of fewer heads than ranks, neighbours keep the same one."""
        count = max(1, num_heads // self.world_size)
        first = self.rank * num_heads // self.world_size
        return Share(num_heads * head_dim, ((first * head_dim, count * head_dim),))

    def padded_share(self, size: int, own: int) -> Share:
        """Give each rank the next `own` entries; the last ranks find fewer, or none."""
        start = min(size, self.rank * own)
        return Share(size, ((start, min(own, size - start)),))
