"""Chunked prefill of the linear layers on a GPU: right first, then how fast.

    python -m benchmarks.gpu.linear_chunk --check --measure [--output figures.json]

Checks compare with float64. Times are those of a CUDA graph of a few calls, the median of 25
replays; one call works on far more than the L2 cache holds. `us` is what a layer runs: the short
convolution, which gives q, k and v apart and the former two normalised, then the recurrence, which
reads initial states from their rows and writes final states to theirs; `conv_us` is the former
alone. `fla_us` is the convolution of all channels side by side, then fla-core's own entry point,
which normalises: on contiguous inputs, as if what the convolution gives needed no copies, with
states in place, never cut. `cut_over_fla` compares cut segments with it, and `cut_us` less `us` is
what two states on the way of each segment cost a layer. Both run the same tuned kernels within
chunks, tuned on one segment before anything else is run; the scan is this package's own, and
`--tilings` times its candidates alone.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.harness import main, relative, time_us
from benchmarks.gpu.small_ops import WIDTH, segment_indices
from gapless.core.specs.linear import Recurrence
from gapless.ops.causal_conv import convolve_segments, convolve_segments_qkv
from gapless.ops.linear_chunk import (
    ChunkIndices,
    RoundIndices,
    ScanIndices,
    ScanRoom,
    chunk_prefill,
    kernels_lack,
    plan_chunks,
    reference,
    scan,
    scan_arrays,
    scan_indices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

CHUNK = 64
EPS = 1e-6
REPLAYS = 25
CALLS = 3
COMPILERS = 8

# |out - wanted| / |wanted|: keys, corrections, and states as they are read are bfloat16
OUT_BOUND, STATE_BOUND = 8e-3, 5e-3


@dataclass(frozen=True)
class Shape:
    """Heads of a layer."""

    name: str
    recurrence: Recurrence
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def decay_dim(self) -> int:
        return self.key_dim if self.recurrence is Recurrence.KIMI_DELTA else 1

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


SHAPES = (
    Shape("GDN 16k 32v", Recurrence.GATED_DELTA, 16, 32),
    Shape("KDA 32", Recurrence.KIMI_DELTA, 32, 32),
)
# 8,192 tokens each, and the shortest chunks whose rows are to cost no more for their snapshots
PACKINGS = {
    "1x8192": (8192,),
    "4x2048": (2048,) * 4,
    "mixed8": (4096, 2048, 1024, 512, 256, 128, 64, 64),
    "32x256": (256,) * 32,
    "1x2048": (2048,),
    "8x256": (256,) * 8,
}


def last_cuts(lengths: Sequence[int]) -> list[list[int]]:
    """Two cuts of each segment, as a chat makes: near its end, and where its last page begins."""
    return [sorted({max(1, n - 40), max(1, (n - 1) // 16 * 16)}) for n in lengths]


class Problem:
    """Packed segments in rows of a checkpoint; odd ones continue, the others start from zeros."""

    def __init__(
        self,
        shape: Shape,
        lengths: Sequence[int],
        cuts: Sequence[Sequence[int]] | None,
        device: torch.device,
        *,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape, self.lengths, self.device = shape, list(lengths), device
        tokens = sum(lengths)
        keys = torch.randn(2, tokens, shape.key_heads, shape.key_dim, device=device)
        q, k = torch.nn.functional.normalize(keys, dim=-1).bfloat16()
        values = torch.randn(tokens, shape.value_heads, shape.value_dim, device=device)
        self.inputs = (
            q,
            k,
            values.bfloat16(),
            torch.randn(tokens, shape.value_heads, device=device).sigmoid(),
            -0.1 * torch.randn(tokens, shape.value_heads, shape.decay_dim, device=device).exp(),
        )
        count = len(lengths)
        self.zero_row = 2 * count
        self.init_rows = [2 * s if s % 2 else self.zero_row for s in range(count)]
        self.final_rows = [2 * s + 1 for s in range(count)]
        own_cuts = [list(own) for own in cuts or [()] * count]
        num_rows = self.zero_row + 1
        cut_rows = []
        for own in own_cuts:
            cut_rows.append(list(range(num_rows, num_rows + len(own))))
            num_rows += len(own)
        self.written = [*self.final_rows, *(row for own in cut_rows for row in own)]
        states = (num_rows, shape.value_heads, shape.value_dim, shape.key_dim)
        # what must be written is NaN before
        self.checkpoint = torch.full(states, math.nan, dtype=state_dtype, device=device)
        self.checkpoint[self.zero_row] = 0
        for row in self.init_rows[1::2]:
            self.checkpoint[row] = torch.randn(states[1:], device=device).to(state_dtype)
        self.indices = self._indices(own_cuts, cut_rows)

    def _indices(self, cuts: list[list[int]], cut_rows: list[list[int]]) -> ChunkIndices:
        self._cuts, self._cut_rows = cuts, cut_rows
        plan = plan_chunks(self.lengths, CHUNK, cuts)
        rounds = RoundIndices(
            gather=self._sent(plan.gather),
            scatter=self._sent(plan.scatter),
            active=plan.active,
            init_rows=self._sent([self.init_rows[s] for s in plan.order]),
            final_rows=self._sent([self.final_rows[s] for s in plan.order]),
            num_cuts=plan.num_cuts,
            cut_places=self._sent([cut.place for cut in plan.cuts]),
            cut_rows=self._sent([cut_rows[plan.order[c.place]][c.number] for c in plan.cuts]),
        )
        return ChunkIndices(CHUNK, self._scan(None), rounds)

    def _scan(self, room: ScanRoom | None) -> ScanIndices:
        arrays = scan_arrays(
            self.lengths, CHUNK, init_rows=self.init_rows, final_rows=self.final_rows,
            cuts=self._cuts, cut_rows=self._cut_rows, room=room,
        )  # fmt: skip
        return scan_indices({name: self._sent(a) for name, a in arrays.items()})

    def pad(self, room: ScanRoom) -> None:
        """Pad the kernels' indices to a room."""
        self.indices = replace(self.indices, scan=self._scan(room))

    def _sent(self, values: np.ndarray | list[int]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device)

    def run(self, inputs: Sequence[Tensor], checkpoint: Tensor) -> Tensor:
        """Call the op, which takes what serves the device."""
        return chunk_prefill(
            *inputs, checkpoint, self.indices,
            recurrence=self.shape.recurrence, scale=self.shape.key_dim**-0.5,
        )  # fmt: skip

    def wanted(self) -> tuple[Tensor, Tensor]:
        """Outputs and written states by the definition in float64."""
        checkpoint = self.checkpoint.double()
        assert self.indices.rounds is not None
        out = reference.chunk_prefill(
            *(x.double() for x in self.inputs), checkpoint, self.indices.rounds,
            recurrence=self.shape.recurrence, scale=self.shape.key_dim**-0.5,
        )  # fmt: skip
        return out, checkpoint[self.written]

    def errors(self) -> tuple[float, float]:
        """Relative errors of the outputs and of the written states."""
        checkpoint = self.checkpoint.clone()
        out = self.run(self.inputs, checkpoint)
        wanted, states = self.wanted()
        return relative(out, wanted), relative(checkpoint[self.written], states)


