"""Dense products; those of few rows read their weight at memory speed.

On a GPU few rows go to a kernel where one was found faster than the library's, see `tuning.py`.
The choice reads shapes only: no sync. A `Float8Matrix` is half the bytes of a 16-bit weight, so few
rows take half the time; many rows would take as long as with the weight that it is a copy of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.skinny_linear import reference
from gapless.ops.skinny_linear.float8 import Float8Matrix
from gapless.ops.skinny_linear.tuning import tile_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Float8Matrix", "skinny_linear"]


def skinny_linear(
    x: Tensor,  # [..., K]
    weight: Tensor | Float8Matrix,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [..., N]
    """Return x W^T + b. Contract: `reference.skinny_linear`.

    How a row's sums round may depend on how many rows there are.
    """
    is_float8 = isinstance(weight, Float8Matrix)
    if x.is_cuda and (is_float8 or x.dtype.itemsize == 2):
        from gapless.ops.skinny_linear import triton

        flat = x.flatten(0, -2)
        tile = tile_of(len(flat), *weight.shape, is_float8=is_float8)
        if tile is not None and triton.unsupported(flat, weight) is None:
            out = triton.skinny_linear(flat, weight, bias, tile, out_dtype=out_dtype)
            return out.view(*x.shape[:-1], -1)
        if isinstance(weight, torch.Tensor) and out_dtype is torch.float32 and bias is None:
            # as the library summed it: rounding and widening would be two more passes
            return torch.mm(flat, weight.t(), out_dtype=out_dtype).view(*x.shape[:-1], -1)
    return reference.skinny_linear(x, weight, bias, out_dtype=out_dtype)
