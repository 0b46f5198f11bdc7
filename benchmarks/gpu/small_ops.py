"""Norms, short convolution, step metadata, sampling, acceptance and experts: right, then how fast.

    python -m benchmarks.gpu.small_ops [--check] [--measure] [--gathered-sweep] [--tile-sweep]
        [--output figures.json]

Checks compare with the definitions, in float64 where those are sums. Times are those of CUDA
graphs whose launches take different inputs, with so many that none is found in the L2 cache;
`chain_us` is the definition's time, the chain of torch operations, in a graph too. A floor is what
must be read and written at the bandwidths below; experts count each one's matrices once.
"""

from __future__ import annotations

import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import triton

from benchmarks.gpu.harness import capture, main, relative, result, time_us
from gapless.ops.acceptance import AcceptColumns
from gapless.ops.acceptance import reference as acceptance_reference
from gapless.ops.acceptance import triton as acceptance
from gapless.ops.causal_conv import reference as conv_reference
from gapless.ops.causal_conv import triton as conv
from gapless.ops.moe import Shared
from gapless.ops.moe import reference as moe_reference
from gapless.ops.moe import triton as moe
from gapless.ops.norm import reference as norm_reference
from gapless.ops.norm import triton as norm
from gapless.ops.sampling import SamplingColumns, SamplingMode, SamplingRows, philox
from gapless.ops.sampling import reference as sampling_reference
from gapless.ops.sampling import triton as sampling
from gapless.ops.silu_mul import reference as silu_reference
from gapless.ops.silu_mul import triton as silu
from gapless.ops.step_metadata import Geometry, SlotColumns, StepConstants
from gapless.ops.step_metadata import reference as metadata_reference
from gapless.ops.step_metadata import triton as metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

# bytes per second over 4 GiB on an H200: a sum, and an update in place
READ_BANDWIDTH = 4.39e12
UPDATE_BANDWIDTH = 4.23e12
ROTATED_BYTES = 256 << 20
MOST_LAUNCHES = 64
CHAIN_LAUNCHES = 3
REPLAYS = 15
EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
# |out - wanted| / |wanted|; an expert's hidden features are rounded too
BOUNDS = {BF16: 2.5e-3, FP32: 2e-6}
MOE_BOUNDS = {BF16: 4e-3, FP32: 2e-6}

HIDDEN, HEADS, HEAD_DIM = 2048, 32, 128
CHANNELS, WIDTH = 8192, 4
VOCAB = 248320
EXPERTS, ACTIVE, INNER = 256, 8, 512


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    found = [*_norm_results(device), *_conv_results(device), *_metadata_results(device)]
    found += [*_sampling_results(device), *_acceptance_results(device)]
    return [*found, *_moe_results(device)]


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _norm_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, (rows, size) in product(BOUNDS, ((1, HIDDEN), (37, HIDDEN), (333, HEAD_DIM))):
        x, y = (torch.randn(rows, 2 * size, device=device).to(dtype)[:, size:] for _ in range(2))
        weight = torch.randn(size, device=device)
        label, bound = f"{rows}x{size} {_kind(dtype)}", BOUNDS[dtype]
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


def _conv_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype, bound in BOUNDS.items():
        weight = torch.randn(CHANNELS, WIDTH, device=device).to(dtype)
        for rows, window in ((1, 1), (33, 1), (33, 4), (5, 16)):
            case = Windows(rows, window, dtype, device)
            before = case.ring.clone()
            wanted = case.run(conv_reference.convolve_window, weight, is_wide=True)
            out = case.run(conv.convolve_window, weight)
            label = f"{rows} rows W={window} {_kind(dtype)}"
            yield result(f"convolve_window {label}", relative(out, wanted), bound)
            before.index_copy_(0, case.write, case.inputs)
            differing = int((before != case.ring).sum())
            yield result(f"convolve_window {label}: ring", differing, 0)
        source = torch.randn(1003, CHANNELS, device=device).to(dtype)
        taps = torch.randint(1003, (WIDTH, 777), device=device)
        out = conv.causal_conv(source, taps, weight, None, activation="silu")
        wanted = conv_reference.causal_conv(
            source.double(), taps, weight.double(), None, activation="silu"
        )
        yield result(f"causal_conv {_kind(dtype)}", relative(out, wanted), bound)


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
            window_tokens=torch.randint(VOCAB, (slots, window), device=device),
        )
        self.constants = StepConstants(geometry, device)

    def slots(self, rows: int, padded: int) -> Tensor:
        device = self.columns.done.device
        slots = torch.randperm(self.geometry.num_slots, device=device)[:rows]
        slots[rows - padded :] = self.geometry.null_slot
        return slots


