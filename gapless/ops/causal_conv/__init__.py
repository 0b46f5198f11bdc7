"""Short depthwise causal convolution.

CUDA tensors go to the Triton kernels where those serve them, and to the torch definition
otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gapless.ops.causal_conv import reference
from gapless.ops.fallback import log_fallback

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["causal_conv", "causal_conv_qkv", "convolve_window"]


def causal_conv(
    source: Tensor,  # [N, C]
    taps: Tensor,  # [width, T] int64 rows of source, the token's own last
    weight: Tensor,  # [C, width]
    bias: Tensor | None,  # [C]
    *,
    activation: Literal["silu", "none"],
) -> Tensor:  # [T, C] in source's dtype
    """Return act(sum_w weight[:, w] source[taps[w]] + bias). Contract: `reference.causal_conv`."""
    if source.is_cuda:
        from gapless.ops.causal_conv import triton

        reason = triton.unsupported(source)
        if reason is None:
            return triton.causal_conv(source, taps, weight, bias, activation=activation)
        log_fallback("short convolution runs", reason)
    return reference.causal_conv(source, taps, weight, bias, activation=activation)


def causal_conv_qkv(
    source: Tensor,  # [N, C]: all q, all k, all v
    taps: Tensor,  # [width, T] int64 rows of source, the token's own last
    weight: Tensor,  # [C, width]
    *,
    num_heads: int,  # H, of q as of k
    key_dim: int,
    l2norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [T, H * K] twice, and [T, the rest of C]
    """Return q, k and v convolved, the former two normalised by head.

    Contract: `reference.causal_conv_qkv`. What the kernel returns is contiguous.
    """
    if source.is_cuda:
        from gapless.ops.causal_conv import triton

        reason = triton.unsupported(source)
        if reason is None:
            return triton.causal_conv_qkv(
                source, taps, weight, num_heads=num_heads, key_dim=key_dim, l2norm_eps=l2norm_eps
            )
        log_fallback("short convolution runs", reason)
    return reference.causal_conv_qkv(
        source, taps, weight, num_heads=num_heads, key_dim=key_dim, l2norm_eps=l2norm_eps
    )


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
