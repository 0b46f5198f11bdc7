"""Norms against a plain loop over rows, and against torch's own."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from gapless.ops.norm import gated_rms_norm, rms_norm

EPS = 1e-2
DTYPES = [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def naive(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """Norm one row at a time in float64; rows small enough that eps matters are among them."""
    rows = x.double().numpy().reshape(-1, x.shape[-1])
    normed = [row / np.sqrt((row * row).mean() + EPS) * weight.double().numpy() for row in rows]
    return np.stack(normed).reshape(x.shape)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_rms_norm_agrees_with_loop(dtype: torch.dtype, rtol: float) -> None:
    x = draw(3, 5, 7, dtype=dtype)
    x[0] *= 0.01
    weight = draw(7, dtype=torch.promote_types(dtype, torch.float32))
    out = rms_norm(x, weight, EPS)
    assert out.dtype is dtype
    np.testing.assert_allclose(out.double().numpy(), naive(x, weight), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_gated_rms_norm_agrees_with_loop(
    dtype: torch.dtype, rtol: float, activation: Literal["silu", "sigmoid"]
) -> None:
    x, gate = draw(3, 5, 7, dtype=dtype), draw(3, 5, 7, dtype=dtype)
    weight = draw(7, dtype=torch.promote_types(dtype, torch.float32))
    out = gated_rms_norm(x, gate, weight, EPS, activation=activation)
    wide = gate.double().numpy()
    act = 1 / (1 + np.exp(-wide)) * (wide if activation == "silu" else 1)
    assert out.dtype is dtype
    wanted = naive(x, weight) * act
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=rtol, atol=rtol)


def test_bf16_rounds_once() -> None:
    x, weight = draw(64, 33, dtype=torch.bfloat16), draw(33, dtype=torch.float32)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight
    assert torch.equal(rms_norm(x, weight, EPS), wide.to(torch.bfloat16))


def test_row_does_not_depend_on_the_others() -> None:
    x, weight = draw(6, 9, dtype=torch.float32), draw(9, dtype=torch.float32)
    alone = rms_norm(x[2:3], weight, EPS)
    x[3] = float("nan")
    assert torch.equal(rms_norm(x, weight, EPS)[2:3], alone)
