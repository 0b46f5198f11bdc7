"""The gate kernels against their definitions, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from gapless.ops.gates import reference, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), (3, 32), (70, 6), (33, 48)])
def test_delta_gates(tokens: int, heads: int) -> None:
    projected = torch.randn(tokens, 3 * heads, device=DEVICE) * 8
    b, a = projected[:, :heads], projected[:, heads : 2 * heads]
    dt_bias, rate = torch.randn(heads, device=DEVICE), -torch.rand(heads, device=DEVICE) * 16
    found = triton.delta_gates(b, a, dt_bias, rate)
    wanted = reference.delta_gates(b.double(), a.double(), dt_bias.double(), rate.double())
    for out, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=1e-12)
    twice, same = triton.delta_gates(b, a, dt_bias, rate, beta_scale=2.0)
    wanted_twice, _ = reference.delta_gates(b, a, dt_bias, rate, beta_scale=2.0)
    torch.testing.assert_close(twice, wanted_twice, rtol=2e-6, atol=1e-12)
    assert (twice > 1).any(), "a scale of 2 shows"
    assert torch.equal(same, found[1])


def test_decay_keeps_its_digits_far_from_zero() -> None:
    a = torch.tensor([[-30.0, -20.0, -9.0, 0.0, 9.0, 30.0]], device=DEVICE)
    zero, one = torch.zeros(6, device=DEVICE), -torch.ones(6, device=DEVICE)
    _, decay = triton.delta_gates(a, a, zero, one)
    wanted = -torch.nn.functional.softplus(a.double(), threshold=1000)
    torch.testing.assert_close(decay.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "size"), [(1, 7), (5, 1024), (3, 1500)])
def test_sigmoid_gate(tokens: int, size: int, dtype: torch.dtype) -> None:
    both = torch.randn(tokens, 2 * size, device=DEVICE).to(dtype)
    x, gate = both.chunk(2, dim=1)
    found = triton.sigmoid_gate(x, gate)
    wanted = reference.sigmoid_gate(x.double(), gate.double())
    assert found.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)
