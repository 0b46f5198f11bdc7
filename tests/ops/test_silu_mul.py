"""The gated activation against its formula in float64; the kernel against that."""

from __future__ import annotations

import os

import pytest
import torch

from gapless.ops.silu_mul import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Triton's interpreter cuts bfloat16 off where a GPU rounds
BF16_ERROR = 2**-7 if DEVICE == "cpu" else 2**-8


def formula(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().split(gate_up.shape[1] // 2, dim=1)
    return gate / (1 + torch.exp(-gate)) * up


def test_definition_is_the_formula() -> None:
    gate_up = torch.randn(3, 14, dtype=torch.float64)
    before = gate_up.clone()
    torch.testing.assert_close(silu_mul(gate_up), formula(gate_up), rtol=1e-14, atol=1e-14)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.bfloat16, BF16_ERROR)])
@pytest.mark.parametrize(("tokens", "inner"), [(0, 5), (1, 7), (3, 1300)])
def test_kernel_is_the_formula(tokens: int, inner: int, dtype: torch.dtype, rtol: float) -> None:
    from gapless.ops.silu_mul import triton

    # rows of a wider tensor
    gate_up = torch.randn(tokens, 2 * inner + 6, device=DEVICE).to(dtype)[:, 2:-4]
    out = triton.silu_mul(gate_up)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), formula(gate_up), rtol=rtol, atol=rtol)
    assert triton.unsupported(gate_up) is None
    assert "float64" in str(triton.unsupported(gate_up.double()))
