"""Root-mean-square norms, plain, of a sum and gated; the definition, and the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D] acc dtype, or [H, D] for x [T, H, D]
    eps: float,
) -> Tensor:  # [..., D] in x's dtype
    """Return x * rsqrt(mean(x^2) + eps) * weight, rounded to x's dtype once, at the end.

    `weight` is the whole factor: a model that stores it around zero passes 1 + w.
    """
    return _normed(x, weight, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor,  # [..., D]
    term: Tensor,  # [..., D]
    weight: Tensor,  # [D] acc dtype
    eps: float,
) -> tuple[Tensor, Tensor]:  # twice [..., D] in x's dtype
    """Return x + term, rounded to x's dtype, and `rms_norm` of that."""
    total = x + term
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(
    x: Tensor,  # [..., V]
    gate: Tensor,  # [..., V]
    weight: Tensor,  # [V] acc dtype
    eps: float,
    *,
    activation: Literal["silu", "sigmoid"],
) -> Tensor:  # [..., V] in x's dtype
    """Return rms_norm(x) * act(gate), norm before gate, rounded to x's dtype once, at the end."""
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    normed = _normed(x, weight, eps)
    return (normed * act(gate.to(normed.dtype))).to(x.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(weight.dtype)
    # half the time of torch.nn.functional.rms_norm on CPU, the same formula
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = norm.square_().mul_(1.0 / wide.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight)
