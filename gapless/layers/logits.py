"""Logits as the ranks of a model make them: each those of its part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.layers.placement import Communicator


@dataclass(frozen=True)
class LogitShard:
    """One rank's logits of N rows; every rank asks the same of its own, in the same order."""

    part: Tensor  # [N, C]: as many on each rank, anything beyond the vocabulary
    first: int  # id of the first token
    vocab_size: int
    communicator: Communicator

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of them."""
        return self.part.shape[1] >= self.vocab_size

    @property
    def own(self) -> Tensor:  # [N, C]
        """The part, with minus infinity beyond the vocabulary."""
        size = self.part.shape[1]
        length = min(max(self.vocab_size - self.first, 0), size)
        if length == size:
            return self.part
        return F.pad(self.part[:, :length], (0, size - length), value=float("-inf"))

    def gathered(self) -> LogitShard:
        """Return the logits of the whole vocabulary, the same bits on every rank."""
        if self.is_whole:
            return self
        return self.with_whole(self.communicator.all_gather(self.part)[:, : self.vocab_size])

    def with_whole(self, logits: Tensor) -> LogitShard:  # [N, V]
        """Return a shard of some other logits, which every rank has whole."""
        return replace(self, part=logits, first=0)

    def whole(self) -> Tensor:  # [N, V]
        """Return what `gathered` does, as a tensor."""
        return self.gathered().part
