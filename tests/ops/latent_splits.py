"""How long the window kernel makes its splits, by the kernel's own function.

Imported once Triton knows whether it interprets.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gapless.ops.mla.kernels import _split_len


@triton.jit
def _lengths_kernel(
    out,
    COUNT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    FEW_SPLITS: tl.constexpr,
    FULL_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    o_n = tl.arange(0, COUNT)
    b_len = _split_len(o_n + 1, MIN_SPLIT, FEW_SPLITS, FULL_SPLIT, MAX_SPLITS)
    tl.store(out + o_n, b_len)


def split_lens(count: int, sizes: tuple[int, int, int, int], device: str) -> torch.Tensor:
    """Return positions of a split of rows of 1 to `count` positions, a power of two."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    _lengths_kernel[(1,)](out, count, *sizes)
    return out.cpu()
