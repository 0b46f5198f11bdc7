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

    from gapless.ops.skinny_linear.tuning import Tile

__all__ = ["kept_dtype", "skinny_linear"]


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
    tile = _tile(x, weight)
    if tile is None:
        return reference.skinny_linear(x, weight, bias, out_dtype=out_dtype)
    from gapless.ops.skinny_linear import triton

    out = triton.skinny_linear(x.flatten(0, -2), weight, bias, tile, out_dtype=out_dtype)
    return out.view(*x.shape[:-1], -1)


def kept_dtype(
    x: Tensor,  # [..., K]
    weight: Tensor,  # [N, K]
    wanted: torch.dtype,
) -> torch.dtype:
    """Return `wanted` if a kernel keeps its sums in it, else x's dtype: the library rounds to that.

    `skinny_linear` in this dtype says as much as in `wanted`.
    """
    return x.dtype if _tile(x, weight) is None else wanted


def _tile(x: Tensor, weight: Tensor) -> Tile | None:
    """Return how a kernel multiplies [..., K] by a weight [N, K], None for the library."""
    if not x.is_cuda or x.dtype.itemsize != 2:
        return None
    from gapless.ops.skinny_linear import triton

    if triton.unsupported(x, weight) is not None:
        return None
    return tile_of(x.numel() // x.shape[-1], *weight.shape)
