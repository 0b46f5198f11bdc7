"""The replay window and materialize on a GPU: right first, then how fast.

    python -m benchmarks.gpu.linear_replay [--check] [--quick] [--measure] [--sweep] [--resident]
        [--dump] [--output figures.json]

Checks compare with float64 on poisoned memory. Times are those of CUDA graphs that hold one launch
per layer, with so many layers that none is found in the L2 cache. Rows stand at mixed ring
positions, and all advance between replays as in decoding, so folds come at their true rate: a
figure is the mean over the steps of one cycle of L, each step the median of several passes. The
floor of a step is what its rows must move: the state once, once more where a row folds, the ring
entries that a row holds, its window's entries, inputs and outputs. `--quick` checks and measures
the main shapes, `--measure` all; `--sweep` checks and times the settings that a shape could have;
`--resident` checks and times the resident kernels beside those that serve where it cannot; `--dump`
shows for the stream kernels how the machine code orders its reads and the wait for the
weights.
"""

from __future__ import annotations

import re
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.harness import capture, main, relative, replay_us, result
from gapless.core.specs.linear import Recurrence
from gapless.ops.linear_replay import ReplayIndices, ReplayMemory, reference
from gapless.ops.linear_replay import triton as kernels
from gapless.ops.linear_replay.resident import can_reside
from gapless.ops.linear_replay.resident.window import can_reside_window
from gapless.ops.linear_replay.token_kernel import _token_kernel
from gapless.ops.linear_replay.token_stream_kernel import _token_stream_kernel
from gapless.ops.linear_replay.tuning import Launch, launch_of
from gapless.ops.linear_replay.window_stream_kernel import _window_stream_kernel
from gapless.ops.step_metadata import Geometry, SlotColumns, StepConstants, window_indices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

# bytes per second over 4 GiB on an H200: a sum, and an update in place
READ_BANDWIDTH = 4.39e12
UPDATE_BANDWIDTH = 4.23e12
# layers that rotate hold this much state together: several times the L2 cache
ROTATED_BYTES = 640 << 20
MOST_LAYERS = 128
PASSES = 5
EPS = 1e-6
DIM = 128  # K, and V of the delta rules
COMPILERS = 14

GDN, KDA, MAMBA2 = Recurrence.GATED_DELTA, Recurrence.KIMI_DELTA, Recurrence.MAMBA2
FP32, BF16 = torch.float32, torch.bfloat16
# |out - wanted| / |wanted|: rounding of the output, of d, and of a state
OUT_BOUND, D_BOUND = 3e-3, 5e-6
STATE_BOUND = {FP32: 1e-6, BF16: 3e-3}
FOLDED_TOKENS, FOLD_BOUND = 16384, 1e-6
DECODED_TOKENS, RUN_BOUND = 1024, 1e-5


@dataclass(frozen=True)
class Case:
    """A decode step of a layer, bf16 activations.

    Delta rules have 32 value heads of 128 x 128, Mamba-2 has 128 of 64 x 128 in 8 groups.
    """

    recurrence: Recurrence
    width: int = 1  # W, and W_max
    replay_len: int = 16  # L
    accepted: int = 1  # tokens of a step
    state_dtype: torch.dtype = FP32

    @property
    def value_heads(self) -> int:
        return 128 if self.recurrence is MAMBA2 else 32

    @property
    def key_heads(self) -> int:
        return {GDN: 16, KDA: 32, MAMBA2: 8}[self.recurrence]

    @property
    def value_dim(self) -> int:
        return 64 if self.recurrence is MAMBA2 else DIM

    @property
    def decay_dim(self) -> int:
        return DIM if self.recurrence is KDA else 1

    @property
    def l2norm_eps(self) -> float | None:
        return None if self.recurrence is MAMBA2 else EPS

    @property
    def kernel(self) -> str:
        if self.width > 1:
            return "window"
        return "packed" if self.replay_len == 1 else "token"

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state."""
        return self.value_heads * self.value_dim * DIM * self.state_dtype.itemsize

    @property
    def entry_bytes(self) -> int:
        """Bytes of a ring entry."""
        per_head = self.value_dim + self.decay_dim
        return 4 * self.value_heads * per_head + 2 * self.key_heads * DIM

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Bytes of a token's inputs, and of its output."""
        value_bytes = 2 * self.value_heads * self.value_dim
        num_gates = self.decay_dim + (self.recurrence is not MAMBA2)
        gate_bytes = 4 * self.value_heads * num_gates
        return 4 * self.key_heads * DIM + value_bytes + gate_bytes, value_bytes

    def launch(self, rows: int) -> Launch:
        """Return the pinned settings."""
        num_replayed = self.replay_len - 1 + self.width
        return launch_of(self.width, num_replayed, rows=rows, recurrence=self.recurrence)

    def __str__(self) -> str:
        state = str(self.state_dtype).removeprefix("torch.")
        tokens = f"W={self.width}" + (f" accept {self.accepted}" if self.width > 1 else "")
        return f"{self.recurrence.name.lower()} {tokens} L={self.replay_len} {state}"


