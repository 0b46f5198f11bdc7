"""What Mamba-2 does around its recurrence: time steps before it; skip, gate and norm behind it.

CUDA tensors go to the Triton kernels where those serve the shape, and to the torch definition
otherwise, which is logged once per reason. The choice reads shapes only: no sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.fallback import log_fallback
from gapless.ops.ssm_gates import reference

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.linear import GateOrder

__all__ = ["discretise", "skip_gate_norm"]


def discretise(
    x: Tensor,  # [T, HV * V]
    dt: Tensor,  # [T, HV]
    dt_bias: Tensor,  # [HV] acc dtype
    neg_decay_rate: Tensor,  # [HV] acc dtype, -exp(A_log)
    *,
    limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # [T, HV * V] and [T, HV], acc dtype
    """Return what a token adds to the state, and its log decay. Contract: `reference`."""
    if x.is_cuda:
        from gapless.ops.ssm_gates import triton

        reason = triton.unsupported_type(x, dt_bias)
        if reason is None:
            return triton.discretise(x, dt, dt_bias, neg_decay_rate, limit=limit)
        log_fallback("Mamba-2's gates run", reason)
    return reference.discretise(x, dt, dt_bias, neg_decay_rate, limit=limit)


def skip_gate_norm(
    out: Tensor,  # [T, HV * V]
    x: Tensor,  # [T, HV * V]
    z: Tensor,  # [T, HV * V]
    skip: Tensor,  # [HV] acc dtype, D
    weight: Tensor,  # [HV * V] acc dtype, of the norm
    *,
    eps: float,
    num_groups: int,
    order: GateOrder,
) -> Tensor:  # [T, HV * V] in x's dtype
    """Add D x, gate and normalise by group. Contract: `reference`."""
    if x.is_cuda:
        from gapless.ops.ssm_gates import triton

        reason = triton.unsupported_type(x, skip) or triton.unsupported_size(x, num_groups)
        if reason is None:
            return triton.skip_gate_norm(
                out, x, z, skip, weight, eps=eps, num_groups=num_groups, order=order
            )
        log_fallback("Mamba-2's gates run", reason)
    return reference.skip_gate_norm(
        out, x, z, skip, weight, eps=eps, num_groups=num_groups, order=order
    )
