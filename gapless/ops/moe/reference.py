"""Sparse mixture of experts; the definition, and the CPU path.

    p = softmax(x W_router^T),  chosen = top-k of p,  y = sum_{e chosen} p_e expert_e(x)
    expert_e(x) = down_e(silu(gate_e(x)) * up_e(x)), or without gates down_e(relu(up_e(x)) ** 2)

(Shazeer et al. 2017, "Outrageously Large Neural Networks", equation 1, with the softmax taken
before the choice.)

Rows are independent: none reads another, so whatever lies in a padded row, NaN too, stays there.
A kernel that groups rows by expert must keep that, and may route padded rows to no expert. Each
row sums its experts in ascending id, whatever else is in the batch. Nothing waits for the device:
which experts are chosen decides no shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

# chosen experts over all experts up to which copying each token's matrices is cheaper than running
# every expert; measured on CPUs with 8 to 512 experts, where the two meet between 0.4 and 2
GATHERED_SHARE = 0.5


def route(
    logits: Tensor,  # [T, E]
    num_active: int,  # k
    *,
    renormalises: bool,
) -> tuple[Tensor, Tensor]:  # weights [T, k] acc dtype, experts [T, k] int64
    """Choose the k most probable experts of every token; return them in ascending order.

    Probabilities are a softmax over all experts in acc dtype, at least float32; with
    `renormalises` the weights are divided by their sum. Ties go to the lowest id. Ids are below E
    in every row, also where logits are NaN.
    """
    acc = torch.promote_types(logits.dtype, torch.float32)
    # a top-k would leave the order of ties open
    scores = logits.to(acc).softmax(-1)
    ranked = scores.sort(dim=-1, descending=True, stable=True)[1]
    experts = ranked[:, :num_active].sort(-1)[0]
    weights = scores.gather(1, experts)
    if renormalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def mix_experts(
    x: Tensor,  # [T, D]
    weights: Tensor,  # [T, k] acc dtype
    experts: Tensor,  # [T, k] int64, ascending in each row
    gate_up: Tensor,  # [E, 2 I, D], gate first, or without gates [E, I, D]
    down: Tensor,  # [E, D, I]
) -> Tensor:  # [T, D] in x's dtype
    """Return the weighted sum of every token's chosen experts, rounded once, at the end.

    An expert that was not chosen adds nothing, also where its output is infinite.
    """
    num_chosen, num_experts = experts.numel(), gate_up.shape[0]
    mix = mix_gathered if num_chosen <= GATHERED_SHARE * num_experts else mix_dense
    return mix(x, weights, experts, gate_up, down)


def mix_gathered(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """`mix_experts` with the matrices of every token's experts copied: for few tokens."""
    chosen = experts.view(-1)
    rows = x.repeat_interleave(experts.shape[1], 0)[..., None]
    projected = torch.bmm(gate_up.index_select(0, chosen), rows)
    hidden = _activated(projected.squeeze(-1), down.shape[2])
    outputs = torch.bmm(down.index_select(0, chosen), hidden[..., None])
    weighted = outputs.view(*experts.shape, -1) * weights[..., None]
    total, *others = weighted.unbind(1)
    for term in others:
        total = total + term
    return total.to(x.dtype)


def mix_dense(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`mix_experts` with every expert run on every token: for many tokens."""
    num_experts = gate_up.shape[0]
    shape = (x.shape[0], num_experts)
    weight_of = weights.new_zeros(shape).scatter_(1, experts, weights)
    is_chosen = torch.zeros(shape, dtype=torch.bool, device=x.device).scatter_(
        1, experts, value=True
    )
    out = weights.new_zeros(x.shape)
    for expert in range(num_experts):
        hidden = _activated(F.linear(x, gate_up[expert]), down.shape[2])
        term = F.linear(hidden, down[expert]) * weight_of[:, expert, None]
        # selected, not multiplied: zero times infinity is NaN
        out += term.masked_fill_(~is_chosen[:, expert, None], 0.0)
    return out.to(x.dtype)


def finish(out: Tensor, live: Tensor | None, extra: tuple[Tensor, Tensor | None] | None) -> Tensor:
    """Add a shared expert's term, gated or not, and put zeros where no token is live."""
    if extra is not None:
        term, gate = extra
        out = out + (term if gate is None else term * gate.sigmoid())
    return out if live is None else out.masked_fill(~live[:, None], 0.0)


def _activated(projected: Tensor, size: int) -> Tensor:  # [N, 2 I] or [N, I] -> [N, I]
    """Gate by SiLU, or square what is positive of `size` features, which are ups alone."""
    if projected.shape[1] == size:
        return F.relu(projected).square()
    gate, up = projected.chunk(2, dim=-1)
    return F.silu(gate) * up
