"""What Mamba-2 does around its recurrence, element by element; the definition, and the CPU path.

    dt' = clamp(softplus(dt + dt_bias)),  v = dt' x,  log_decay = -exp(A_log) dt'
    y = out + D x;  silu(z) y, norm(silu(z) y), or silu(z) norm(y)

(Dao and Gu 2024, "Transformers are SSMs", section 7 and listing 1.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from gapless.core.specs.linear import GateOrder
from gapless.ops.norm.reference import rms_norm

if TYPE_CHECKING:
    from torch import Tensor


def discretise(
    x: Tensor,  # [T, HV * V]
    dt: Tensor,  # [T, HV]
    dt_bias: Tensor,  # [HV] acc dtype
    neg_decay_rate: Tensor,  # [HV] acc dtype, -exp(A_log)
    *,
    limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # [T, HV * V] and [T, HV], acc dtype
    """Return what a token adds to the state, dt' x, and its log decay."""
    acc = dt_bias.dtype
    step = F.softplus(dt.to(acc) + dt_bias).clamp(*limit)
    per_head = x.unflatten(1, (dt.shape[1], -1)).to(acc)
    return (per_head * step[..., None]).flatten(1), step * neg_decay_rate


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
    """Add D x, gate and normalise, rounded once, at the end; a group's channels are one row."""
    acc = skip.dtype
    per_head = x.unflatten(1, (skip.shape[0], -1)).to(acc)
    total: Tensor = out.to(acc) + (per_head * skip[:, None]).flatten(1)
    gate = F.silu(z.to(acc))

    def normed(rows: Tensor) -> Tensor:
        grouped = rows.unflatten(1, (num_groups, -1))
        return rms_norm(grouped, weight.view(num_groups, -1), eps).flatten(1)

    match order:
        case GateOrder.GATE_ALONE:
            total = total * gate
        case GateOrder.GATE_FIRST:
            total = normed(total * gate)
        case GateOrder.NORM_FIRST:
            total = normed(total) * gate
    return total.to(x.dtype)
