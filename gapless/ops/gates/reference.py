"""Elementwise gates of the layers; the definition, and the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor


def delta_gates(
    b: Tensor,  # [T, HV]
    a: Tensor,  # [T, HV]
    dt_bias: Tensor,  # [HV] acc dtype
    neg_decay_rate: Tensor,  # [HV] acc dtype, -exp(A_log)
    *,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # [T, HV] acc dtype each
    """Return beta = beta_scale sigmoid(b) and the log decay -exp(A_log) softplus(a + dt_bias).

    Yang et al. 2024, "Gated Delta Networks", section 3.4, with the decay of Mamba-2. With a scale
    of 2, what a token does to the state may have negative eigenvalues: Grazzi et al. 2024,
    "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues".
    """
    beta = b.to(dt_bias.dtype).sigmoid()
    if beta_scale != 1.0:
        beta.mul_(beta_scale)
    log_decay = F.softplus(a.to(dt_bias.dtype) + dt_bias).mul_(neg_decay_rate)
    return beta, log_decay


def sigmoid_gate(
    x: Tensor,  # [T, N]
    gate: Tensor,  # [T, N]
) -> Tensor:  # [T, N] in x's dtype
    """Return x * sigmoid(gate), each factor rounded to its type."""
    return x * gate.sigmoid()