@dataclass(frozen=True)
class Inputs:
    """A window's tensors; q, k and v are views of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor

    @classmethod
    def draw(cls, case: Case, rows: int, device: torch.device) -> Inputs:
        """Draw inputs with decays from 0.001 to 3."""
        heads = case.value_heads
        key_size, value_size = case.key_heads * DIM, heads * case.value_dim
        lead = (rows, case.width)
        mixed = torch.randn(*lead, 2 * key_size + value_size, device=device)
        if case.l2norm_eps is None:
            mixed *= DIM**-0.5  # keys of about unit length
        q, k, v = mixed.to(BF16).split([key_size, key_size, value_size], dim=-1)
        decay = torch.randn(*lead, heads, case.decay_dim, device=device)
        return cls(
            q.unflatten(-1, (-1, DIM)),
            k.unflatten(-1, (-1, DIM)),
            v.unflatten(-1, (heads, -1)),
            None
            if case.recurrence is MAMBA2
            else torch.randn(*lead, heads, device=device).sigmoid(),
            -torch.exp(1.5 * decay - 2.5),
        )

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.beta, self.log_decay

    @property
    def exact(self) -> tuple[Tensor | None, ...]:
        """The same in float64."""
        return tuple(None if x is None else x.double() for x in self.args)


class Decoding:
    """Rows that decode at mixed ring positions; `indices` are those of the next step."""

    def __init__(self, case: Case, rows: int, device: torch.device, *, padded: int = 0) -> None:
        self.case, self.rows = case, rows
        grid = case.replay_len
        self.geometry = Geometry(
            num_slots=rows,
            num_pages=1,
            page_size=1 << 20,
            num_state_rows=rows,
            replay_len=grid,
            ring_len=grid + 2 * case.width,
            conv_width=4,
            conv_ring_len=3 + case.width,
            max_window=case.width,
        )
        row = torch.arange(rows + 1, device=device)
        is_real = row < rows
        checkpoint_len = grid * (2 + row % 3) * is_real
        self.columns = SlotColumns(
            seq_lens=checkpoint_len + row * 7 % grid * is_real,
            checkpoint_len=checkpoint_len,
            state_rows=row,
            done=~is_real,
            page_table=torch.zeros(rows + 1, 1, dtype=torch.int64, device=device),
            window_tokens=torch.zeros(rows + 1, case.width, dtype=torch.int64, device=device),
        )
        self.constants = StepConstants(self.geometry, device)
        self.slots = torch.cat([row[:rows], row[rows:].expand(padded)])
        self.indices = self._plan().replay

    def _plan(self) -> Any:
        plan = window_indices(
            self.slots, self.columns, self.geometry, self.constants, window=self.case.width
        )
        self.fold_len = plan.fold_len
        return plan

    def advance(self) -> None:
        """Commit the accepted tokens, and put the next step's indices in place."""
        slots, real = self.slots[: self.rows], slice(self.rows)
        self.columns.checkpoint_len[slots] = self.fold_len[real]
        self.columns.seq_lens[slots] += self.case.accepted
        for name, tensor in vars(self._plan().replay).items():
            getattr(self.indices, name).copy_(tensor)

    def memory(self) -> ReplayMemory:
        """Return fresh memory of a layer: random, but for the zero row and the zero entry."""
        case, geometry, device = self.case, self.geometry, self.slots.device
        entries = geometry.ring_zero + 1
        heads, dim = case.value_heads, case.value_dim
        checkpoint = torch.empty(
            self.rows + 2, heads, dim, DIM, dtype=case.state_dtype, device=device
        )
        key_size = 1.0 if case.l2norm_eps else DIM**-0.5
        rings = (
            torch.randn(entries, heads, dim, device=device),
            (key_size * torch.randn(entries, case.key_heads, DIM, device=device)).to(BF16),
            -torch.exp(torch.randn(entries, heads, case.decay_dim, device=device) - 2.5),
        )
        for ring in rings:
            ring[-1] = 0
        checkpoint.normal_(std=0.3)
        checkpoint[geometry.zero_row] = 0
        return ReplayMemory(checkpoint, *rings)

    def poison(self, memory: ReplayMemory) -> None:
        """Put NaN wherever the step must not read."""
        unread = torch.ones(memory.d_ring.shape[0], dtype=torch.bool, device=self.slots.device)
        unread[self.indices.ring_read] = False
        unread[-1] = False
        for ring in (memory.d_ring, memory.k_ring, memory.g_ring):
            ring[unread] = float("nan")
        memory.checkpoint[self.geometry.null_row] = float("nan")

    def bytes_moved(self) -> tuple[float, float]:
        """Return the bytes that the next step must read, and write, of one layer."""
        case = self.case
        committed = (self.columns.seq_lens - self.columns.checkpoint_len).sum().item()
        num_folds = int(self.indices.fold_mask.any(1).sum())
        inputs, output = case.token_bytes
        tokens = self.rows * case.width
        read = self.rows * case.state_bytes + committed * case.entry_bytes + tokens * inputs
        write = num_folds * case.state_bytes + tokens * (case.entry_bytes + output)
        return read, write


