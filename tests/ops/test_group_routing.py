"""Routing within the best groups against a plain computation; ties, and rows of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gapless.core.specs.feed_forward import GroupedMoeSpec, Scoring
from gapless.ops.group_routing import route_in_groups

SPEC = GroupedMoeSpec(
    num_experts=12, num_active=3, intermediate_size=1, shared_size=0, renormalises=True,
    scoring=Scoring.BIASED_SIGMOID, num_groups=4, num_active_groups=2, scale=2.5,
)  # fmt: skip
SOFT = replace(SPEC, scoring=Scoring.SOFTMAX, renormalises=False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(logits: Tensor, bias: Tensor, spec: GroupedMoeSpec) -> dict[int, float]:
    """Route one token with Python's own sorting."""
    is_soft = spec.scoring is Scoring.SOFTMAX
    scores = (logits.softmax(0) if is_soft else logits.sigmoid()).tolist()
    shift = [0.0] * len(scores) if is_soft else bias.tolist()
    wanted = [score + b for score, b in zip(scores, shift, strict=True)]
    size = spec.num_experts // spec.num_groups
    groups = [range(g * size, g * size + size) for g in range(spec.num_groups)]

    def worth(group: range) -> float:
        best = sorted((wanted[e] for e in group), reverse=True)
        return sum(best[: 1 if is_soft else 2])

    is_open = sorted(groups, key=worth, reverse=True)[: spec.num_active_groups]
    candidates = sorted(e for group in is_open for e in group)
    chosen = sorted(candidates, key=lambda e: wanted[e], reverse=True)[: spec.num_active]
    total = sum(scores[e] for e in chosen) if spec.renormalises else 1.0
    return {e: scores[e] / total * spec.scale for e in sorted(chosen)}


@pytest.mark.parametrize("num_open", [1, 2, 4])
@pytest.mark.parametrize("spec", [SPEC, SOFT, replace(SPEC, renormalises=False)], ids=str)
def test_choice_and_weights(spec: GroupedMoeSpec, num_open: int) -> None:
    spec = replace(spec, num_active_groups=num_open)
    logits, bias = random(200, 12, seed=1), random(12, seed=2) * 0.3
    own_bias = None if spec.scoring is Scoring.SOFTMAX else bias
    weights, experts = route_in_groups(logits, own_bias, spec)
    for row in range(200):
        found = dict(zip(experts[row].tolist(), weights[row].tolist(), strict=True))
        expected = plain(logits[row], bias, spec)
        assert list(found) == list(expected)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-12)
    # as the kernels of experts read them
    assert weights.is_contiguous()
    assert experts.is_contiguous()


@pytest.mark.parametrize("spec", [SPEC, SOFT], ids=["sigmoid", "softmax"])
def test_ties_go_to_the_lowest_id(spec: GroupedMoeSpec) -> None:
    bias = torch.zeros(12) if spec.scoring is Scoring.BIASED_SIGMOID else None
    _, experts = route_in_groups(torch.zeros(1, 12), bias, spec)
    assert experts.tolist() == [[0, 1, 2]]
    logits = torch.zeros(1, 12)
    logits[0, 9:] = 1.0
    _, experts = route_in_groups(logits, bias, replace(spec, num_active=5))
    assert experts.tolist() == [[0, 1, 9, 10, 11]]


@pytest.mark.parametrize("spec", [SPEC, SOFT], ids=["sigmoid", "softmax"])
def test_rows_of_nan_have_valid_ids_and_spoil_nothing(spec: GroupedMoeSpec) -> None:
    logits, bias = random(3, 12, seed=3), random(12, seed=4)
    own_bias = None if spec.scoring is Scoring.SOFTMAX else bias
    clean = route_in_groups(logits, own_bias, spec)
    logits[1] = torch.nan
    weights, experts = route_in_groups(logits, own_bias, spec)
    assert ((experts >= 0) & (experts < 12)).all()
    assert len(set(experts[1].tolist())) == 3
    for row in (0, 2):
        assert torch.equal(weights[row], clean[0][row])
        assert torch.equal(experts[row], clean[1][row])


def test_scores_are_float32_at_least() -> None:
    logits = random(5, 12, seed=5).to(torch.bfloat16)
    weights, _ = route_in_groups(logits, torch.zeros(12), SPEC)
    assert weights.dtype == torch.float32
    wide, _ = route_in_groups(logits.double(), torch.zeros(12).double(), SPEC)
    assert (weights.double() - wide).abs().max() < 1e-6
