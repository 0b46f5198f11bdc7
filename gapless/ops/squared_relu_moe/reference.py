"""Mixture of experts without gates; the definition, and the CPU path.

    y = sum_{e chosen} w_e down_e(relu(up_e(x)) ** 2)

Rows are independent, and each sums its experts in ascending id, as in `ops/moe/reference.py`.
Nothing waits for the device: which experts are chosen decides no shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

# chosen experts over all experts up to which copying each token's matrices is cheaper than running
# every expert; that of gated experts
GATHERED_SHARE = 0.5


def mix_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] acc dtype
    experts: Tensor,  # [T, k] int64, ascending in each row
    up: Tensor,  # [E, I, D]
    down: Tensor,  # [E, D, I]
) -> Tensor:  # [T, D] in x's dtype
    """Return the weighted sum of every token's chosen experts, rounded once, at the end.

    An expert that was not chosen adds nothing, also where its output is infinite.
    """
    few = experts.numel() <= GATHERED_SHARE * up.shape[0]
    return (mix_gathered if few else mix_dense)(x, weights, experts, up, down)


def mix_gathered(x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`mix_experts` with the matrices of every token's experts copied: for few tokens."""
    chosen = experts.view(-1)
    rows = x.repeat_interleave(experts.shape[1], 0)[..., None]
    hidden = F.relu(torch.bmm(up.index_select(0, chosen), rows)).square()
    outputs = torch.bmm(down.index_select(0, chosen), hidden)
    weighted = outputs.view(*experts.shape, -1) * weights[..., None]
    total, *others = weighted.unbind(1)
    for term in others:
        total = total + term
    return total.to(x.dtype)


def mix_dense(x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """`mix_experts` with every expert run on every token: for many tokens."""
    shape = (x.shape[0], up.shape[0])
    weight_of = weights.new_zeros(shape).scatter_(1, experts, weights)
    is_chosen = torch.zeros(shape, dtype=torch.bool, device=x.device).scatter_(
        1, experts, value=True
    )
    out = weights.new_zeros(x.shape)
    for expert in range(up.shape[0]):
        hidden = F.relu(F.linear(x, up[expert])).square()
        term = F.linear(hidden, down[expert]) * weight_of[:, expert, None]
        # selected, not multiplied: zero times infinity is NaN
        out += term.masked_fill_(~is_chosen[:, expert, None], 0.0)
    return out.to(x.dtype)
