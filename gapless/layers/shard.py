"""Which part of a stored tensor a rank keeps, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Share:
    """The entries of a stored axis that one rank keeps, in order."""

    size: int
    """Entries of the stored axis."""
    ranges: tuple[tuple[int, int], ...]
    """(start, length) of each run of entries."""

    @classmethod
    def whole(cls, size: int) -> Share:
        """Keep everything."""
        return cls(size, ((0, size),))

    @property
    def length(self) -> int:
        """Entries that are kept."""
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True)
class Shard:
    """A tensor that holds a share of a stored one: along one axis some of it, along others all."""

    tensor: Tensor
    dim: int
    share: Share

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        shape = list(self.tensor.shape)
        shape[self.dim] = self.share.size
        return tuple(shape)

    def pieces(self) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
        """Views of the tensor, and the index of what each holds in the stored one."""
        offset = 0
        for start, length in self.share.ranges:
            index = [slice(0, size) for size in self.stored_shape]
            index[self.dim] = slice(start, start + length)
            if length:
                yield self.tensor.narrow(self.dim, offset, length), tuple(index)
            offset += length


Target = Tensor | Shard
"""Where a stored tensor goes: all of it into a tensor of its shape, or a rank's share of it."""


def target(tensor: Tensor, dim: int, share: Share) -> Target:
    """Make the target that fills `tensor` with a share of a stored axis."""
    assert tensor.shape[dim] == share.length, f"{tensor.shape[dim]} entries for {share.length}"
    return tensor if share == Share.whole(share.size) else Shard(tensor, dim, share)
