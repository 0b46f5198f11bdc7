"""The convolution kernels against their definition in float64."""

from __future__ import annotations

import os
from typing import Literal

import pytest
import torch

from gapless.ops.causal_conv import SegmentIndices, reference
from gapless.ops.draft_tree import ancestor_bits
from gapless.ops.step_metadata import Geometry, SlotColumns, StepConstants, window_indices
from tests.ops.trees import ancestry, random_parents

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
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


class Segments:
    """Rows of the inputs and of entries that are written as well; NaN in what nobody reads."""

    def __init__(self, tokens: int, channels: int, dtype: torch.dtype) -> None:
        # rows of a wider tensor
        self.inputs = torch.randn(tokens, channels + 5, device=DEVICE).to(dtype)[:, 3:-2]
        prefix = torch.tensor([4, 9, 0, 2, 7])
        ring = torch.full((11, channels), float("nan"))
        ring[prefix] = torch.randn(len(prefix), channels)
        self.ring = ring.to(dtype).to(DEVICE)
        self.indices = SegmentIndices(
            prefix=prefix.to(DEVICE),
            # as a model's that has a wider convolution than this one
            taps=torch.randint(0, tokens + len(prefix), (WIDTH + 1, tokens), device=DEVICE),
            keep=torch.tensor([tokens - 1, tokens + 1, tokens, tokens + 4, 0], device=DEVICE),
            # the first is the second's source
            write=torch.tensor([9, 4, 7, 1, 2], device=DEVICE),
        )

    def copied(self) -> tuple[torch.Tensor, torch.Tensor, SegmentIndices]:
        return self.inputs, self.ring.clone(), self.indices

    def wide(self) -> tuple[torch.Tensor, torch.Tensor, SegmentIndices]:
        return self.inputs.double(), self.ring.double(), self.indices


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channels", [7, 300])
@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_segments_agree_with_float64_and_the_ring_with_what_is_kept(
    dtype: torch.dtype,
    tolerance: float,
    tokens: int,
    channels: int,
    activation: Literal["silu", "none"],
) -> None:
    from gapless.ops.causal_conv import triton

    case = Segments(tokens, channels, dtype)
    weight, bias = weights(channels, dtype, has_bias=activation == "none")
    args, wide = case.copied(), case.wide()
    out = triton.convolve_segments(*args, weight, bias, activation=activation)
    wanted = reference.convolve_segments(
        *wide, weight.double(), None if bias is None else bias.double(), activation=activation
    )
    assert out.dtype is dtype
    close(out, wanted, tolerance)
    assert torch.equal(args[1].nan_to_num(7.0), wide[1].to(dtype).nan_to_num(7.0))


# the half type that the interpreter rounds to stands for both
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float16, 2**-11)])
@pytest.mark.parametrize(("key_dim", "value_size"), [(16, 40), (80, 7), (5, 12)])
@pytest.mark.parametrize("tokens", [1, 70])
def test_heads_are_those_of_the_convolution_normalised(
    tokens: int, key_dim: int, value_size: int, dtype: torch.dtype, rtol: float
) -> None:
    """The convolution rounds before it is normalised, so each result is off by one rounding."""
    from gapless.ops.causal_conv import triton

    heads, eps = 3, 1e-2
    size = heads * key_dim
    case = Segments(tokens, 2 * size + value_size, dtype)
    weight, _ = weights(2 * size + value_size, dtype, has_bias=False)
    args, others = case.copied(), case.copied()
    out = triton.convolve_segments_qkv(
        *args, weight, num_heads=heads, key_dim=key_dim, l2norm_eps=eps
    )
    raw = triton.convolve_segments(*others, weight, None, activation="silu")
    assert torch.equal(args[1].nan_to_num(7.0), others[1].nan_to_num(7.0))
    parts = raw.split([size, size, value_size], 1)
    assert all(x.is_contiguous() and x.dtype is dtype for x in out)
    assert torch.equal(out[2], parts[2])
    for found, part in zip(out[:2], parts[:2], strict=True):
        wide = part.double().view(tokens, heads, key_dim)
        wanted = wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()
        # float32 sums may lie on the other side of a tie
        torch.testing.assert_close(
            found.double(), wanted.flatten(1), rtol=rtol + 2**-20, atol=2**-25
        )


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


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("window", [2, 7, 16])
def test_trees_convolve_along_their_paths(window: int, by_kernel: bool) -> None:
    """Each node's output is that of its own sequence alone; one node in each row is NaN."""
    from gapless.ops.causal_conv import triton

    channels, lengths = 5, [0, 1, 23, 40]
    geometry = Geometry(
        num_slots=4, num_pages=4 * 20, page_size=4, num_state_rows=4, replay_len=5,
        ring_len=5 + 2 * window, conv_width=WIDTH, conv_ring_len=WIDTH - 1 + window,
        max_window=window,
    )  # fmt: skip
    columns = SlotColumns(
        seq_lens=torch.tensor([*lengths, 0]),
        checkpoint_len=torch.tensor([*lengths, 0]),
        state_rows=torch.arange(5),
        done=torch.arange(5) == 4,
        page_table=torch.zeros(5, 20, dtype=torch.int64),
        window_tokens=torch.zeros(5, window, dtype=torch.int64),
    )
    parents = random_parents(5, window, torch.Generator().manual_seed(window))
    slots = torch.tensor([2, 0, 4, 3, 1])
    found = window_indices(
        slots, columns, geometry, StepConstants(geometry, torch.device("cpu")),
        window=window, tree=ancestor_bits(parents),
    )  # fmt: skip
    past = [torch.randn(length, channels) for length in lengths]
    ring = torch.full((geometry.num_conv_entries, channels), float("nan"))
    ring[geometry.conv_zero] = 0
    for slot, inputs in enumerate(past):
        for position in range(max(0, len(inputs) - WIDTH + 1), len(inputs)):
            entry = slot * geometry.conv_ring_len + position % geometry.conv_ring_len
            ring[entry] = inputs[position]
    nodes = torch.randn(5, window, channels)
    broken = torch.randint(1, window, (5,))
    nodes[torch.arange(5), broken] = float("nan")
    weight = torch.randn(channels, WIDTH)
    op = triton.convolve_window if by_kernel else reference.convolve_window
    args = (nodes.flatten(0, 1), ring, found.conv_write, found.conv_taps, weight)
    moved = [x.to(DEVICE) for x in args]
    out = op(*moved, None, num_rows=5, activation="none").cpu().view(5, window, channels)
    for row, slot in enumerate(slots.tolist()):
        for node in range(window) if slot != geometry.null_slot else ():
            path = ancestry(parents[slot].tolist(), node)[::-1]
            whole = torch.cat([torch.zeros(WIDTH - 1, channels), past[slot], nodes[row, path]])
            wanted = (whole[-WIDTH:].double() * weight.t().double()).sum(0)
            torch.testing.assert_close(
                out[row, node].double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True
            )


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