def call(
    case: Case,
    inputs: Inputs,
    memory: ReplayMemory,
    indices: ReplayIndices,
    launch: Launch | None = None,
) -> Tensor:
    """Call the kernels."""
    return kernels.replay_window(
        *inputs.args,
        memory,
        indices,
        recurrence=case.recurrence,
        l2norm_eps=case.l2norm_eps,
        scale=DIM**-0.5,
        launch=launch,
    )


def call_definition(
    case: Case, inputs: Inputs, memory: ReplayMemory, indices: ReplayIndices
) -> Tensor:
    """Call the definition in float64."""
    return reference.replay_window(
        *inputs.exact,
        memory,
        indices,
        recurrence=case.recurrence,
        l2norm_eps=case.l2norm_eps,
        scale=DIM**-0.5,
    )


CHECKED = [
    Case(recurrence, width, replay_len, accepted=width, state_dtype=dtype)
    for recurrence, (width, replay_len), dtype in product(
        (GDN, KDA, MAMBA2), ((1, 1), (1, 16), (4, 16)), (FP32, BF16)
    )
] + [Case(GDN, 2, 1), Case(KDA, 3, 5), Case(GDN, 16, 16), Case(KDA, 8, 16), Case(MAMBA2, 8, 16)]
SIZES = (1, 8, 64)  # one for each row bucket of the settings
MEASURED_ROWS = (1, 8, 32, 64, 128, 256)


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    compile_all([(case, case.launch(rows)) for case, rows in product(CHECKED, SIZES)])
    found = []
    for case, rows in product(CHECKED, SIZES):
        found += _step_results(case, rows, device)
    for recurrence in Recurrence:
        found.append(_fold_result(recurrence, device))
        found.append(_run_result(recurrence, device))
    return found