def _tensors(value: Any) -> Iterator[Tensor]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif value is not None:
        yield value


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
                pairs = zip(_tensors(found), _tensors(wanted), strict=True)
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
        pairs = zip(_tensors(found), _tensors(wanted), strict=True)
        differing += sum(not torch.equal(a, b) for a, b in pairs)
    return differing


def sampling_rows(num_rows: int, device: torch.device, **values: float) -> SamplingRows:
    """Return rows without filters at temperature 1, with seeds of their own."""
    column = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    floats = {k: torch.full((num_rows,), float(v), device=device) for k, v in column.items()}
    columns = SamplingColumns(
        temperature=floats["temperature"],
        top_k=floats["top_k"].long(),
        top_p=floats["top_p"],
        min_p=floats["min_p"],
        seeds=torch.arange(num_rows, device=device) * 0x9E3779B97F4A7C1 - 12345,
        min_len=torch.zeros(num_rows, dtype=torch.int64, device=device),
        stop_ids=torch.full((num_rows, 8), -1, device=device),
    )
    return SamplingRows(columns, torch.arange(num_rows, device=device))


FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "unfiltered": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}


def peaked_logits(num_rows: int, device: torch.device) -> Tensor:
    """Return logits like a model's: a broad body, and a few tokens far above it."""
    logits = torch.randn(num_rows, VOCAB, device=device) * 2.0
    likely = torch.randint(VOCAB, (num_rows, 30), device=device)
    return logits.scatter_add_(1, likely, torch.rand(num_rows, 30, device=device) * 18.0)


def _sampling_results(device: torch.device) -> Iterator[dict[str, Any]]:
    seeds = torch.randint(-(2**62), 2**62, (9,), device=device)
    positions = torch.randint(2**20, (9,), device=device)
    noise = sampling.gumbel_noise(seeds, positions, VOCAB)
    differing = int((noise != philox.gumbel_noise(seeds, positions, VOCAB)).sum())
    yield result("gumbel_noise: values that differ", differing, 0)
    num_rows = 250
    flat, peaked = torch.randn(num_rows, VOCAB, device=device), peaked_logits(num_rows, device)
    ties = (peaked * 2).round() / 2
    positions = torch.arange(num_rows, device=device)
    for (name, options), (kind, logits) in product(
        FILTERS.items(), {"flat": flat, "peaked": peaked, "ties": ties}.items()
    ):
        rows = sampling_rows(num_rows, device, **options)
        found = sampling.sample(logits, positions, rows, mode=SamplingMode.SAMPLED)
        wanted = sampling_reference.sample(logits, positions, rows, mode=SamplingMode.SAMPLED)
        # a running float sum may place top-p's threshold one token off
        bound = 0.004 if "top_p" in options else 0.0
        share = float((found != wanted).float().mean())
        yield result(f"sample {name} {kind}: share of rows that differ", share, bound)
    yield result("sample: rows changed by batch, split or graph", _unsteady(peaked), 0)


