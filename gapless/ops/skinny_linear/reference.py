"""A dense product; the definition, and the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def skinny_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., N]
    """Return x W^T + b in `out_dtype`, by default x's dtype.

    A kernel accumulates in float32 and rounds once; this may round to x's dtype first.
    """
    out = F.linear(x, weight, bias)
    return out if out_dtype is None else out.to(out_dtype)
