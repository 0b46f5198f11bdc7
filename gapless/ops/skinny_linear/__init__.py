"""Dense products; those of few rows read their weight at memory speed.

On a GPU few rows go to a kernel where one was found faster than the library's, see `tuning.py`.
The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.skinny_linear import reference
from gapless.ops.skinny_linear.tuning import tile_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["skinny_linear"]


def skinny_linear(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., N]
    """Return x W^T + b. Contract: `reference.skinny_linear`.

    How a row's sums round may depend on how many rows there are.
    """
    if x.is_cuda and x.dtype.itemsize == 2:
        from gapless.ops.skinny_linear import triton

        flat = x.flatten(0, -2)
        tile = tile_of(len(flat), *weight.shape)
        if tile is not None and triton.unsupported(flat, weight) is None:
            out = triton.skinny_linear(flat, weight, bias, tile, out_dtype=out_dtype)
            return out.view(*x.shape[:-1], -1)
    return reference.skinny_linear(x, weight, bias, out_dtype=out_dtype)
