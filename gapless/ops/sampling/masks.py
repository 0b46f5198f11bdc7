"""Masks of tokens, a bit per token: what grammars allow; also the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MaskRows:
    """Which mask each row of logits is under."""

    mask_of: Tensor  # [N] int32: a row of `masks`; row 0 allows everything
    masks: Tensor  # [M, ceil(V / 32)] int32: bit t % 32 of word t // 32 allows token t


def mask_logits(
    logits: Tensor,  # [N, V]; not modified
    rows: MaskRows,
) -> Tensor:  # [N, V]
    """Return logits with minus infinity where a row's mask does not allow the token."""
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    words = rows.masks.index_select(0, rows.mask_of)
    is_allowed = (words[:, :, None] >> bit) & 1 == 1
    is_allowed = is_allowed.flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~is_allowed, float("-inf"))
