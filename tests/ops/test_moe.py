"""Mixture of experts against a plain loop over tokens and their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.ops.moe import mix_experts, route
from gapless.ops.moe.reference import mix_dense, mix_gathered
from gapless.runner.syncs import forbid_syncs

if TYPE_CHECKING:
    from collections.abc import Callable

E, K, D, SIZE = 7, 3, 10, 5
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-6)]
PATHS = [mix_gathered, mix_dense]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def draw_mix(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return x, weights, experts, gate_up and down."""
    weights, experts = route(draw(tokens, E, dtype=dtype), K, renormalises=False)
    matrices = draw(E, 2 * SIZE, D, dtype=dtype), draw(E, D, SIZE, dtype=dtype)
    return draw(tokens, D, dtype=dtype), weights, experts, *matrices


def naive_mix(
    x: np.ndarray, weights: np.ndarray, experts: np.ndarray, gate_up: np.ndarray, down: np.ndarray
) -> np.ndarray:
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = gate_up[expert][:SIZE] @ row, gate_up[expert][SIZE:] @ row
            out[token] += weight * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_route_takes_the_softmax_over_all_experts_first(
    dtype: torch.dtype, renormalises: bool
) -> None:
    logits = draw(6, E, dtype=dtype)
    weights, experts = route(logits, K, renormalises=renormalises)
    assert weights.dtype is torch.promote_types(dtype, torch.float32)
    assert experts.dtype is torch.int64
    wide = logits.double().numpy()
    for token in range(6):
        probabilities = np.exp(wide[token]) / np.exp(wide[token]).sum()
        chosen = np.sort(np.argsort(-probabilities, kind="stable")[:K])
        wanted = probabilities[chosen] / (probabilities[chosen].sum() if renormalises else 1)
        assert experts[token].tolist() == chosen.tolist()
        np.testing.assert_allclose(weights[token].double().numpy(), wanted, rtol=1e-6)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 300)
    logits[1, [299, 17, 200]] = 2.0
    logits[2, 150:] = 1.0
    _, experts = route(logits, 4, renormalises=True)
    assert experts.tolist() == [[0, 1, 2, 3], [0, 17, 200, 299], [150, 151, 152, 153]]


def test_route_of_a_poisoned_row_stays_within_the_experts() -> None:
    logits = draw(4, E)
    clean = route(logits, K, renormalises=True)
    logits[1], logits[2, 0] = float("nan"), float("inf")
    weights, experts = route(logits, K, renormalises=True)
    assert ((experts >= 0) & (experts < E)).all()
    for row in (0, 3):
        assert torch.equal(weights[row], clean[0][row])
        assert torch.equal(experts[row], clean[1][row])


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("mix", [*PATHS, mix_experts])
def test_mix_agrees_with_loop(
    mix: Callable[..., Tensor], dtype: torch.dtype, rtol: float, tokens: int
) -> None:
    inputs = draw_mix(tokens, dtype)
    out = mix(*inputs)
    wanted = naive_mix(*(t.numpy() if t.dtype is torch.int64 else t.double().numpy()
                         for t in inputs))  # fmt: skip
    assert out.dtype is dtype
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("mix", PATHS)
def test_row_does_not_depend_on_the_others(mix: Callable[..., Tensor]) -> None:
    inputs = draw_mix(5, torch.float32)
    alone = mix(*inputs)[[0, 4]]
    for poison in (float("nan"), float("inf"), 3.0):
        x, weights, experts, *matrices = (t.clone() for t in inputs)
        x[1:4] = poison
        weights[2] = poison
        experts[1:4] = torch.arange(K)
        assert torch.equal(mix(x, weights, experts, *matrices)[[0, 4]], alone)


@pytest.mark.parametrize("mix", PATHS)
def test_an_expert_that_was_not_chosen_adds_nothing(mix: Callable[..., Tensor]) -> None:
    x, weights, experts, gate_up, down = draw_mix(5)
    experts[:] = torch.tensor([0, 2, 6])
    wanted = mix(x, weights, experts, gate_up, down)
    down[[1, 3, 4, 5]] = float("inf")
    assert torch.equal(mix(x, weights, experts, gate_up, down), wanted)


@pytest.mark.parametrize("tokens", [1, 9])
def test_nothing_waits_for_the_device(tokens: int) -> None:
    logits, (x, _, _, *matrices) = draw(tokens, E), draw_mix(tokens)
    with forbid_syncs():
        weights, experts = route(logits, K, renormalises=True)
        mix_experts(x, weights, experts, *matrices)
