"""Experts without gates: both ways of running them, their formula, and rows that stay apart."""

from __future__ import annotations

import pytest
import torch

from gapless.ops.moe import mix_experts
from gapless.ops.moe.reference import mix_dense, mix_gathered
from gapless.runner.syncs import forbid_syncs

NUM_EXPERTS, ACTIVE, SIZE, HIDDEN = 7, 3, 5, 9


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    experts = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:ACTIVE]
                           for _ in range(tokens)])  # fmt: skip
    up, down = draw(NUM_EXPERTS, SIZE, HIDDEN), draw(NUM_EXPERTS, HIDDEN, SIZE)
    return draw(tokens, HIDDEN), draw(tokens, ACTIVE).abs(), experts, up, down


@pytest.mark.parametrize("tokens", [1, 2, 11])
@pytest.mark.parametrize("mix", [mix_experts, mix_gathered, mix_dense])
def test_formula(mix: object, tokens: int) -> None:
    assert callable(mix)
    x, weights, experts, up, down = inputs(tokens)
    expected = torch.zeros_like(x)
    for row in range(tokens):
        for weight, expert in zip(weights[row], experts[row], strict=True):
            hidden = (up[expert] @ x[row]).clamp(min=0) ** 2
            expected[row] += weight * (down[expert] @ hidden)
    with forbid_syncs():
        found = mix(x, weights, experts, up, down)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("tokens", [2, 11])
def test_rows_stay_apart_and_dead_ones_are_zeros(tokens: int) -> None:
    x, weights, experts, up, down = inputs(tokens)
    expected = mix_experts(x, weights, experts, up, down)
    spoilt = x.clone()
    spoilt[0] = float("nan")
    live = torch.ones(tokens, dtype=torch.bool)
    live[0] = False
    found = mix_experts(spoilt, weights, experts, up, down, live=live)
    assert torch.equal(found[1:], expected[1:])
    assert not found[0].any()


@pytest.mark.parametrize("mix", [mix_gathered, mix_dense])
def test_an_expert_that_was_not_chosen_adds_nothing(mix: object) -> None:
    assert callable(mix)
    x, weights, experts, up, down = inputs(2)
    idle = next(e for e in range(NUM_EXPERTS) if e not in experts)
    expected = mix(x, weights, experts, up, down)
    down[idle] = float("inf")
    assert torch.equal(mix(x, weights, experts, up, down), expected)
