"""Mamba-2's gates: the definition, step by step, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapless.core.specs.linear import GateOrder
from gapless.ops.ssm_gates import discretise, reference, skip_gate_norm, triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, VALUE_DIM, GROUPS = 6, 20, 2
SIZE = HEADS * VALUE_DIM
LIMITS = [(0.0, float("inf")), (0.3, 1.1)]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def projected(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return z, x and dt as views of one projection, as the layer has them."""
    z, x, dt = draw(tokens, 2 * SIZE + HEADS, dtype=dtype).split([SIZE, SIZE, HEADS], dim=1)
    return z, x, 8 * dt


@pytest.mark.parametrize("limit", LIMITS)
def test_time_steps_by_hand(limit: tuple[float, float]) -> None:
    _, x, dt = projected(3, torch.float64)
    bias, rate = draw(HEADS, dtype=torch.float64), -draw(HEADS, dtype=torch.float64).exp()
    values, decay = discretise(x, dt, bias, rate, limit=limit)
    for head in range(HEADS):
        step = torch.log1p((dt[:, head] + bias[head]).exp()).clamp(*limit)
        own = slice(head * VALUE_DIM, (head + 1) * VALUE_DIM)
        torch.testing.assert_close(values[:, own], step[:, None] * x[:, own], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(decay[:, head], step * rate[head], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", GateOrder)
def test_skip_gate_and_norm_by_hand(order: GateOrder) -> None:
    z, x, _ = projected(2, torch.float64)
    out, skip = draw(2, SIZE, dtype=torch.float64), draw(HEADS, dtype=torch.float64)
    weight = draw(SIZE, dtype=torch.float64)
    found = skip_gate_norm(out, x, z, skip, weight, eps=0.1, num_groups=GROUPS, order=order)
    gate = z * z.sigmoid()
    total = out + skip.repeat_interleave(VALUE_DIM) * x
    if order is not GateOrder.NORM_FIRST:
        total = total * gate
    if order is not GateOrder.GATE_ALONE:
        rows = total.view(2, GROUPS, -1)
        total = (rows / (rows.square().mean(-1, keepdim=True) + 0.1).sqrt()).view(2, SIZE) * weight
    if order is GateOrder.NORM_FIRST:
        total = total * gate
    torch.testing.assert_close(found, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("tokens", [1, 5])
def test_time_step_kernel(tokens: int, dtype: torch.dtype, limit: tuple[float, float]) -> None:
    _, x, dt = projected(tokens, dtype)
    bias = draw(HEADS, dtype=torch.float32)
    rate = -draw(HEADS, dtype=torch.float32).exp()
    found = triton.discretise(x, dt, bias, rate, limit=limit)
    wanted = reference.discretise(
        x.double(), dt.double(), bias.double(), rate.double(), limit=limit
    )
    for own, expected in zip(found, wanted, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.double(), expected, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("order", GateOrder)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (5, 2), (3, 6)])
def test_skip_gate_norm_kernel(
    tokens: int, groups: int, dtype: torch.dtype, order: GateOrder
) -> None:
    z, x, _ = projected(tokens, dtype)
    out, weight = draw(tokens, SIZE, dtype=dtype), draw(SIZE, dtype=torch.float32)
    skip = draw(HEADS, dtype=torch.float32)
    settings = {"eps": 1e-3, "num_groups": groups, "order": order}
    found = triton.skip_gate_norm(out, x, z, skip, weight, **settings)
    wide = (tensor.double() for tensor in (out, x, z, skip, weight))
    assert found.dtype == dtype
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    wanted = reference.skip_gate_norm(*wide, **settings)
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


def test_what_the_kernels_cannot_hold_is_named() -> None:
    x, weight = torch.empty(1, 40_000), torch.empty(4)
    assert triton.unsupported_size(x, 4) is None
    assert "groups of 20000 channels" in str(triton.unsupported_size(x, 2))
    assert triton.unsupported_type(x, weight) is None
    assert "float64" in str(triton.unsupported_type(x.double(), weight))
