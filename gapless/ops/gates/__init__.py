"""Elementwise gates: beta and decay of the delta rules, and a sigmoid gate on an output.

CUDA tensors up to float32 go to the Triton kernels, all others to the torch definition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.gates import reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["delta_gates", "sigmoid_gate"]


def delta_gates(
    b: Tensor,  # [T, HV]
    a: Tensor,  # [T, HV]
    dt_bias: Tensor,  # [HV] acc dtype
    neg_decay_rate: Tensor,  # [HV] acc dtype, -exp(A_log)
    *,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # [T, HV] acc dtype each
    """Return beta and the log decay of the delta rules. Contract: `reference.delta_gates`."""
    if b.is_cuda and dt_bias.dtype == torch.float32:
        from gapless.ops.gates import triton

        return triton.delta_gates(b, a, dt_bias, neg_decay_rate, beta_scale=beta_scale)
    return reference.delta_gates(b, a, dt_bias, neg_decay_rate, beta_scale=beta_scale)


def sigmoid_gate(
    x: Tensor,  # [T, N]
    gate: Tensor,  # [T, N]
) -> Tensor:  # [T, N] in x's dtype
    """Return x * sigmoid(gate). Contract: `reference.sigmoid_gate`."""
    if x.is_cuda and x.dtype != torch.float64:
        from gapless.ops.gates import triton

        return triton.sigmoid_gate(x, gate)
    return reference.sigmoid_gate(x, gate)
