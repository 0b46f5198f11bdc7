"""A dense product; the definition, and the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from gapless.ops.skinny_linear.float8 import Float8Matrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def skinny_linear(
    x: Tensor,  # [..., K]
    weight: Tensor | Float8Matrix,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., N]
    """Return x W^T + b in `out_dtype`, by default x's dtype.

    A kernel accumulates in float32 and rounds once; this may round to x's dtype first.
    """
    if isinstance(weight, Float8Matrix):
        out = F.linear(x, weight.values.to(x.dtype)) * weight.scales
        out = out if bias is None else out + bias
        return out.to(out_dtype or x.dtype)
    out = F.linear(x, weight, bias)
    return out if out_dtype is None else out.to(out_dtype)