class Convolution:
    """What a layer convolves before its recurrence: so many tokens of all channels."""

    def __init__(self, shape: Shape, tokens: int, device: torch.device) -> None:
        self._shape = shape
        rows = torch.randn(tokens + WIDTH - 1, shape.channels, device=device).bfloat16()
        weight = torch.randn(shape.channels, WIDTH, device=device).bfloat16()
        self._args = rows[:tokens], rows[tokens:], segment_indices(tokens, device), weight

    def apart(self) -> tuple[Tensor, ...]:
        """Return q, k and v as the recurrence wants them."""
        shape = self._shape
        found = convolve_segments_qkv(
            *self._args, num_heads=shape.key_heads, key_dim=shape.key_dim, l2norm_eps=EPS
        )
        heads = (shape.key_heads, shape.key_heads, shape.value_heads)
        return tuple(x.view(len(x), n, -1) for x, n in zip(found, heads, strict=True))

    def side_by_side(self) -> Tensor:
        """Return all channels as one."""
        return convolve_segments(*self._args, None, activation="silu")


# several chunks, one, less than one, one token; a segment's end cut, cuts side by side
CHECKED = (130, 1, 64, 65, 5, 20, 2)
CHECKED_CUTS = ([1, 64, 100], [1], [], [65], [4], [3, 7, 16], [1, 2])


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare with the definition; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    tune(device)
    found = []
    for shape, cuts, state in product(
        SHAPES, (None, CHECKED_CUTS), (torch.float32, torch.bfloat16)
    ):
        problem = Problem(shape, CHECKED, cuts, device, state_dtype=state)
        label = f"{shape.name} {'cut' if cuts else 'uncut'} {str(state).removeprefix('torch.')}"
        errors = problem.errors()
        bounds = (OUT_BOUND, STATE_BOUND)
        for what, error, bound in zip(("outputs", "states"), errors, bounds, strict=True):
            result = {"name": f"{label} {what}", "error": error, "bound": bound}
            found.append(result | {"ok": error <= bound})
    return found


