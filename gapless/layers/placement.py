"""Where a layer's tensors live and in which type."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Device and type of weights and activations."""

    device: torch.device
    dtype: torch.dtype

    @property
    def acc_dtype(self) -> torch.dtype:
        """Type of norms, gates, decays and logits: at least float32."""
        return torch.promote_types(self.dtype, torch.float32)

    def weight(self, *shape: int) -> torch.Tensor:
        """Make an unwritten weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def acc_weight(self, *shape: int) -> torch.Tensor:
        """Make an unwritten weight that is kept in the accumulation type."""
        return torch.empty(shape, dtype=self.acc_dtype, device=self.device)