def _unsteady(logits: Tensor) -> int:
    """Count tokens that change with the batch, the split or from replay to replay."""
    device, num_rows = logits.device, len(logits)
    positions = torch.arange(num_rows, device=device)
    rows = sampling_rows(num_rows, device, **FILTERS["all"])
    rows.columns.temperature[::3] = 0.0
    rows.columns.top_k[1::3] = 0
    rows.columns.top_p[2::4] = 1.0

    def run(**options: int) -> Tensor:
        return sampling.sample(logits, positions, rows, mode=SamplingMode.DRAWN, **options)

    together = run()
    changed = sum(int((run(split=s) != together).sum()) for s in (1024, 4096))
    changed += int((run(capacity=16) != together).sum())
    for index in ([0], [1, 2, 5]):
        part = replace(rows, slots=rows.slots[index])
        alone = sampling.sample(logits[index], positions[index], part, mode=SamplingMode.DRAWN)
        changed += int((alone != together[index]).sum())
    captured: list[Tensor] = []
    graph = capture([lambda: captured.append(run())])
    for _ in range(3):
        graph.replay()
        changed += int((captured[-1] != together).sum())
    return changed


class Verified:
    """A step's sampled tokens before acceptance; few ids, so that drafts and stops are hit."""

    def __init__(self, rows: int, window: int, device: torch.device) -> None:
        slots, self.null = 257, 256
        lengths = torch.randint(20, (slots,), device=device)
        lengths[self.null] = 0
        self.columns = AcceptColumns(
            seq_lens=lengths,
            checkpoint_len=lengths // 16 * 16,
            done=torch.arange(slots, device=device) == self.null,
            window_tokens=torch.randint(3, (slots, window), device=device),
            num_drafts=torch.randint(window, (slots,), device=device),
            limit_len=lengths + torch.randint(1, 9, (slots,), device=device),
            stop_ids=torch.randint(-1, 20, (slots, 8), device=device),
        )
        self.slots = torch.randperm(self.null, device=device)[:rows]
        self.slots[rows - rows // 4 :] = self.null
        self.sampled = torch.randint(3, (rows, window), device=device)
        self.emitted = torch.zeros(rows, 2 + window, dtype=torch.int64, device=device)

    def settle(self, op: Callable[..., Any], columns: AcceptColumns) -> Any:
        lengths = self.columns.seq_lens[self.slots]
        return op(
            self.sampled, self.slots, lengths, lengths, columns, self.emitted, null_slot=self.null
        )


def _acceptance_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for rows, window in ((1, 1), (256, 1), (33, 4), (256, 16)):
        case, outcomes = Verified(rows, window, device), []
        for op in (acceptance.settle_windows, acceptance_reference.settle_windows):
            own = {f.name: getattr(case.columns, f.name).clone() for f in fields(AcceptColumns)}
            columns = AcceptColumns(**own)
            settled = case.settle(op, columns)
            # any of the null rows' tokens may stay
            columns.window_tokens[case.null, 0] = 0
            outcomes.append([*_tensors(settled), *_tensors(columns), case.emitted.clone()])
        differing = sum(not torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        name = f"settle_windows {rows} rows W={window}: tensors that differ"
        yield result(name, differing, 0)


class Experts:
    """A layer's experts and routed tokens."""

    def __init__(
        self, num_experts: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.hidden, self.inner, self.num_experts = hidden, inner, num_experts
        self.dtype, self.device = dtype, device
        self.gate_up = self._draw(num_experts, 2 * inner, hidden) / hidden**0.5
        self.down = self._draw(num_experts, hidden, inner) / inner**0.5

    def _draw(self, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_()

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw x, weights and experts of some tokens."""
        logits = self._draw(count, self.num_experts + 1)[:, : self.num_experts]
        return self._draw(count, self.hidden), *moe.route(logits, ACTIVE, renormalises=True)

    def gathered(
        self, x: Tensor, weights: Tensor, experts: Tensor, tiling: moe.GatheredTiling = moe.GATHERED
    ) -> Tensor:
        """Run few pairs as they are served: the first expert is everyone's as well."""
        shared = Shared(self.gate_up[0], self.down[0], x[:, :1])
        return moe.mix_gathered(
            x, weights, experts, self.gate_up, self.down, shared=shared, tiling=tiling
        )

    def grouped(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Run many pairs."""
        return moe.mix_grouped(x, weights, experts, self.gate_up, self.down)


def _moe_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (BF16, FP32):
        # on a grid: ties, and no two so near that rounding orders them
        logits = torch.randn(777, EXPERTS + 1, device=device).mul(16).round().div(16)
        logits = logits.to(dtype)[:, :EXPERTS]
        weights, experts = moe.route(logits, ACTIVE, renormalises=True)
        wanted, wanted_experts = moe_reference.route(logits, ACTIVE, renormalises=True)
        differing = int((experts != wanted_experts).sum())
        yield result(f"route {_kind(dtype)}: experts that differ", differing, 0)
        yield result(f"route {_kind(dtype)}: weights", relative(weights, wanted), 2e-6)
    sizes = {BF16: (EXPERTS, HIDDEN, INNER), FP32: (32, 256, 96)}
    for dtype, size in sizes.items():
        layer = Experts(*size, dtype, device)
        wide = layer.gate_up.double(), layer.down.double()
        for tokens in (1, 7, 64, 300, 2500):
            x, weights, experts = layer.tokens(tokens)
            wanted = moe_reference.mix_experts(x.double(), weights.double(), experts, *wide)
            paths = [moe.mix_grouped] + [moe.mix_gathered] * (tokens < 300)
            for path in paths:
                error = relative(path(x, weights, experts, layer.gate_up, layer.down), wanted)
                label = f"{path.__name__} {tokens} tokens {_kind(dtype)}"
                yield result(label, error, MOE_BOUNDS[dtype])
            yield result(
                f"experts {tokens} tokens {_kind(dtype)}: padded rows", _padding_error(layer, x), 0
            )


def _padding_error(layer: Experts, x: Tensor) -> int:
    """Count values that rows without life change, and such rows that are not zeros."""
    count = len(x)
    live = torch.arange(count, device=x.device) % 3 != 1
    _, weights, experts = layer.tokens(count)
    extra = torch.randn_like(x), torch.randn(count, 1, device=x.device).to(x.dtype)
    args = (weights, experts, layer.gate_up, layer.down)
    wanted = moe.mix_experts(x, *args, live=live, extra=extra)
    poisoned = x.masked_fill(~live[:, None], float("nan"))
    out = moe.mix_experts(poisoned, *args, live=live, extra=extra)
    return int((out != wanted).sum()) + int((out[~live] != 0).sum())


@dataclass(frozen=True)
class Op:
    """One measurement: launches over different inputs, and what each must move."""

    name: str
    shape: str
    kernel: Sequence[Callable[[], object]]
    chain: Sequence[Callable[[], object]]
    read: float  # bytes
    written: float
    flops: float = 0.0

    def row(self) -> dict[str, Any]:
        us, moved = time_us(self.kernel, REPLAYS), self.read + self.written
        bandwidth = READ_BANDWIDTH if self.written < self.read / 8 else UPDATE_BANDWIDTH
        floor_us = moved / bandwidth * 1e6
        row = {
            "name": self.name,
            "shape": self.shape,
            "us": us,
            "MB": moved / 1e6,
            "floor_us": floor_us,
            "share_of_floor": floor_us / us,
            "chain_us": time_us(self.chain, REPLAYS) if self.chain else math.nan,
        }
        return row | ({"TFLOP_s": self.flops / us / 1e6} if self.flops else {})


def _launches(moved: float) -> int:
    return min(MOST_LAUNCHES, max(4, math.ceil(ROTATED_BYTES / moved)))


def _rotating(
    make: Callable[[], Sequence[Any]],
    kernel: Callable[..., object],
    chain: Callable[..., object],
    count: int,
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return launches of both on inputs of their own."""
    inputs = [make() for _ in range(count)]
    return (
        [lambda args=args: kernel(*args) for args in inputs],
        [lambda args=args: chain(*args) for args in inputs[:CHAIN_LAUNCHES]],
    )


def _norm_ops(device: torch.device) -> Iterator[Op]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(BF16)

    weight, head_weight = (torch.randn(n, device=device) for n in (HIDDEN, HEAD_DIM))
    for tokens in (1, 64, 256):
        size = 2.0 * tokens * HIDDEN
        count = _launches(4 * size)
        label = f"{tokens} tokens"
        yield Op(
            "rms_norm", f"{label} D={HIDDEN}",
            *_rotating(
                lambda t=tokens: (draw(t, HIDDEN), weight, EPS),
                norm.rms_norm, norm_reference.rms_norm, count,
            ), size, size,
        )  # fmt: skip
        yield Op(
            "add_rms_norm", f"{label} D={HIDDEN}",
            *_rotating(
                lambda t=tokens: (draw(t, HIDDEN), draw(t, HIDDEN), weight, EPS),
                norm.add_rms_norm, norm_reference.add_rms_norm, count,
            ), 2 * size, 2 * size,
        )  # fmt: skip
        yield Op(
            "gated_rms_norm", f"{label} {HEADS}x{HEAD_DIM}",
            *_rotating(
                lambda t=tokens: (
                    draw(t, HEADS, HEAD_DIM), draw(t, HEADS, HEAD_DIM), head_weight, EPS
                ),
                lambda *args: norm.gated_rms_norm(*args, activation="silu"),
                lambda *args: norm_reference.gated_rms_norm(*args, activation="silu"), count,
            ), 4.0 * tokens * HEADS * HEAD_DIM, 2.0 * tokens * HEADS * HEAD_DIM,
        )  # fmt: skip
        yield Op(
            "silu_mul", f"{label} I={INNER}",
            *_rotating(
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
            *_rotating(
                lambda r=rows, w=window: (Windows(r, w, BF16, device),),
                lambda case: case.run(conv.convolve_window, weight),
                lambda case: case.run(conv_reference.convolve_window, weight),
                _launches(read + written),
            ), read, written,
        )  # fmt: skip
    tokens = 8192
    taps = torch.arange(tokens, device=device) - torch.arange(3, -1, -1, device=device)[:, None]
    taps = taps.clamp(min=0)

    def args() -> tuple[Any, ...]:
        return torch.randn(tokens, CHANNELS, device=device).to(BF16), taps, weight, None

    yield Op(
        "causal_conv", f"{tokens} tokens C={CHANNELS}",
        *_rotating(
            args,
            lambda *a: conv.causal_conv(*a, activation="silu"),
            lambda *a: conv_reference.causal_conv(*a, activation="silu"), 4,
        ), row_bytes * tokens, row_bytes * tokens,
    )  # fmt: skip


def _metadata_ops(device: torch.device) -> Iterator[Op]:
    for rows, window in ((1, 1), (64, 1), (256, 1), (64, 4)):
        table = Table(window, device)
        slots = table.slots(rows, 0)
        found = metadata.window_indices(slots, table.columns, table.geometry, window=window)
        # a chain's logical positions are its storage positions, the same tensor
        written = float(sum({t.data_ptr(): t.nbytes for t in _tensors(found)}.values()))

        def kernel(t: Table = table, s: Tensor = slots, w: int = window) -> object:
            return metadata.window_indices(s, t.columns, t.geometry, window=w)

        def chain(t: Table = table, s: Tensor = slots, w: int = window) -> object:
            return metadata_reference.window_indices(
                s, t.columns, t.geometry, t.constants, window=w
            )

        yield Op("window_indices", f"{rows} rows W={window}", [kernel] * 20, [chain] * 5,
                 48.0 * rows, written)  # fmt: skip


def _acceptance_ops(device: torch.device) -> Iterator[Op]:
    for rows, window in ((1, 1), (64, 4), (256, 4)):
        case = Verified(rows, window, device)
        lengths = case.columns.seq_lens[case.slots]

        def launch(op: Callable[..., Any], c: Verified = case, n: Tensor = lengths) -> object:
            return op(c.sampled, c.slots, n, n, c.columns, c.emitted, null_slot=c.null)

        kernel = [lambda run=launch: run(acceptance.settle_windows)] * 20
        chain = [lambda run=launch: run(acceptance_reference.settle_windows)] * 5
        yield Op("settle_windows", f"{rows} rows W={window}", kernel, chain,
                 8.0 * rows * (13 + 2 * window), 73.0 * rows)  # fmt: skip


def _sampling_ops(device: torch.device) -> Iterator[Op]:
    for num_rows, (name, options) in product((1, 4, 64, 256), FILTERS.items()):
        mode = SamplingMode.ARGMAX if name == "greedy" else SamplingMode.DRAWN
        rows = sampling_rows(num_rows, device, **options)
        positions = torch.arange(num_rows, device=device)
        read = 4.0 * num_rows * VOCAB
        # a longer graph says no more
        count = min(_launches(read), 16)
        kernel, chain = _rotating(
            lambda n=num_rows: (peaked_logits(n, device),),
            lambda logits, p=positions, r=rows, m=mode: sampling.sample(logits, p, r, mode=m),
            lambda logits, p=positions, r=rows, m=mode: sampling_reference.sample(
                logits, p, r, mode=m
            ),
            count,
        )
        # the chain's time depends on the mode alone
        is_told = name in ("greedy", "all")
        yield Op(f"sample {name}", f"{num_rows} rows V={VOCAB}", kernel,
                 chain[:1] if is_told else [], read, 8.0 * num_rows)  # fmt: skip


def _moe_ops(device: torch.device) -> Iterator[Op]:
    layer = Experts(EXPERTS, HIDDEN, INNER, BF16, device)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192):
        inputs = [layer.tokens(tokens) for _ in range(12 if tokens < 1024 else 2)]
        num_read = mean_read(inputs)
        matrices = 2.0 * num_read * 3 * HIDDEN * INNER
        activations = 2.0 * tokens * HIDDEN
        flops = 6.0 * tokens * ACTIVE * HIDDEN * INNER
        paths = [layer.gathered] * (tokens <= 64) + [layer.grouped] * (tokens >= 4)
        for path in paths:
            kernel, chain = _rotating(
                iter(inputs).__next__,
                path,
                lambda *a: moe_reference.mix_experts(*a, layer.gate_up, layer.down),
                len(inputs),
            )
            has_chain = path is paths[-1] and tokens in (1, 8, 64, 8192)
            yield Op(path.__name__, f"{tokens} tokens of {ACTIVE}/{EXPERTS}", kernel,
                     chain[:1] if has_chain else [], matrices + activations, activations,
                     flops)  # fmt: skip
        logits = torch.randn(tokens, EXPERTS, device=device).to(BF16)
        yield Op("route", f"{tokens} tokens of {ACTIVE}/{EXPERTS}",
                 [lambda x=logits: moe.route(x, ACTIVE, renormalises=True)] * 8,
                 [lambda x=logits: moe_reference.route(x, ACTIVE, renormalises=True)] * 2,
                 2.0 * logits.numel(), 12.0 * tokens * ACTIVE)  # fmt: skip


def mean_read(inputs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Return how many experts the tokens read, the one that is everyone's among them."""
    return statistics.mean(len({0, *experts.flatten().tolist()}) for _, _, experts in inputs)


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, bytes, the floor's share and the chain's time."""
    torch.manual_seed(0)
    groups = (_norm_ops, _conv_ops, _metadata_ops, _acceptance_ops, _sampling_ops, _moe_ops)
    return [op.row() for group in groups for op in group(device)]


def tile_sweep(device: torch.device) -> list[dict[str, Any]]:
    """Time the grouped products' tilings, best first for each number of tokens."""
    layer = Experts(EXPERTS, HIDDEN, INNER, BF16, device)
    found: list[dict[str, Any]] = []
    small = [
        moe.Tiling(16, up, down, k, warps, stages)
        for (up, down), k, warps, stages in product(
            ((32, 64), (64, 64), (64, 128)), (64, 128), (4, 8), (3, 4)
        )
    ]
    large = [
        moe.Tiling(m, up, down, 64, warps, stages)
        for m, (up, down), warps, stages in product(
            (64, 128), ((64, 128), (128, 128), (128, 256)), (4, 8), (3, 4)
        )
    ]
    for tokens, tilings in ((32, small), (128, small), (1024, large), (8192, large)):
        inputs = [layer.tokens(tokens) for _ in range(6 if tokens < 1024 else 2)]
        times = {}
        for tiling in tilings:
            launches = [
                lambda a=a, t=tiling: moe.mix_grouped(*a, layer.gate_up, layer.down, tiling=t)
                for a in inputs
            ]
            try:
                times[tiling] = time_us(launches, REPLAYS)
            except triton.runtime.errors.OutOfResources as error:
                print(f"{tiling} does not fit: {error}", flush=True)
        best = sorted(times, key=times.__getitem__)[:4]
        found += [{"tokens": tokens, "us": times[tiling]} | asdict(tiling) for tiling in best]
    return found


GATHERED_UP = (
    (16, 512, 8, 1), (8, 512, 8, 1), (4, 512, 4, 1), (4, 1024, 4, 1), (8, 1024, 8, 1),
    (8, 512, 8, 3), (8, 512, 4, 3), (8, 256, 8, 4), (4, 512, 4, 4), (16, 256, 8, 4),
)  # fmt: skip
GATHERED_DOWN = ((8, 8), (4, 8), (4, 4), (2, 4), (16, 8))


def gathered_sweep(device: torch.device) -> list[dict[str, Any]]:
    """Time how few pairs' products may be cut, best first for each number of tokens.

    First the up products, with the pinned down products; then the down products with the best.
    """
    pinned = moe.GATHERED
    down = (pinned.block_down, pinned.down_warps)
    ups = [moe.GatheredTiling(*up, *down) for up in GATHERED_UP]
    compiled = ups + [replace(pinned, block_down=d, down_warps=w) for d, w in GATHERED_DOWN]
    context = get_context("spawn")
    with ProcessPoolExecutor(len(compiled), mp_context=context) as pool:
        list(pool.map(_compile_gathered, compiled))
    layer = Experts(EXPERTS, HIDDEN, INNER, BF16, device)
    found: list[dict[str, Any]] = []
    for tokens in (1, 2, 4, 8, 16):
        inputs = [layer.tokens(tokens) for _ in range(12)]
        num_read = mean_read(inputs)
        floor_us = 6.0 * num_read * HIDDEN * INNER / READ_BANDWIDTH * 1e6

        def us(tiling: moe.GatheredTiling, inputs: Sequence[Any] = inputs) -> float:
            return time_us([lambda a=a: layer.gathered(*a, tiling) for a in inputs], REPLAYS)

        times = {tiling: us(tiling) for tiling in ups}
        best = min(times, key=times.__getitem__)
        downs = [replace(best, block_down=d, down_warps=w) for d, w in GATHERED_DOWN]
        times |= {tiling: us(tiling) for tiling in downs}
        grouped = time_us([lambda a=a: layer.grouped(*a) for a in inputs], REPLAYS)
        for tiling in sorted(times, key=times.__getitem__)[:8]:
            row = {"tokens": tokens, "us": times[tiling], "floor_us": floor_us}
            found.append(row | {"grouped_us": grouped} | asdict(tiling))
    return found


def _compile_gathered(tiling: moe.GatheredTiling) -> None:
    device = torch.device("cuda")
    layer = Experts(ACTIVE, HIDDEN, INNER, BF16, device)
    layer.gathered(*layer.tokens(1), tiling)
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(
        main(
            __doc__,
            {
                "check": check,
                "measure": measure,
                "gathered_sweep": gathered_sweep,
                "tile_sweep": tile_sweep,
            },
        )
    )
