"""Rotary embedding against rotation of complex numbers, one pair at a time."""

from __future__ import annotations

import cmath

import pytest
import torch

from gapless.ops.rope import apply_rotary, rotary_table

CPU = torch.device("cpu")
THETA = 1e4


def naive(x: torch.Tensor, positions: list[int], rotary_dim: int) -> torch.Tensor:
    """Turn the pair (i, i + rotary_dim / 2) by position * theta^(-2i / rotary_dim)."""
    out = x.double().clone()
    half = rotary_dim // 2
    for t, position in enumerate(positions):
        for i in range(half):
            turn = cmath.exp(1j * position * THETA ** (-2 * i / rotary_dim))
            for h in range(x.shape[1]):
                z = complex(x[t, h, i], x[t, h, i + half]) * turn
                out[t, h, i], out[t, h, i + half] = z.real, z.imag
    return out


@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)]
)
def test_agrees_with_complex_rotation(
    dtype: torch.dtype, tolerance: float, rotary_dim: int
) -> None:
    positions = [0, 7, 3, 400]
    x = torch.randn(4, 3, 10, dtype=torch.float64).to(dtype)
    table = rotary_table(401, rotary_dim, THETA, dtype, CPU)
    out = apply_rotary(x, table[positions])
    assert out.dtype is dtype
    assert table.dtype is torch.promote_types(dtype, torch.float32)
    wanted = naive(x, positions, rotary_dim)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_non_contiguous_input_is_the_same() -> None:
    wide = torch.randn(4, 3, 20)
    rows = rotary_table(4, 6, THETA, torch.float32, CPU)
    sliced = wide[..., :10]
    assert torch.equal(apply_rotary(sliced, rows), apply_rotary(sliced.contiguous(), rows))


def test_float32_frequencies_are_those_of_transformers() -> None:
    steps = torch.arange(0, 6, 2, dtype=torch.int64).to(torch.float32) / 6
    angle = torch.arange(50, dtype=torch.float32)[:, None] * (1.0 / (1e5**steps))
    wanted = torch.cat([angle.cos(), angle.sin()], -1)
    assert torch.equal(rotary_table(50, 6, 1e5, torch.bfloat16, CPU), wanted)
