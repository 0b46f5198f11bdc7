"""Root-mean-square norms: plain, of a sum, and gated.

CUDA tensors go to the Triton kernels where those serve the shape, and to the torch definition
otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gapless.ops.fallback import log_fallback
from gapless.ops.norm import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D] acc dtype, or [H, D] for x [T, H, D]
    eps: float,
) -> Tensor:  # [..., D] in x's dtype
    """Return x * rsqrt(mean(x^2) + eps) * weight. Contract: `reference.rms_norm`."""
    if x.is_cuda:
        from gapless.ops.norm import triton

        reason = triton.unsupported(x, weight)
        if reason is None:
            return triton.rms_norm(x, weight, eps)
        log_fallback("norms run", reason)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: Tensor,  # [..., D]
    term: Tensor,  # [..., D]
    weight: Tensor,  # [D] acc dtype
    eps: float,
) -> tuple[Tensor, Tensor]:  # twice [..., D] in x's dtype
    """Return x + term and its norm. Contract: `reference.add_rms_norm`."""
    if x.is_cuda:
        from gapless.ops.norm import triton

        reason = triton.unsupported(x, weight)
        if reason is None:
            return triton.add_rms_norm(x, term, weight, eps)
        log_fallback("norms run", reason)
    return reference.add_rms_norm(x, term, weight, eps)


def gated_rms_norm(
    x: Tensor,  # [..., V]
    gate: Tensor,  # [..., V]
    weight: Tensor,  # [V] acc dtype
    eps: float,
    *,
    activation: Literal["silu", "sigmoid"],
) -> Tensor:  # [..., V] in x's dtype
    """Return rms_norm(x) * act(gate). Contract: `reference.gated_rms_norm`."""
    if x.is_cuda:
        from gapless.ops.norm import triton

        reason = triton.unsupported(x, weight)
        if reason is None:
            return triton.gated_rms_norm(x, gate, weight, eps, activation=activation)
        log_fallback("norms run", reason)
    return reference.gated_rms_norm(x, gate, weight, eps, activation=activation)
