"""Full attention with one norm for the queries of all heads and one for the keys of all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.layers.attention import Attention
from gapless.layers.wide_norm import WideNorms

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.attention import WideNormSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


class WideNormAttention(Attention):
    """`Attention` without an output gate, whose norms run over heads."""

    def __init__(
        self, hidden_size: int, spec: WideNormSpec, place: Placement, *, eps: float
    ) -> None:
        assert not spec.has_qk_norm, "norms are those of all heads"
        assert not spec.has_output_gate, "the projection has no gate"
        super().__init__(hidden_size, spec, place, eps=eps, is_zero_centred=False)
        shares = (self._in_shares["q_proj"], self._in_shares["k_proj"])
        self._norms = WideNorms(shares, eps, place)

    def project(self, x: Tensor) -> Tensor:
        """Map `[T, D]` to `[q | k | v]`, q and k normalised."""
        sizes = [self._q_size, self._kv_size, self._kv_size]
        q, k, v = super().project(x).split(sizes, dim=-1)
        return torch.cat((*self._norms(q, k), v), dim=-1)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        return super().targets(prefix) | self._norms.targets((f"{prefix}q_norm", f"{prefix}k_norm"))
