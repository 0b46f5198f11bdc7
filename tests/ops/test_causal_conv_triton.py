"""The convolution kernels against their definition in float64."""

from __future__ import annotations

import os
from typing import Literal

import pytest
import torch

from gapless.ops.causal_conv import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

WIDTH, MAX_WINDOW, NUM_SLOTS = 4, 5, 6
RING_LEN = WIDTH - 1 + MAX_WINDOW
ZERO_ENTRY = (NUM_SLOTS + 1) * RING_LEN
# Triton's interpreter cuts bfloat16 off where a GPU rounds
BF16_ERROR = 2**-7 if DEVICE == "cpu" else 2**-8
DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, BF16_ERROR)]
ACTIVATIONS: list[Literal["silu", "none"]] = ["silu", "none"]


def weights(
    channels: int, dtype: torch.dtype, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = torch.randn(channels, WIDTH, device=DEVICE).to(dtype)
    return weight, torch.randn(channels, device=DEVICE).to(dtype) if has_bias else None


def close(out: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channels", [7, 300])
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_convolution_agrees_with_float64(
    dtype: torch.dtype,
    tolerance: float,
    tokens: int,
    channels: int,
    activation: Literal["silu", "none"],
) -> None:
    from gapless.ops.causal_conv import triton

    # rows of a wider tensor, the last of them in use by nobody
    source = torch.randn(24, channels + 5, device=DEVICE).to(dtype)[:, 3:-2]
    source[23] = float("nan")
    taps = torch.randint(0, 23, (WIDTH, tokens), device=DEVICE)
    weight, bias = weights(channels, dtype, has_bias=activation == "none")
    out = triton.causal_conv(source, taps, weight, bias, activation=activation)
    wide = [None if t is None else t.double() for t in (source, weight, bias)]
    wanted = reference.causal_conv(wide[0], taps, wide[1], wide[2], activation=activation)
    assert out.dtype is dtype
    close(out, wanted, tolerance)


class Windows:
    """Slots at several lengths, the last row padded; rings full of NaN where nothing was put."""

    def __init__(self, channels: int, window: int, dtype: torch.dtype) -> None:
        slots = torch.tensor([4, 0, 5, 2, NUM_SLOTS])
        lengths = torch.tensor([0, 2, RING_LEN * 3 - 1, 17, 0])
        self.num_rows = len(slots)
        positions = (lengths[:, None] + torch.arange(window)).view(-1)
        base = slots.repeat_interleave(window) * RING_LEN
        before = positions - torch.arange(WIDTH - 1, -1, -1)[:, None]
        self.write = (base + positions % RING_LEN).to(DEVICE)
        self.taps = torch.where(before < 0, ZERO_ENTRY, base + before % RING_LEN).to(DEVICE)
        self.ring = torch.full((ZERO_ENTRY + 1, channels), float("nan"))
        self.ring[self.taps.cpu()] = torch.randn(*self.taps.shape, channels)
        self.ring[ZERO_ENTRY] = 0.0
        self.ring[NUM_SLOTS * RING_LEN : ZERO_ENTRY] = float("nan")
        self.ring = self.ring.to(dtype).to(DEVICE)
        self.inputs = (
            torch.randn(self.num_rows * window, channels + 9).to(dtype).to(DEVICE)[:, 4:-5]
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channels", [7, 300])
@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_window_agrees_with_float64_and_the_ring_with_its_inputs(
    dtype: torch.dtype,
    tolerance: float,
    window: int,
    channels: int,
    activation: Literal["silu", "none"],
) -> None:
    from gapless.ops.causal_conv import triton

    case = Windows(channels, window, dtype)
    weight, bias = weights(channels, dtype, has_bias=activation == "none")
    wide_ring = case.ring.double()
    wanted = reference.convolve_window(
        case.inputs.double(), wide_ring, case.write, case.taps, weight.double(),
        None if bias is None else bias.double(), num_rows=case.num_rows, activation=activation,
    )  # fmt: skip
    out = triton.convolve_window(
        case.inputs, case.ring, case.write, case.taps, weight, bias,
        num_rows=case.num_rows, activation=activation,
    )  # fmt: skip
    real = slice(0, (case.num_rows - 1) * window)
    close(out[real], wanted[real], tolerance)
    assert torch.equal(case.ring.nan_to_num(7.0), wide_ring.to(dtype).nan_to_num(7.0))


def test_definition_stores_then_convolves() -> None:
    case = Windows(3, 2, torch.float32)
    ring, weight = case.ring.cpu(), torch.randn(3, WIDTH)
    inputs, write, taps = case.inputs.cpu(), case.write.cpu(), case.taps.cpu()
    out = reference.convolve_window(
        inputs, ring, write, taps, weight, None, num_rows=case.num_rows, activation="none"
    )
    assert torch.equal(ring[write[:-2]], inputs[:-2])
    wanted = reference.causal_conv(ring, taps, weight, None, activation="none")
    assert torch.equal(out[:-2], wanted[:-2])
    assert torch.isfinite(out[:-2]).all()
