"""Norms, gated activation, short convolution and step metadata: right, then how fast.

    python -m benchmarks.gpu.small_ops [--check] [--measure] [--output figures.json]

Checks compare with the definitions, in float64 where those are sums. Times are those
of `harness.Op`.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.harness import (
    Op,
    dtype_name,
    main,
    num_launches,
    relative,
    result,
    rotating,
    tensors_of,
)
from gapless.ops.causal_conv import SegmentIndices
from gapless.ops.causal_conv import reference as conv_reference
from gapless.ops.causal_conv import triton as conv
from gapless.ops.norm import reference as norm_reference
from gapless.ops.norm import triton as norm
from gapless.ops.silu_mul import reference as silu_reference
from gapless.ops.silu_mul import triton as silu
from gapless.ops.step_metadata import Geometry, SlotColumns, StepConstants
from gapless.ops.step_metadata import reference as metadata_reference
from gapless.ops.step_metadata import triton as metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
# |out - wanted| / |wanted|
BOUNDS = {BF16: 2.5e-3, FP32: 2e-6}

HIDDEN, HEADS, HEAD_DIM = 2048, 32, 128
INNER = 512
CHANNELS, WIDTH = 8192, 4
# of those channels, as a delta rule has them
QKV: dict[str, Any] = {"num_heads": 16, "key_dim": 128, "l2norm_eps": EPS}


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    return [*_norm_results(device), *_conv_results(device), *_metadata_results(device)]


def _norm_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, (rows, size) in product(BOUNDS, ((1, HIDDEN), (37, HIDDEN), (333, HEAD_DIM))):
        x, y = (torch.randn(rows, 2 * size, device=device).to(dtype)[:, size:] for _ in range(2))
        weight = torch.randn(size, device=device)
        label, bound = f"{rows}x{size} {dtype_name(dtype)}", BOUNDS[dtype]
        wide, wide_weight = x.double(), weight.double()
        wanted = norm_reference.rms_norm(wide, wide_weight, EPS)
        yield result(f"rms_norm {label}", relative(norm.rms_norm(x, weight, EPS), wanted), bound)
        total, normed = norm.add_rms_norm(x, y, weight, EPS)
        wanted = norm_reference.rms_norm(total.double(), wide_weight, EPS)
        error = max(relative(total, wide + y.double()), relative(normed, wanted))
        yield result(f"add_rms_norm {label}", error, bound)
        out = norm.gated_rms_norm(x, y, weight, EPS, activation="silu")
        wanted = norm_reference.gated_rms_norm(
            wide, y.double(), wide_weight, EPS, activation="silu"
        )
        yield result(f"gated_rms_norm {label}", relative(out, wanted), bound)
        error = relative(silu.silu_mul(x), silu_reference.silu_mul(wide))
        yield result(f"silu_mul {label}", error, bound)


class Windows:
    """Conv rings of B slots at mixed positions, the window's inputs in a wider projection."""

    def __init__(self, rows: int, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.window = rows, window
        ring_len = WIDTH - 1 + window
        lengths = torch.arange(rows, device=device) * 7 % 40
        positions = (lengths[:, None] + torch.arange(window, device=device)).view(-1)
        base = torch.arange(rows, device=device).repeat_interleave(window) * ring_len
        before = positions - torch.arange(WIDTH - 1, -1, -1, device=device)[:, None]
        zero = rows * ring_len
        self.write = base + positions % ring_len
        self.taps = torch.where(before < 0, zero, base + before % ring_len)
        self.ring = torch.randn(zero + 1, CHANNELS, device=device).to(dtype)
        self.ring[zero] = 0
        wider = torch.randn(rows * window, CHANNELS + 4096, device=device).to(dtype)
        self.inputs = wider[:, :CHANNELS]

    def run(self, op: Callable[..., Tensor], weight: Tensor, *, is_wide: bool = False) -> Tensor:
        inputs, ring = self.inputs, self.ring
        if is_wide:
            inputs, ring, weight = inputs.double(), ring.double(), weight.double()
        return op(
            inputs, ring, self.write, self.taps, weight, None, num_rows=self.rows, activation="silu"
        )


def segment_indices(tokens: int, device: torch.device) -> SegmentIndices:
    """Return those of a chunk that is a part of one prompt, in a ring as long as taps reach."""
    before = WIDTH - 1
    taps = torch.arange(tokens) - torch.arange(before, -1, -1)[:, None]
    entries = torch.arange(before, device=device)
    return SegmentIndices(
        prefix=entries,
        taps=torch.where(taps < 0, tokens + before + taps, taps).to(device),
        keep=tokens - before + entries,
        write=entries,
    )


def _conv_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, bound in BOUNDS.items():
        weight = torch.randn(CHANNELS, WIDTH, device=device).to(dtype)
        for rows, window in ((1, 1), (33, 1), (33, 4), (5, 16)):
            case = Windows(rows, window, dtype, device)
            before = case.ring.clone()
            wanted = case.run(conv_reference.convolve_window, weight, is_wide=True)
            out = case.run(conv.convolve_window, weight)
            label = f"{rows} rows W={window} {dtype_name(dtype)}"
            yield result(f"convolve_window {label}", relative(out, wanted), bound)
            before.index_copy_(0, case.write, case.inputs)
            differing = int((before != case.ring).sum())
            yield result(f"convolve_window {label}: ring", differing, 0)
        inputs = torch.randn(777, CHANNELS + 4096, device=device).to(dtype)[:, :CHANNELS]
        ring = torch.randn(WIDTH - 1, CHANNELS, device=device).to(dtype)
        indices = segment_indices(len(inputs), device)
        wide = inputs.double(), ring.double(), indices, weight.double()
        apart = conv.convolve_segments_qkv(inputs, ring.clone(), indices, weight, **QKV)
        wanted = torch.cat(
            conv_reference.convolve_segments_qkv(wide[0], wide[1].clone(), *wide[2:], **QKV), 1
        )
        # the convolution is rounded, and then what is normalised of it
        error = relative(torch.cat(apart, 1), wanted)
        yield result(f"convolve_segments_qkv {dtype_name(dtype)}", error, 2 * bound)
        out = conv.convolve_segments(inputs, ring, indices, weight, None, activation="silu")
        wanted = conv_reference.convolve_segments(*wide, None, activation="silu")
        yield result(f"convolve_segments {dtype_name(dtype)}", relative(out, wanted), bound)
        differing = int((ring.double() != wide[1]).sum())
        yield result(f"convolve_segments {dtype_name(dtype)}: ring", differing, 0)


class Table:
    """A slot table at random lengths, with done slots."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.geometry = geometry = Geometry(
            num_slots=256,
            num_pages=9000,
            page_size=64,
            num_state_rows=300,
            replay_len=16,
            ring_len=16 + 2 * window,
            conv_width=WIDTH,
            conv_ring_len=WIDTH - 1 + window,
            max_window=window,
        )
        slots = geometry.num_slots + 1
        seq_lens = torch.randint(2000, (slots,), device=device)
        null = geometry.null_slot
        seq_lens[null] = 0
        done = torch.rand(slots, device=device) < 0.2
        done[null] = True
        rows = torch.randperm(geometry.num_state_rows, device=device)[:slots]
        rows[null] = geometry.null_row
        self.columns = SlotColumns(
            seq_lens=seq_lens,
            checkpoint_len=(seq_lens - 1).clamp(min=0) // 16 * 16,
            state_rows=rows,
            done=done,
            page_table=torch.randint(geometry.num_pages, (slots, 40), device=device),
            window_tokens=torch.randint(1000, (slots, window), device=device),
        )
        self.constants = StepConstants(geometry, device)

    def slots(self, rows: int, padded: int) -> Tensor:
        device = self.columns.done.device
        slots = torch.randperm(self.geometry.num_slots, device=device)[:rows]
        slots[rows - padded :] = self.geometry.null_slot
        return slots


def _metadata_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for window in (1, 4):
        table = Table(window, device)
        differing = 0
        for rows in (1, 2, 7, 32, 33, 256):
            for padded in {0, 1, rows // 2, rows}:
                slots = table.slots(rows, padded)
                found = metadata.window_indices(slots, table.columns, table.geometry, window=window)
                wanted = metadata_reference.window_indices(
                    slots, table.columns, table.geometry, table.constants, window=window
                )
                pairs = zip(tensors_of(found), tensors_of(wanted), strict=True)
                differing += sum(not torch.equal(a, b) for a, b in pairs)
        yield result(f"window_indices W={window}: tensors that differ", differing, 0)
        differing = sum(_drafting_differs(table, rows, window) for rows in (1, 33, 256))
        yield result(f"indices of drafting W={window}: tensors that differ", differing, 0)


def _drafting_differs(table: Table, rows: int, window: int) -> int:
    slots, pages = table.slots(rows, rows // 2), table.columns.page_table
    seq_lens = table.columns.seq_lens[slots]
    lens = torch.randint(window + 1, (rows,), device=slots.device)
    differing = 0
    given = {
        "extend_indices": ((slots, seq_lens, lens, pages, table.geometry), {"width": window}),
        "draft_indices": ((slots, seq_lens, pages, table.geometry), {"count": window}),
    }
    for name, (args, sizes) in given.items():
        found, wanted = (
            getattr(module, name)(*args, **sizes) for module in (metadata, metadata_reference)
        )
        pairs = zip(tensors_of(found), tensors_of(wanted), strict=True)
        differing += sum(not torch.equal(a, b) for a, b in pairs)
    return differing


def _norm_ops(device: torch.device) -> Iterator[Op]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(BF16)

    weight, head_weight = (torch.randn(n, device=device) for n in (HIDDEN, HEAD_DIM))
    for tokens in (1, 64, 256):
        size = 2.0 * tokens * HIDDEN
        count = num_launches(4 * size)
        label = f"{tokens} tokens"
        yield Op(
            "rms_norm", f"{label} D={HIDDEN}",
            *rotating(
                lambda t=tokens: (draw(t, HIDDEN), weight, EPS),
                norm.rms_norm, norm_reference.rms_norm, count,
            ), size, size,
        )  # fmt: skip
        yield Op(
            "add_rms_norm", f"{label} D={HIDDEN}",
            *rotating(
                lambda t=tokens: (draw(t, HIDDEN), draw(t, HIDDEN), weight, EPS),
                norm.add_rms_norm, norm_reference.add_rms_norm, count,
            ), 2 * size, 2 * size,
        )  # fmt: skip
        yield Op(
            "gated_rms_norm", f"{label} {HEADS}x{HEAD_DIM}",
            *rotating(
                lambda t=tokens: (
                    draw(t, HEADS, HEAD_DIM), draw(t, HEADS, HEAD_DIM), head_weight, EPS
                ),
                lambda *args: norm.gated_rms_norm(*args, activation="silu"),
                lambda *args: norm_reference.gated_rms_norm(*args, activation="silu"), count,
            ), 4.0 * tokens * HEADS * HEAD_DIM, 2.0 * tokens * HEADS * HEAD_DIM,
        )  # fmt: skip
        yield Op(
            "silu_mul", f"{label} I={INNER}",
            *rotating(
                lambda t=tokens: (draw(t, 2 * INNER),), silu.silu_mul, silu_reference.silu_mul,
                count,
            ), 4.0 * tokens * INNER, 2.0 * tokens * INNER,
        )  # fmt: skip


def _conv_ops(device: torch.device) -> Iterator[Op]:
    weight = torch.randn(CHANNELS, WIDTH, device=device).to(BF16)
    row_bytes = 2.0 * CHANNELS
    for rows, window in ((1, 1), (64, 1), (256, 1), (64, 4)):
        read = row_bytes * (rows * (window + WIDTH - 1) + WIDTH)
        written = row_bytes * rows * 2 * window
        yield Op(
            "convolve_window", f"{rows} rows W={window} C={CHANNELS}",
            *rotating(
                lambda r=rows, w=window: (Windows(r, w, BF16, device),),
                lambda case: case.run(conv.convolve_window, weight),
                lambda case: case.run(conv_reference.convolve_window, weight),
                num_launches(read + written),
            ), read, written,
        )  # fmt: skip
    tokens = 8192
    indices = segment_indices(tokens, device)
    ring = torch.randn(WIDTH - 1, CHANNELS, device=device).to(BF16)

    def args() -> tuple[Any, ...]:
        return torch.randn(tokens, CHANNELS, device=device).to(BF16), ring, indices, weight, None

    yield Op(
        "convolve_segments", f"{tokens} tokens C={CHANNELS}",
        *rotating(
            args,
            lambda *a: conv.convolve_segments(*a, activation="silu"),
            lambda *a: conv_reference.convolve_segments(*a, activation="silu"), 4,
        ), row_bytes * tokens, row_bytes * tokens,
    )  # fmt: skip
    yield Op(
        "convolve_segments_qkv", f"{tokens} tokens C={CHANNELS}",
        *rotating(
            args,
            lambda *a: conv.convolve_segments_qkv(*a[:4], **QKV),
            lambda *a: conv_reference.convolve_segments_qkv(*a[:4], **QKV), 4,
        ), row_bytes * tokens, row_bytes * tokens,
    )  # fmt: skip


def _metadata_ops(device: torch.device) -> Iterator[Op]:
    for rows, window in ((1, 1), (64, 1), (256, 1), (64, 4)):
        table = Table(window, device)
        slots = table.slots(rows, 0)
        found = metadata.window_indices(slots, table.columns, table.geometry, window=window)
        # a chain's logical positions are its storage positions, the same tensor
        written = float(sum({t.data_ptr(): t.nbytes for t in tensors_of(found)}.values()))

        def kernel(t: Table = table, s: Tensor = slots, w: int = window) -> object:
            return metadata.window_indices(s, t.columns, t.geometry, window=w)

        def chain(t: Table = table, s: Tensor = slots, w: int = window) -> object:
            return metadata_reference.window_indices(
                s, t.columns, t.geometry, t.constants, window=w
            )

        yield Op("window_indices", f"{rows} rows W={window}", [kernel] * 20, [chain] * 5,
                 48.0 * rows, written)  # fmt: skip


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, bytes, the floor's share and the chain's time."""
    torch.manual_seed(0)
    ops = [*_norm_ops(device), *_conv_ops(device), *_metadata_ops(device)]
    return [op.row() for op in ops]


if __name__ == "__main__":
    sys.exit(main(__doc__, {"check": check, "measure": measure}))