def _step_results(
    case: Case, rows: int, device: torch.device, launch: Launch | None = None
) -> list[dict[str, Any]]:
    decoding = Decoding(case, rows, device, padded=1)
    for _ in range(3):
        decoding.advance()
    memory = decoding.memory()
    decoding.poison(memory)
    inputs = Inputs.draw(case, rows + 1, device)
    for x in inputs.args:
        if x is not None:
            x[rows:] = float("nan")
    exact = ReplayMemory(*(x.double() for x in vars(memory).values()))
    wanted = call_definition(case, inputs, exact, decoding.indices)
    before = memory.checkpoint.clone()
    indices = decoding.indices
    out = call(case, inputs, memory, indices, launch)
    written = indices.ring_write[:rows].flatten()
    folded = indices.fold_rows[:rows][indices.fold_mask[:rows].any(1)]
    before[folded] = memory.checkpoint[folded]
    null_row = decoding.geometry.null_row
    before[null_row] = memory.checkpoint[null_row]
    copied = _differing(memory.k_ring[written], inputs.k[:rows].flatten(0, 1))
    copied += _differing(memory.g_ring[written], inputs.log_decay[:rows].flatten(0, 1))
    d_error = relative(memory.d_ring[written], exact.d_ring[written])
    label = f"{case} B={rows}" + ("" if launch is None else f" {launch}")
    results = [
        result(f"{label} out", relative(out[:rows], wanted[:rows]), OUT_BOUND),
        result(f"{label} d", d_error, D_BOUND),
        result(f"{label} k and g", copied, 0),
        result(f"{label} other rows", _differing(before, memory.checkpoint), 0),
    ]
    if len(folded):
        error = relative(memory.checkpoint[folded], exact.checkpoint[folded])
        results.append(result(f"{label} fold", error, STATE_BOUND[case.state_dtype]))
    return results


