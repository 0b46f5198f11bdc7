"""The norms of `reference.py` in one launch each, in float32 between their roundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.norm.kernels import _gated_rms_norm_kernel, _rms_norm_kernel

if TYPE_CHECKING:
    from torch import Tensor

MAX_SIZE = 16384  # entries of a row that one program holds
TILE_LEN = 1024  # elements of a program's tile, or one row
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(x: Tensor, weight: Tensor) -> str | None:
    """Return why the kernels cannot serve these rows, None if they can."""
    if x.dtype not in _DTYPES or weight.dtype is not torch.float32:
        return f"rows of {x.dtype} with weights of {weight.dtype}"
    if weight.ndim != 1:
        return f"weights of {weight.ndim} axes, want 1"
    if x.shape[-1] > MAX_SIZE:
        return f"rows of {x.shape[-1]} entries, want at most {MAX_SIZE}"
    return None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`. Rows [..., D] may be strided; one weight serves all of them."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_plain(_rows(x), None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, term: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`. Rows [..., D] may be strided."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty_like(total)
    _launch_plain(_rows(x), _rows(term), weight, eps, out, total)
    return total, out


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: Literal["silu", "sigmoid"],
) -> Tensor:
    """See `reference.gated_rms_norm`. Rows [..., V] may be strided."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert weight.ndim == 1, f"weights of {weight.ndim} axes, want 1"
    rows, gates = _rows(x), _rows(gate)
    tile = _Tile.of(rows)
    if not tile.num_rows:
        return out
    _gated_rms_norm_kernel[tile.grid](
        rows,
        gates,
        weight,
        out,
        tile.num_rows,
        eps,
        rows.stride(0),
        rows.stride(1),
        gates.stride(0),
        gates.stride(1),
        INNER=rows.shape[1],
        D=rows.shape[2],
        BLOCK_ROWS=tile.block_rows,
        BLOCK_D=tile.block_d,
        IS_SILU=activation == "silu",
        num_warps=tile.num_warps,
        **chained(rows),
    )
    return out


@dataclass(frozen=True)
class _Tile:
    num_rows: int
    block_rows: int
    block_d: int
    num_warps: int

    @classmethod
    def of(cls, rows: Tensor) -> _Tile:  # [outer, inner, D]
        num_rows = rows.shape[0] * rows.shape[1]
        block_d = triton.next_power_of_2(rows.shape[2])
        block_rows = max(1, TILE_LEN // block_d)
        # 8 elements, 16 bytes of bfloat16, for each thread
        num_warps = min(16, max(1, block_rows * block_d // 256))
        return cls(num_rows, block_rows, block_d, num_warps)

    @property
    def grid(self) -> tuple[int]:
        return (triton.cdiv(self.num_rows, self.block_rows),)


def _launch_plain(
    rows: Tensor, term: Tensor | None, weight: Tensor, eps: float, out: Tensor, total: Tensor | None
) -> None:
    assert weight.ndim == 1, f"weights of {weight.ndim} axes, want 1"
    tile = _Tile.of(rows)
    if not tile.num_rows:
        return
    # without a term nobody reads or writes what stands in for it
    other = rows if term is None else term
    _rms_norm_kernel[tile.grid](
        rows,
        other,
        weight,
        out,
        out if total is None else total,
        tile.num_rows,
        eps,
        rows.stride(0),
        rows.stride(1),
        other.stride(0),
        other.stride(1),
        INNER=rows.shape[1],
        D=rows.shape[2],
        BLOCK_ROWS=tile.block_rows,
        BLOCK_D=tile.block_d,
        HAS_TERM=term is not None,
        num_warps=tile.num_warps,
        **chained(rows),
    )


def _rows(x: Tensor) -> Tensor:
    """Return [..., D] as [outer, inner, D], a view where the last three axes allow it."""
    if x.ndim > 3:
        x = x.flatten(0, -3)
    elif x.ndim < 3:
        x = x.reshape(-1, 1, x.shape[-1])
    return x if x.stride(2) == 1 else x.contiguous()
