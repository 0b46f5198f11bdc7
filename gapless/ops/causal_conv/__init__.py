"""Short depthwise causal convolution.

CUDA tensors go to the Triton kernels where those serve them, and to the torch definition
otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gapless.ops.causal_conv import reference
from gapless.ops.causal_conv.reference import SegmentIndices
from gapless.ops.fallback import log_fallback

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SegmentIndices", "convolve_segments", "convolve_segments_qkv", "convolve_window"]


def convolve_segments(
    inputs: Tensor,  # [T, C], rows may be strided
    ring: Tensor,  # [entries, C], written
    indices: SegmentIndices,
    weight: Tensor,  # [C, width]
    bias: Tensor | None,  # [C]
    *,
    activation: Literal["silu", "none"],
) -> Tensor:  # [T, C] in ring's dtype
    """Convolve a chunk's inputs and keep some. Contract: `reference.convolve_segments`."""
    if ring.is_cuda:
        from gapless.ops.causal_conv import triton

        reason = triton.unsupported(ring)
        if reason is None:
            return triton.convolve_segments(
                inputs, ring, indices, weight, bias, activation=activation
            )
        log_fallback("short convolution runs", reason)
    return reference.convolve_segments(inputs, ring, indices, weight, bias, activation=activation)


def convolve_segments_qkv(
    inputs: Tensor,  # [T, C]: all q, all k, all v; rows may be strided
    ring: Tensor,  # [entries, C], written
    indices: SegmentIndices,
    weight: Tensor,  # [C, width]
    *,
    num_heads: int,  # H, of q as of k
    key_dim: int,
    l2norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [T, H * K] twice, and [T, the rest of C]
    """Do the same and return q, k and v, the former two normalised by head.

    Contract: `reference.convolve_segments_qkv`. What the kernel returns is contiguous.
    """
    if ring.is_cuda:
        from gapless.ops.causal_conv import triton

        reason = triton.unsupported(ring)
        if reason is None:
            return triton.convolve_segments_qkv(
                inputs, ring, indices, weight,
                num_heads=num_heads, key_dim=key_dim, l2norm_eps=l2norm_eps,
            )  # fmt: skip
        log_fallback("short convolution runs", reason)
    return reference.convolve_segments_qkv(
        inputs, ring, indices, weight,
        num_heads=num_heads, key_dim=key_dim, l2norm_eps=l2norm_eps,
    )  # fmt: skip


def convolve_window(
    inputs: Tensor,  # [B * W, C], rows may be strided
    ring: Tensor,  # [entries, C], written
    write: Tensor,  # [B * W] int64 entries
    taps: Tensor,  # [width, B * W] int64 entries, the token's own last
    weight: Tensor,  # [C, width]
    bias: Tensor | None,  # [C]
    *,
    num_rows: int,  # B
    activation: Literal["silu", "none"],
) -> Tensor:  # [B * W, C] in ring's dtype
    """Store a window's inputs and convolve them. Contract: `reference.convolve_window`."""
    if ring.is_cuda:
        from gapless.ops.causal_conv import triton

        reason = triton.unsupported(ring)
        if reason is None:
            return triton.convolve_window(
                inputs, ring, write, taps, weight, bias, num_rows=num_rows, activation=activation
            )
        log_fallback("short convolution runs", reason)
    return reference.convolve_window(
        inputs, ring, write, taps, weight, bias, num_rows=num_rows, activation=activation
    )