def tune(device: torch.device) -> None:
    """Compile all candidates of fla-core's kernels in parallel, then tune on 8,192 tokens.

    Raises:
        RuntimeError: the kernels cannot serve these shapes here, so that nothing is measured.
    """
    for shape in SHAPES:
        reason = kernels_lack(torch.bfloat16, shape.key_dim, CHUNK, shape.recurrence)
        if reason is not None:
            raise RuntimeError(f"{shape.name}: {reason}")
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_share, range(COMPILERS)))
    for shape in SHAPES:
        problem = Problem(shape, PACKINGS["1x8192"], None, device)
        problem.run(problem.inputs, problem.checkpoint.clone())
        _fla_alone(problem)()
    torch.cuda.synchronize()


def _compile_share(share: int) -> None:
    """Compile every eighth candidate; the compiled code stays in Triton's cache on disk."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def with_share(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, names, configs[share::COMPILERS] or configs[:1], *args, **kwargs)

    Autotuner.__init__ = with_share
    for shape in SHAPES:
        problem = Problem(shape, (128,), None, torch.device("cuda"))
        problem.run(problem.inputs, problem.checkpoint)
        _fla_alone(problem)()
    torch.cuda.synchronize()


def _fla_alone(problem: Problem) -> Callable[[], object]:
    """Return a call of fla-core's entry point on the same tokens, uncut."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    shape = problem.shape
    is_kda = shape.recurrence is Recurrence.KIMI_DELTA
    q, k, v, beta, g = (x[None] for x in problem.inputs)
    bounds = torch.tensor([0, *problem.lengths]).cumsum(0)
    on_device = bounds.to(problem.device)
    states = problem.checkpoint[problem.init_rows].float()

    def call() -> object:
        return (chunk_kda if is_kda else chunk_gated_delta_rule)(
            q=q, k=k, v=v, g=g if is_kda else g[..., 0], beta=beta,
            scale=shape.key_dim**-0.5, initial_state=states, output_final_state=True,
            use_qk_l2norm_in_kernel=True, state_v_first=True,
            cu_seqlens=on_device, cu_seqlens_cpu=bounds,
        )  # fmt: skip

    return call


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time what a layer runs beside fla-core's; a row has name, microseconds, and their ratio."""
    torch.manual_seed(0)
    found = []
    for shape, (name, lengths) in product(SHAPES, PACKINGS.items()):
        problem = Problem(shape, lengths, None, device)
        cut = Problem(shape, lengths, last_cuts(lengths), device)
        conv = Convolution(shape, sum(lengths), device)
        alone = _fla_alone(problem)
        us, cut_us = (
            _time_us(lambda p=p, c=conv: p.run((*c.apart(), *p.inputs[3:]), p.checkpoint))
            for p in (problem, cut)
        )
        fla_us = _time_us(lambda c=conv, f=alone: (c.side_by_side(), f()))
        found.append(
            {
                "name": f"{shape.name} {name}",
                "us": us,
                "conv_us": _time_us(conv.apart),
                "fla_us": fla_us,
                "over_fla": us / fla_us,
                "cut_us": cut_us,
                "cut_over_fla": cut_us / fla_us,
                "Mtok/s": sum(lengths) / us,
            }
        )
    return found


def tilings(device: torch.device) -> list[dict[str, Any]]:
    """Time the scan of states alone, by tiling: of one long segment, and of many."""
    torch.manual_seed(0)
    found = []
    for shape, name in product(SHAPES, ("1x8192", "8x256", "32x256")):
        problem = Problem(shape, PACKINGS[name], None, device)
        tokens, is_kda = problem.inputs[0].shape[0], shape.recurrence is Recurrence.KIMI_DELTA
        key, value = (shape.key_heads, shape.key_dim), (shape.value_heads, shape.key_dim)
        sizes = (key, value, value, (shape.value_heads, shape.value_dim))
        k, decayed_k, w, u = (
            0.05 * torch.randn(tokens, *size, device=device).bfloat16() for size in sizes
        )
        g = -torch.rand(tokens, shape.value_heads, *[shape.key_dim] * is_kda, device=device)
        inputs = (k, decayed_k if is_kda else None, w, u, g)
        for block_v, num_warps, num_stages in product((16, 32, 64), (2, 4), (2, 3)):
            tiling = scan.ScanTiling(block_v, num_warps, num_stages)
            us = _time_us(
                lambda t=tiling, p=problem, x=inputs: scan.scan_chunks(
                    *x, p.checkpoint, p.indices.scan, chunk=CHUNK, tiling=t
                )
            )
            found.append(
                {"name": f"{shape.name} {name} {block_v}v {num_warps}w {num_stages}s", "us": us}
            )
    return sorted(found, key=lambda row: (row["name"].rsplit(" ", 3)[0], row["us"]))


def _time_us(call: Callable[[], object]) -> float:
    """Return microseconds per call."""
    with torch.inference_mode():
        return time_us([call] * CALLS, REPLAYS)


if __name__ == "__main__":
    sys.exit(main(__doc__, {"check": check, "measure": measure, "tilings": tilings}))
