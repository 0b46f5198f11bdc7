"""The norm kernels against their definition in float64, and the sum's norm against its parts."""

from __future__ import annotations

import os
from typing import Literal

import pytest
import torch

from gapless.ops.norm import add_rms_norm, reference, rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

EPS = 1e-2
# the last is a view of wider rows, as a gate is of a projection
SHAPES = [(1, 7), (5, 2048), (3, 5, 20), (2, 3, 2, 12)]
# Triton's interpreter cuts bfloat16 off where a GPU rounds
BF16_ERROR = 2**-7 if DEVICE == "cpu" else 2**-8
DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, BF16_ERROR)]


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of wider rows; some rows are small enough that eps matters."""
    wide = torch.randn(*shape[:-1], shape[-1] + 9, dtype=torch.float64)
    wide[0] *= 0.01
    return wide.to(dtype).to(DEVICE)[..., 4:-5]


def close(out: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_norm_agrees_with_float64(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
) -> None:
    from gapless.ops.norm import triton

    x = draw(*shape, dtype=dtype)
    weight = torch.randn(shape[-1], device=DEVICE)
    out = triton.rms_norm(x, weight, EPS)
    assert (out.shape, out.dtype) == (x.shape, dtype)
    close(out, reference.rms_norm(x.double(), weight.double(), EPS), tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_sum_is_rounded_before_its_norm(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
) -> None:
    from gapless.ops.norm import triton

    x, term = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype).contiguous()
    weight = torch.randn(shape[-1], device=DEVICE)
    total, out = triton.add_rms_norm(x, term, weight, EPS)
    close(total, x.double() + term.double(), tolerance)
    close(out, reference.rms_norm(total.double(), weight.double(), EPS), tolerance)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_gated_norm_agrees_with_float64(
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, ...],
    activation: Literal["silu", "sigmoid"],
) -> None:
    from gapless.ops.norm import triton

    x, gate = draw(*shape, dtype=dtype).contiguous(), draw(*shape, dtype=dtype)
    weight = torch.randn(shape[-1], device=DEVICE)
    out = triton.gated_rms_norm(x, gate, weight, EPS, activation=activation)
    wanted = reference.gated_rms_norm(
        x.double(), gate.double(), weight.double(), EPS, activation=activation
    )
    assert out.dtype is dtype
    close(out, wanted, tolerance)


def test_row_does_not_depend_on_the_others() -> None:
    from gapless.ops.norm import triton

    x, weight = draw(6, 9, dtype=torch.float32), torch.randn(9, device=DEVICE)
    alone = triton.rms_norm(x[2:3], weight, EPS)
    x[3] = float("nan")
    assert torch.equal(triton.rms_norm(x, weight, EPS)[2:3], alone)
    assert triton.rms_norm(x[:0], weight, EPS).shape == (0, 9)


def test_reasons_name_what_is_not_served() -> None:
    from gapless.ops.norm import triton

    x, weight = torch.zeros(1, 8), torch.ones(8)
    assert triton.unsupported(x, weight) is None
    assert "float64" in str(triton.unsupported(x.double(), weight.double()))
    assert "16385" in str(triton.unsupported(torch.zeros(1, 16385), weight))
    # the definition takes a weight per head
    assert "2 axes" in str(triton.unsupported(x, weight[None]))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "gated_rms_norm"])
def test_a_weight_per_head_is_refused(name: str) -> None:
    from gapless.ops.norm import triton

    x, weight = torch.randn(3, 2, 8, device=DEVICE), torch.randn(2, 8, device=DEVICE)
    terms = (x,) if name == "rms_norm" else (x, x)
    options = {"activation": "silu"} if name == "gated_rms_norm" else {}
    with pytest.raises(AssertionError, match="2 axes"):
        vars(triton)[name](*terms, weight, EPS, **options)


def test_definition_of_the_sums_norm() -> None:
    x, term = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    weight = torch.randn(5, dtype=torch.float64)
    total, out = add_rms_norm(x, term, weight, EPS)
    assert torch.equal(total, x + term)
    assert torch.equal(out, rms_norm(x + term, weight, EPS))