def _fold_result(recurrence: Recurrence, device: torch.device) -> dict[str, Any]:
    """Fold given ring entries, 16 at a time, with heads from slow to fast decay."""
    case = Case(recurrence)
    memory = Decoding(case, 1, device).memory()
    memory.checkpoint.zero_()
    state = memory.checkpoint[:1].double()
    entries = torch.arange(16, device=device)[None]
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    mask = torch.ones(1, 16, dtype=torch.bool, device=device)
    heads = case.value_heads
    rate = torch.logspace(-3, 0.5, heads, device=device)[:, None]
    group = heads // case.key_heads
    for _ in range(FOLDED_TOKENS // 16):
        memory.d_ring[:16].normal_()
        memory.k_ring[:16].normal_()
        memory.g_ring[:16] = -rate * torch.rand(16, heads, case.decay_dim, device=device)
        kernels.materialize(
            memory, entries, mask, read_rows=zero, out_rows=zero, l2norm_eps=case.l2norm_eps
        )
        g = memory.g_ring[:16].double()
        keys = memory.k_ring[:16].double()
        if case.l2norm_eps is not None:
            keys = keys * (keys.square().sum(-1, keepdim=True) + EPS).rsqrt()
        keys = keys.repeat_interleave(group, 1) * (g.sum(0) - g.cumsum(0)).exp()
        state = state * g.sum(0)[:, None].exp()
        state += torch.einsum("jhv,jhk->hvk", memory.d_ring[:16].double(), keys)
    error = relative(memory.checkpoint[:1], state)
    return result(f"{recurrence.name.lower()} fold of {FOLDED_TOKENS} tokens", error, FOLD_BOUND)


def _run_result(recurrence: Recurrence, device: torch.device) -> dict[str, Any]:
    """Decode so many tokens that read-outs, folds and the ring's turns have all added up."""
    case = Case(recurrence)
    decoding = Decoding(case, 1, device)
    memory = decoding.memory()
    exact = ReplayMemory(*(x.double() for x in vars(memory).values()))
    for _ in range(DECODED_TOKENS):
        inputs = Inputs.draw(case, 1, device)
        call(case, inputs, memory, decoding.indices)
        call_definition(case, inputs, exact, decoding.indices)
        decoding.advance()
    error = relative(memory.checkpoint[:1], exact.checkpoint[:1])
    name = f"{recurrence.name.lower()} state after decoding {DECODED_TOKENS} tokens"
    return result(name, error, RUN_BOUND)


def _differing(a: Tensor, b: Tensor) -> int:
    """Count bytes that differ."""
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def compile_all(wanted: Sequence[tuple[Case, Launch]]) -> None:
    """Compile kernels in parallel processes, which leave them in Triton's cache."""
    context = get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
        list(pool.map(_compile, dict.fromkeys(wanted)))


def _compile(wanted: tuple[Case, Launch]) -> None:
    case, launch = wanted
    device = torch.device("cuda")
    decoding = Decoding(case, 1, device)
    inputs = Inputs.draw(case, 1, device)
    call(case, inputs, decoding.memory(), decoding.indices, launch)
    torch.cuda.synchronize()


class Timing:
    """One case at one batch size, ready to time under any settings."""

    def __init__(self, case: Case, rows: int, device: torch.device) -> None:
        self.case, self.rows, self.device = case, rows, device
        self.decoding = Decoding(case, rows, device)
        # rows that start without ring entries fold less often in their first cycle
        for _ in range(case.replay_len):
            self.decoding.advance()
        size = rows * case.state_bytes
        count = min(MOST_LAYERS, max(2, -(-ROTATED_BYTES // size)))
        self.layers = [self.decoding.memory() for _ in range(count)]
        self.inputs = Inputs.draw(case, rows, device)

    def us(self, launch: Launch | None = None) -> float:
        """Return microseconds per step, folds at their true rate."""
        return self._cycle(launch)[0]

    def _cycle(self, launch: Launch | None = None) -> tuple[float, float, float]:
        """Return mean microseconds per step over a cycle, and bytes read and written."""

        def run(memory: ReplayMemory) -> Tensor:
            return call(self.case, self.inputs, memory, self.decoding.indices, launch)

        graph = capture([lambda memory=memory: run(memory) for memory in self.layers])
        cycle = self.case.replay_len
        times: list[list[float]] = [[] for _ in range(cycle)]
        moved: list[tuple[float, float]] = []
        graph.replay()
        for step in range(cycle * max(PASSES, -(-20 // cycle))):
            times[step % cycle].append(replay_us(graph) / len(self.layers))
            if step < cycle:
                moved.append(self.decoding.bytes_moved())
            self.decoding.advance()
        read, write = map(statistics.fmean, zip(*moved, strict=True))
        return statistics.fmean(map(statistics.median, times)), read, write

    def kernel(self, launch: Launch | None) -> str:
        """Return which kind of kernel is timed."""
        if launch is None:
            num_replayed = self.decoding.indices.ring_read.shape[1]
            asked = can_reside if self.case.width == 1 else can_reside_window
            if asked(self.inputs.args, self.layers[0], num_replayed):
                return "resident"
        return self.case.kernel

    def row(self, launch: Launch | None = None) -> dict[str, Any]:
        """Time the pinned settings, or others."""
        us, read, write = self._cycle(launch)
        # a write goes with a read of the same size, at the rate of an update in place
        floor = (read - write) / READ_BANDWIDTH + 2 * write / UPDATE_BANDWIDTH
        return {
            "name": str(self.case),
            "kernel": self.kernel(launch),
            "B": self.rows,
            "us": us,
            "MB": (read + write) / 1e6,
            "floor_us": floor * 1e6,
            "share_of_floor": floor * 1e6 / us,
        }


# step shapes that are measured: W, L and tokens accepted
SHAPES = ((1, 16, 1), (1, 1, 1), (4, 16, 3))
# of windows that a resident kernel serves
RESIDENT_WINDOWS = ((4, 16, 3), (2, 16, 2))
# of the delta rules' other settings of windows
OTHER_WINDOWS = ((2, 16, 2), (8, 16, 5), (16, 16, 8))


def cases() -> list[Case]:
    """Return every case that is measured: replay, packed, and a window of which 3 are accepted."""
    return [
        Case(recurrence, width, replay_len, accepted, dtype)
        for recurrence, (width, replay_len, accepted), dtype in product(
            Recurrence, SHAPES, (FP32, BF16)
        )
    ]


def main_cases() -> list[Case]:
    """Return the cases of fp32 states, which choose the settings, and other windows."""
    chosen = [case for case in cases() if case.state_dtype is FP32]
    return chosen + [Case(rule, *shape) for rule, shape in product((GDN, KDA), OTHER_WINDOWS)]


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, bytes, and the floor's share."""
    return _figures(cases(), MEASURED_ROWS, device) + list(_peer_rows(device))


def quick(device: torch.device) -> list[dict[str, Any]]:
    """Check and time fp32 states at the batch sizes that are aimed for."""
    chosen, rows = main_cases(), (1, 8, 64, 128, 256)
    compile_all([(case, case.launch(size)) for case, size in product(chosen, rows)])
    torch.manual_seed(0)
    checks = [
        result
        for case, size in product(chosen, SIZES)
        for result in _step_results(case, size, device)
    ]
    wrong = [result for result in checks if not result["ok"]]
    return wrong or _figures(chosen, rows, device)


def _figures(
    wanted: Sequence[Case], rows: Sequence[int], device: torch.device
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    compile_all([(case, case.launch(size)) for case, size in product(wanted, rows)])
    return [Timing(case, size, device).row() for case, size in product(wanted, rows)]


def _peer_rows(device: torch.device) -> Iterator[dict[str, Any]]:
    """Time fla-core's recurrent kernels on the same shapes, where it is installed."""
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.kda import fused_recurrent_kda
    except ImportError:
        return
    peers = {GDN: fused_recurrent_gated_delta_rule, KDA: fused_recurrent_kda}
    for (recurrence, peer), rows in product(peers.items(), MEASURED_ROWS):
        case = Case(recurrence, replay_len=1)
        inputs = Inputs.draw(case, rows, device)
        count = min(MOST_LAYERS, max(2, -(-ROTATED_BYTES // (rows * case.state_bytes))))
        size = (rows, case.value_heads, DIM, DIM)
        states = [torch.randn(size, device=device) for _ in range(count)]
        q, k, v, beta, log_decay = (x.contiguous() for x in inputs.args)
        g = log_decay[..., 0] if recurrence is GDN else log_decay
        graph = capture(
            [
                lambda state=state, peer=peer, q=q, k=k, v=v, beta=beta, g=g: peer(
                    q, k, v, g=g, beta=beta, scale=DIM**-0.5, initial_state=state,
                    output_final_state=True, use_qk_l2norm_in_kernel=True,
                )
                for state in states
            ]
        )  # fmt: skip
        us = statistics.median(replay_us(graph) for _ in range(20)) / count
        moved = rows * (2 * case.state_bytes + sum(case.token_bytes))
        floor_us = moved / UPDATE_BANDWIDTH * 1e6
        yield {
            "name": f"fla-core {recurrence.name.lower()}", "kernel": "fused_recurrent", "B": rows,
            "us": us, "MB": moved / 1e6, "floor_us": floor_us, "share_of_floor": floor_us / us,
        }  # fmt: skip


# settings of one token: block_v, warps; and warps of the weights kernel, 0 for one launch
STREAMS = ((16, 1), (32, 1), (32, 2), (64, 4))
WEIGHTS = {GDN: (0, 1), KDA: (1, 4), MAMBA2: (0,)}


def candidates(case: Case, rows: int) -> list[Launch]:
    """Return the settings that are tried, the pinned ones first."""
    found = [case.launch(rows)]
    if case.width == 1:
        weights = (
            (0,) if case.kernel == "packed" and case.recurrence is GDN else WEIGHTS[case.recurrence]
        )
        found += [Launch(*stream, warps) for stream, warps in product(STREAMS, weights)]
    else:
        found += [Launch(bv, warps) for bv, warps in ((16, 1), (32, 1), (32, 2), (64, 2))]
        found += [Launch(16, 1, warps) for warps in (2, 4)]
        found += [Launch(16, 1, max_registers=128, heads=heads) for heads in (1, 2)]
    if case.recurrence is KDA:
        found += [replace(found[0], group=group) for group in (2, 4, 8, 16)]
    return list(dict.fromkeys(found))


def sweep(device: torch.device) -> list[dict[str, Any]]:
    """Check candidate settings and time them in each row bucket, if all are right.

    Prints the best four of each and returns all. States are fp32; bf16 ones are served with the
    same settings.
    """
    tried = {(case, rows): candidates(case, rows) for case, rows in product(main_cases(), SIZES)}
    wanted = [(case, launch) for (case, _), launches in tried.items() for launch in launches]
    wanted = list(dict.fromkeys(wanted))
    compile_all(wanted)
    torch.manual_seed(0)
    checks = [
        found for case, launch in wanted for found in _step_results(case, SIZES[1], device, launch)
    ]
    wrong = [found for found in checks if not found["ok"]]
    if wrong:
        return wrong
    found = []
    for (case, rows), launches in tried.items():
        timing = Timing(case, rows, device)
        times = {launch: timing.us(launch) for launch in launches}
        ranked = sorted(times, key=times.__getitem__)
        best = ", ".join(f"{times[x]:.2f} {tuple(asdict(x).values())}" for x in ranked[:4])
        pinned = f"{times[launches[0]]:.2f} {tuple(asdict(launches[0]).values())}"
        print(f"{case} B={rows}: {best}; pinned {pinned}", flush=True)
        found += [{"name": str(case), "B": rows, "us": times[x]} | asdict(x) for x in ranked]
    return found


def resident(device: torch.device) -> list[dict[str, Any]]:
    """Check the resident kernels, and time them beside the launches that they take the place of."""
    windows = [Case(rule, *shape) for rule, shape in product((GDN, KDA), RESIDENT_WINDOWS)]
    chosen = list(product([Case(GDN), Case(KDA), *windows], (64, 128, 256)))
    compile_all([(case, case.launch(size)) for case, size in chosen])
    torch.manual_seed(0)
    checks = [result for case, size in chosen for result in _step_results(case, size, device)]
    wrong = [result for result in checks if not result["ok"]]
    if wrong:
        return wrong
    found = []
    for case, size in chosen:
        timing = Timing(case, size, device)
        found += [timing.row(), timing.row(case.launch(size))]
    return found


def dump(device: torch.device) -> list[dict[str, Any]]:
    """Return the order of memory instructions and of the wait in the stream kernels compiled."""
    for case in cases():
        _compile((case, case.launch(64)))
    kinds = r"\b(LDG|ACQBULK|STG|LDS|STS|LDL|STL|BAR|HMMA|FFMA)\b"
    found = []
    streams = [
        compiled
        for kernel in (_token_kernel, _token_stream_kernel, _window_stream_kernel)
        for compiled in kernel.device_caches[device.index or 0][0].values()
    ]
    for compiled in streams:
        runs = [
            f"{k} x{len(list(run))}" for k, run in groupby(re.findall(kinds, compiled.asm["sass"]))
        ]
        at = next((i for i, run in enumerate(runs) if run.startswith("ACQBULK")), len(runs))
        found.append(
            {
                "name": compiled.name, "registers": compiled.n_regs, "spills": compiled.n_spills,
                "before the wait": " ".join(runs[:at]), "after": " ".join(runs[at : at + 24]),
            }
        )  # fmt: skip
    return found


RUNS = {
    "check": check,
    "dump": dump,
    "resident": resident,
    "quick": quick,
    "sweep": sweep,
    "measure": measure,
}

if __name__ == "__main__":
    raise SystemExit(main(__doc__, RUNS))
