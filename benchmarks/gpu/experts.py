"""Routing and experts: right, then how fast, and which tilings are best.

    python -m benchmarks.gpu.experts [--check] [--measure] [--gathered-sweep] [--tile-sweep]
        [--output figures.json]

Checks compare with the definitions, sums in float64. Times are those of `harness.Op`; a floor
counts each expert's matrices once.
"""

from __future__ import annotations

import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
import triton

from benchmarks.gpu.harness import (
    OP_REPLAYS,
    READ_BANDWIDTH,
    Op,
    dtype_name,
    main,
    relative,
    result,
    rotating,
    time_us,
)
from gapless.ops.moe import Shared
from gapless.ops.moe import reference as moe_reference
from gapless.ops.moe import triton as moe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
# |out - wanted| / |wanted|; an expert's hidden features are rounded too
BOUNDS = {BF16: 4e-3, FP32: 2e-6}

HIDDEN = 2048
EXPERTS, ACTIVE, INNER = 256, 8, 512


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    return list(_results(device))


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


def _results(device: torch.device) -> Iterator[dict[str, Any]]:
    for dtype in (BF16, FP32):
        # on a grid: ties, and no two so near that rounding orders them
        logits = torch.randn(777, EXPERTS + 1, device=device).mul(16).round().div(16)
        logits = logits.to(dtype)[:, :EXPERTS]
        weights, experts = moe.route(logits, ACTIVE, renormalises=True)
        wanted, wanted_experts = moe_reference.route(logits, ACTIVE, renormalises=True)
        differing = int((experts != wanted_experts).sum())
        yield result(f"route {dtype_name(dtype)}: experts that differ", differing, 0)
        yield result(f"route {dtype_name(dtype)}: weights", relative(weights, wanted), 2e-6)
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
                label = f"{path.__name__} {tokens} tokens {dtype_name(dtype)}"
                yield result(label, error, BOUNDS[dtype])
            yield result(
                f"experts {tokens} tokens {dtype_name(dtype)}: padded rows",
                _padding_error(layer, x),
                0,
            )


def _padding_error(layer: Experts, x: Tensor) -> int:
    """Count values that rows without life change, and such rows that are not zeros."""
    count = len(x)
    live = torch.arange(count, device=x.device) % 3 != 1
    _, weights, experts = layer.tokens(count)
    gate = torch.randn(count, 1, device=x.device).to(x.dtype)
    if moe.gathers(experts):
        always: dict[str, Any] = {"shared": Shared(layer.gate_up[0], layer.down[0], gate)}
    else:
        always = {"extra": (torch.randn_like(x), gate)}
    args = (weights, experts, layer.gate_up, layer.down)
    wanted = moe.mix_experts(x, *args, live=live, **always)
    poisoned = x.masked_fill(~live[:, None], float("nan"))
    out = moe.mix_experts(poisoned, *args, live=live, **always)
    return int((out != wanted).sum()) + int((out[~live] != 0).sum())


def _ops(device: torch.device) -> Iterator[Op]:
    layer = Experts(EXPERTS, HIDDEN, INNER, BF16, device)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192):
        inputs = [layer.tokens(tokens) for _ in range(12 if tokens < 1024 else 2)]
        num_read = mean_read(inputs)
        matrices = 2.0 * num_read * 3 * HIDDEN * INNER
        activations = 2.0 * tokens * HIDDEN
        flops = 6.0 * tokens * ACTIVE * HIDDEN * INNER
        paths = [layer.gathered] * (tokens <= 64) + [layer.grouped] * (tokens >= 4)
        for path in paths:
            kernel, chain = rotating(
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
    return [op.row() for op in _ops(device)]


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
                times[tiling] = time_us(launches, OP_REPLAYS)
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
            return time_us([lambda a=a: layer.gathered(*a, tiling) for a in inputs], OP_REPLAYS)

        times = {tiling: us(tiling) for tiling in ups}
        best = min(times, key=times.__getitem__)
        downs = [replace(best, block_down=d, down_warps=w) for d, w in GATHERED_DOWN]
        times |= {tiling: us(tiling) for tiling in downs}
        grouped = time_us([lambda a=a: layer.grouped(*a) for a in inputs], OP_REPLAYS)
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
