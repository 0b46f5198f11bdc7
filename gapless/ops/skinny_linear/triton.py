"""`reference.py` on a GPU, for few rows: one launch, the weight read once, no atomics, no sync."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.skinny_linear.float8 import FLOAT8, Float8Matrix
from gapless.ops.skinny_linear.kernels import (
    _skinny_matrix_kernel,
    _skinny_vector_kernel,
    _skinny_wide_kernel,
)
from gapless.ops.skinny_linear.tuning import MAX_ROWS, Matrix, Vector, bucket_of

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.skinny_linear.tuning import Tile

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(x: Tensor, weight: Tensor | Float8Matrix) -> str | None:
    """Return why the kernels cannot serve these tensors, None if they can."""
    entries, scales = _parts(weight)
    if x.dtype not in _DTYPES or entries.dtype is not (x.dtype if scales is None else FLOAT8):
        return f"activations of {x.dtype} with weights of {entries.dtype}"
    if x.stride(-1) != 1 or not entries.is_contiguous():
        return "features that are not contiguous"
    return None


def _parts(weight: Tensor | Float8Matrix) -> tuple[Tensor, Tensor | None]:
    """Return a weight's entries [N, K], and what its rows are multiplied by [N], if by anything."""
    return (weight.values, weight.scales) if isinstance(weight, Float8Matrix) else (weight, None)


def skinny_linear(
    x: Tensor,  # [M, K], rows may be strided; M from 1 to 64
    weight: Tensor | Float8Matrix,  # [N, K], contiguous
    bias: Tensor | None,  # [N]
    tile: Tile,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # [M, N]
    """See `reference.skinny_linear`. Sums in float32, rounds once.

    No row's bits depend on another's values, nor on the number of rows unless the vector kernel
    runs. Its work grows with the rows, so it is meant for at most 4; it takes no float8.
    """
    reason = unsupported(x, weight)
    assert reason is None, reason
    rows, inner = x.shape
    size = weight.shape[0]
    assert 1 <= rows <= MAX_ROWS[-1], f"{rows} rows, want 1 to {MAX_ROWS[-1]}"
    assert weight.shape[1] == inner, f"{inner} features for a weight of {weight.shape[1]}"
    out = torch.empty(rows, size, dtype=out_dtype or x.dtype, device=x.device)
    entries, scales = _parts(weight)
    inputs = (entries if bias is None else bias, out, rows, x.stride(0), size, inner)
    # one kernel for all numbers of rows of a bucket
    block_m = MAX_ROWS[bucket_of(rows)]
    settings: dict[str, Any] = {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "HAS_TAIL": inner % tile.step != 0,
        "HAS_BIAS": bias is not None,
        "num_warps": tile.num_warps,
        **chained(x),
    }
    grid = (triton.cdiv(size, tile.block_n),)
    if isinstance(tile, Vector):
        assert scales is None, f"{tile} for a weight in float8"
        _skinny_vector_kernel[grid](
            x, entries, *inputs, **settings, BLOCK_M=block_m, STAGES=tile.num_stages
        )
        return out
    settings |= {
        # the narrowest products of a warp, and of a group of four
        "BLOCK_M": max(8 if isinstance(tile, Matrix) else 16, block_m),
        "PRECISION": "ieee" if x.dtype is torch.float32 else "tf32",
        "HAS_SCALES": scales is not None,
        "num_stages": tile.num_stages,
    }
    scales = entries if scales is None else scales
    if isinstance(tile, Matrix):
        _skinny_matrix_kernel[grid](x, entries, scales, *inputs, **settings, SLICES=tile.slices)
    else:
        _skinny_wide_kernel[grid](x, entries, scales, *inputs, **settings)
    return out
