"""Matrices in eight bits, for products whose result is only a guess."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.ops.skinny_linear.tuning import tile_of

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
# rows converted together, so that the float32 values on the way take little memory
CONVERTED_ROWS = 1 << 14


@dataclass(frozen=True)
class Float8Matrix:
    """A matrix whose entry (n, k) is `values[n, k] * scales[n]`."""

    values: Tensor  # [N, K] float8 (e4m3), contiguous
    scales: Tensor  # [N] float32

    @classmethod
    def of(cls, weight: Tensor) -> Float8Matrix:
        """Copy `weight` [N, K]: each row's largest magnitude becomes the type's, torch rounds."""
        size, inner = weight.shape
        values = torch.empty(size, inner, dtype=FLOAT8, device=weight.device)
        scales = torch.empty(size, dtype=torch.float32, device=weight.device)
        for start in range(0, size, CONVERTED_ROWS):
            rows = slice(start, start + CONVERTED_ROWS)
            exact = weight[rows].to(torch.float32)
            largest = exact.abs().amax(dim=1)
            # rows of zeros, such as padding, stay zeros
            scales[rows] = torch.where(largest > 0, largest / LARGEST, 1.0)
            values[rows] = (exact / scales[rows, None]).to(FLOAT8)
        return cls(values, scales)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, N and K."""
        size, inner = self.values.shape
        return size, inner

    def serves(self, num_rows: int) -> bool:
        """Whether a product with so many rows of x reads these bytes, and no wider copy."""
        return tile_of(num_rows, *self.shape, is_float8=True) is not None
