"""Causal convolution against a plain loop over tokens and taps."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from gapless.ops.causal_conv import SegmentIndices, convolve_segments, convolve_segments_qkv
from gapless.ops.causal_conv.reference import causal_conv

NUM_ROWS, CHANNELS, WIDTH, TOKENS = 13, 7, 4, 9
ZERO_ROW = NUM_ROWS - 1


def make_source(taps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows that are NaN wherever no tap points, and a zero row."""
    source = torch.full((NUM_ROWS, CHANNELS), float("nan"), dtype=dtype)
    used = taps.unique()
    source[used] = torch.randn(len(used), CHANNELS, dtype=torch.float64).to(dtype)
    source[ZERO_ROW] = 0
    return source


def naive(
    source: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> np.ndarray:
    """Sum taps one number at a time, in float64."""
    out = np.zeros((taps.shape[1], source.shape[1]))
    for t in range(taps.shape[1]):
        for c in range(source.shape[1]):
            out[t, c] = 0 if bias is None else float(bias[c])
            for w in range(len(taps)):
                out[t, c] += float(source[taps[w, t], c]) * float(weight[c, w])
    return out


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-8)]
)
def test_agrees_with_loop(
    dtype: torch.dtype, rtol: float, has_bias: bool, activation: Literal["silu", "none"]
) -> None:
    # row 11 is in use by nobody and stays NaN
    taps = torch.randint(0, NUM_ROWS - 2, (WIDTH, TOKENS))
    taps[0, 0] = taps[1, 0] = ZERO_ROW
    source = make_source(taps, dtype)
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64).to(dtype)
    bias = torch.randn(CHANNELS, dtype=torch.float64).to(dtype) if has_bias else None
    out = causal_conv(source, taps, weight, bias, activation=activation)
    wanted = naive(source, taps, weight, bias)
    if activation == "silu":
        wanted = wanted / (1 + np.exp(-wanted))
    assert out.dtype is dtype
    np.testing.assert_allclose(out.double().numpy(), wanted, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.bfloat16, 2**-8)])
def test_queries_and_keys_are_unit_vectors_of_the_convolution(
    dtype: torch.dtype, rtol: float
) -> None:
    inputs, ring = torch.randn(2, TOKENS, 2 * 6 + 5, dtype=torch.float64).to(dtype)
    taps = torch.randint(0, TOKENS + 3, (WIDTH, TOKENS))
    indices = SegmentIndices(
        prefix=torch.tensor([7, 2, 4]), taps=taps, keep=torch.tensor([3]), write=torch.tensor([2])
    )
    weight = torch.randn(17, WIDTH, dtype=torch.float64).to(dtype)
    both = convolve_segments(inputs, ring.clone(), indices, weight, None, activation="silu")
    q, k, v = convolve_segments_qkv(
        inputs, ring, indices, weight, num_heads=2, key_dim=3, l2norm_eps=1e-2
    )
    assert torch.equal(v, both[:, 12:])
    for out, raw in ((q, both[:, :6]), (k, both[:, 6:12])):
        assert out.dtype is dtype
        heads = raw.view(TOKENS, 2, 3).double().numpy()
        wanted = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-2)
        found = out.view(TOKENS, 2, 3).double().numpy()
        np.testing.assert_allclose(found, wanted, rtol=rtol)


@pytest.mark.parametrize("lengths", [[TOKENS], [1, 2, 6], [5, 3, 1]])
def test_chunks_equal_conv1d_on_a_sequence(lengths: list[int]) -> None:
    """The ring is as long as the taps reach, so each chunk overwrites what it reads."""
    x = torch.randn(TOKENS, CHANNELS, dtype=torch.float64)
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64)
    before = WIDTH - 1
    ring = torch.full((before + 1, CHANNELS), float("nan"), dtype=torch.float64)
    ring[before] = 0
    found, start = [], 0
    for chunk in x.split(lengths):
        past = torch.arange(start - before, start)
        kept = torch.arange(max(0, len(chunk) - before), len(chunk))
        taps = torch.arange(len(chunk)) - torch.arange(before, -1, -1)[:, None]
        indices = SegmentIndices(
            prefix=torch.where(past < 0, before, past % before),
            taps=torch.where(taps < 0, len(chunk) + before + taps, taps),
            keep=kept,
            write=(start + kept) % before,
        )
        found.append(convolve_segments(chunk, ring, indices, weight, None, activation="none"))
        start += len(chunk)
    padded = torch.nn.functional.pad(x.t()[None], (before, 0))
    wanted = torch.nn.functional.conv1d(padded, weight[:, None], groups=CHANNELS)[0].t()
    torch.testing.assert_close(torch.cat(found), wanted)
