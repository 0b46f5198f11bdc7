"""Group-limited routing to experts; the definition, and the CPU path.

Experts stand in groups of equal size, in order. DeepSeek-V2 (DeepSeek-AI 2024, section 2.2):

    s = softmax(logits),  a group is worth its largest s
    chosen = top-k of s in the best groups,  weights = scale s[chosen]

DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2, equations 12 to 16):

    s = sigmoid(logits),  b = s + bias,  a group is worth the sum of its two largest b
    chosen = top-k of b in the best groups,  weights = scale s[chosen] (/ their sum)

The bias decides the choice and never the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.core.specs.feed_forward import Scoring

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.specs.feed_forward import GroupedMoeSpec


def route_in_groups(
    logits: Tensor,  # [T, E]
    bias: Tensor | None,  # [E] acc dtype, with `Scoring.BIASED_SIGMOID`
    spec: GroupedMoeSpec,
) -> tuple[Tensor, Tensor]:  # weights [T, k] acc dtype, experts [T, k] int64
    """Choose the k best experts of every token; return them in ascending order.

    Scores are in acc dtype, at least float32. Ties go to the lowest id, of groups and of experts.
    Ids are below E and differ in every row, also where logits are NaN.
    """
    acc = torch.promote_types(logits.dtype, torch.float32)
    if spec.scoring is Scoring.SOFTMAX:
        assert bias is None, "a softmax router has no bias"
        scores = wanted = logits.to(acc).softmax(-1)
        num_best = 1
    else:
        assert bias is not None, "a sigmoid router has a bias"
        scores = logits.to(acc).sigmoid()
        wanted = scores + bias
        num_best = 2
    if spec.num_active_groups < spec.num_groups:
        wanted = _within_best_groups(wanted, spec, num_best)
    # a top-k would leave the order of ties open
    ranked = wanted.sort(dim=-1, descending=True, stable=True)[1]
    experts = ranked[:, : spec.num_active].sort(-1)[0]
    weights = scores.gather(1, experts)
    if spec.renormalises:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.sum_eps)
    return weights * spec.scale, experts


def _within_best_groups(wanted: Tensor, spec: GroupedMoeSpec, num_best: int) -> Tensor:
    """Put what is outside of the best groups below everything."""
    grouped = wanted.unflatten(1, (spec.num_groups, -1))
    worth = grouped.sort(dim=-1, descending=True)[0][..., :num_best].sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True)[1][:, : spec.num_active_groups]
    is_open = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, value=True)
    found: Tensor = grouped.masked_fill(~is_open[..., None], float("-inf"))
    return found.flatten(1)
