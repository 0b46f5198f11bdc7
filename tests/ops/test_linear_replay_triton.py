"""Triton kernels of the replay window against the definition in float64 and the recurrence.

On a machine without a CUDA device they run in Triton's interpreter.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined

from gapless.core.specs.linear import Recurrence
from gapless.ops import linear_replay
from gapless.ops.draft_tree import ancestor_bits
from gapless.ops.linear_replay import ReplayIndices, ReplayMemory, reference, triton
from gapless.ops.linear_replay.tuning import Launch
from tests.ops.step_recurrence import Tokens, same_bits, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark import ParameterSet

# padded rows compute on NaN
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GDN, KDA, MAMBA2 = Recurrence.GATED_DELTA, Recurrence.KIMI_DELTA, Recurrence.MAMBA2
NAN = float("nan")
SCALE = 0.3
EPS = 1e-2  # large enough that forgetting it shows
SLOTS = 6  # then the null slot
NULL_ROW, ZERO_ROW, SPARE_ROW = SLOTS, SLOTS + 1, SLOTS + 2


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of one run."""

    recurrence: Recurrence = GDN
    width: int = 1  # W
    replay_len: int = 4  # L
    max_width: int | None = None  # W_max, W where None
    key_heads: int = 1
    value_heads: int = 2
    key_dim: int = 128
    value_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    eps: float | None = EPS
    launch: Launch | None = None
    is_tree: bool = False

    @property
    def l2norm_eps(self) -> float | None:
        """Epsilon of the recurrence."""
        return None if self.recurrence is MAMBA2 else self.eps

    @property
    def ring_len(self) -> int:
        """R."""
        return self.replay_len + 2 * (self.max_width or self.width)

    @property
    def num_replayed(self) -> int:
        """N."""
        return self.replay_len - 1 + (self.max_width or self.width)

    @property
    def decay_dim(self) -> int:
        """Kd."""
        return self.key_dim if self.recurrence is KDA else 1


@dataclass
class Inputs:
    """A window's tensors in the op's order."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor | None
    log_decay: torch.Tensor
    ancestors: torch.Tensor | None = None

    def tuple(self) -> tuple[torch.Tensor | None, ...]:
        """Return the window's values, without its tree."""
        return self.q, self.k, self.v, self.beta, self.log_decay

    def rows(self, rows: slice) -> Inputs:
        """Return those of some rows."""
        return Inputs(*(None if x is None else x[rows] for x in vars(self).values()))


def draw(shape: Shape, rows: int, generator: torch.Generator) -> Inputs:
    """Draw a window; q, k and v are views of one projection, as a layer has them."""
    key_size, value_size = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    lead = (rows, shape.width)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*lead, *size, generator=generator)

    mixed = randn(2 * key_size + value_size)
    if shape.l2norm_eps is None:
        mixed *= 0.1  # keys of about unit length
    mixed = mixed.to(shape.dtype).to(DEVICE)
    q, k, v = mixed.split([key_size, key_size, value_size], dim=-1)
    heads = shape.value_heads
    return Inputs(
        q.unflatten(-1, (shape.key_heads, -1)),
        k.unflatten(-1, (shape.key_heads, -1)),
        v.unflatten(-1, (heads, -1)),
        None if shape.recurrence is MAMBA2 else randn(heads).sigmoid().to(DEVICE),
        (-torch.exp(1.2 * randn(heads, shape.decay_dim) - 1.5)).to(DEVICE),
        ancestor_bits(draw_parents(*lead, generator)).to(DEVICE) if shape.is_tree else None,
    )


def draw_parents(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Draw trees [B, W] whose nodes descend from one of the four before them."""
    nodes = torch.arange(width)
    back = torch.randint(1, 5, (rows, width), generator=generator)
    return (nodes - back).clamp_min(0)


def fresh_memory(shape: Shape) -> ReplayMemory:
    """Return memory full of NaN but for the zero row and the zero entry."""
    entries = (SLOTS + 1) * shape.ring_len + 1
    heads, dim = shape.value_heads, shape.value_dim
    memory = ReplayMemory(
        torch.full((SLOTS + 3, heads, dim, shape.key_dim), NAN, dtype=shape.state_dtype),
        torch.full((entries, heads, dim), NAN),
        torch.full((entries, shape.key_heads, shape.key_dim), NAN, dtype=shape.dtype),
        torch.full((entries, heads, shape.decay_dim), NAN),
    )
    memory.checkpoint[ZERO_ROW] = 0
    for ring in (memory.d_ring, memory.k_ring, memory.g_ring):
        ring[-1] = 0
    return ReplayMemory(*(x.to(DEVICE) for x in tensors(memory)))


def tensors(memory: ReplayMemory) -> list[torch.Tensor]:
    """Return checkpoint, d, k and g."""
    return [memory.checkpoint, memory.d_ring, memory.k_ring, memory.g_ring]


def widened(memory: ReplayMemory) -> ReplayMemory:
    """Return a float64 copy on the CPU."""
    return ReplayMemory(*(x.double().cpu() for x in tensors(memory)))


def indices_of(
    shape: Shape, slots: list[int], seq_lens: np.ndarray, checkpoint_len: np.ndarray
) -> ReplayIndices:
    """Return the indices of a step over some slots, SLOTS being the null slot."""
    ring, on_grid = shape.ring_len, seq_lens // shape.replay_len * shape.replay_len
    replayed = checkpoint_len[:, None] + np.arange(shape.num_replayed)
    base = np.array(slots)[:, None] * ring
    zero_entry = (SLOTS + 1) * ring
    window = seq_lens[:, None] + np.arange(shape.width)
    fold_len = np.maximum(checkpoint_len, on_grid)
    fields = (
        np.where(replayed < seq_lens[:, None], base + replayed % ring, zero_entry),
        base + window % ring,
        replayed < fold_len[:, None],
        np.where(checkpoint_len > 0, slots, ZERO_ROW),
        np.where(fold_len > checkpoint_len, slots, NULL_ROW),
        np.argsort(fold_len == checkpoint_len, kind="stable"),
    )
    return ReplayIndices(*(torch.from_numpy(x).to(DEVICE) for x in fields))


def on_cpu(indices: ReplayIndices) -> ReplayIndices:
    """Return the indices for the definition."""
    return ReplayIndices(*(x.cpu() for x in vars(indices).values()))


def bounds(dtype: torch.dtype) -> dict[str, float]:
    """Return what rounding alone explains of values of order 1."""
    if dtype is torch.float32:
        return {"rtol": 1e-5, "atol": 1e-5}
    # the interpreter cuts bf16 where the device rounds
    bits = 10 if dtype is torch.float16 else 8 if DEVICE == "cuda" else 7
    return {"rtol": 2.0**-bits, "atol": 2e-5}


def assert_near(got: torch.Tensor, wanted: torch.Tensor, **tolerance: float) -> None:
    """Compare in float64."""
    torch.testing.assert_close(got.double().cpu(), wanted.double().cpu(), **tolerance)


def call(
    shape: Shape, inputs: Inputs, memory: ReplayMemory, indices: ReplayIndices
) -> torch.Tensor:
    """Call the kernel."""
    return triton.replay_window(
        *inputs.tuple(), memory, indices,
        recurrence=shape.recurrence, l2norm_eps=shape.l2norm_eps, scale=SCALE,
        ancestors=inputs.ancestors, launch=shape.launch,
    )  # fmt: skip


def call_definition(
    shape: Shape, inputs: Inputs, memory: ReplayMemory, indices: ReplayIndices
) -> torch.Tensor:
    """Call the definition in float64."""
    ancestors = inputs.ancestors
    return reference.replay_window(
        *(None if x is None else x.double().cpu() for x in inputs.tuple()),
        memory, on_cpu(indices),
        recurrence=shape.recurrence, l2norm_eps=shape.l2norm_eps, scale=SCALE,
        ancestors=None if ancestors is None else ancestors.cpu(),
    )  # fmt: skip


def check_step(shape: Shape, lengths: list[tuple[int, int]], seed: int = 0) -> None:
    """Compare one step with the definition for (checkpoint_len, seq_len) of each row.

    Two padded rows come last. All that a row must not read is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    memory = fresh_memory(shape)
    slots = [*range(len(lengths)), SLOTS, SLOTS]
    checkpoint_len, seq_lens = (np.array(x) for x in zip(*lengths, (0, 0), (0, 0), strict=True))
    indices = indices_of(shape, slots, seq_lens, checkpoint_len)
    fill_committed(shape, memory, indices, checkpoint_len, generator)
    inputs = draw(shape, len(slots), generator)
    for x in inputs.tuple():
        if x is not None:
            x[-2:] = NAN
    exact = widened(memory)
    wanted = call_definition(shape, inputs, exact, indices)
    before = [x.clone() for x in tensors(memory)]
    out = call(shape, inputs, memory, indices)

    real = len(lengths)
    assert out.dtype is shape.dtype
    assert_near(out[:real], wanted[:real], **bounds(shape.dtype))
    written = indices.ring_write[:real].flatten()
    assert_near(memory.d_ring[written], exact.d_ring[written.cpu()], **bounds(torch.float32))
    assert torch.equal(memory.k_ring[written], inputs.k[:real].flatten(0, 1))
    assert torch.equal(memory.g_ring[written], inputs.log_decay[:real].flatten(0, 1))
    rows = indices.fold_rows[indices.fold_rows != NULL_ROW]
    tolerance = bounds(shape.state_dtype)
    assert_near(memory.checkpoint[rows], exact.checkpoint[rows.cpu()], **tolerance)
    places = [torch.cat([rows, rows.new_tensor([NULL_ROW])])] + 3 * [indices.ring_write.flatten()]
    for old, tensor, touched in zip(before, tensors(memory), places, strict=True):
        old[touched] = tensor[touched]
        assert same_bits(old, tensor)


def fill_committed(
    shape: Shape,
    memory: ReplayMemory,
    indices: ReplayIndices,
    checkpoint_len: np.ndarray,
    generator: torch.Generator,
) -> None:
    """Put random checkpoints and committed ring entries where rows read them."""
    for slot in np.flatnonzero(checkpoint_len):
        state = memory.checkpoint[slot]
        state.copy_(torch.randn(state.shape, generator=generator))
    entries = indices.ring_read.unique()
    entries = entries[entries != memory.d_ring.shape[0] - 1]
    size = (len(entries),)
    for ring in (memory.d_ring, memory.k_ring):
        values = torch.randn(*size, *ring.shape[1:], generator=generator)
        ring[entries] = values.to(ring.dtype).to(DEVICE)
    decay = torch.randn(*size, *memory.g_ring.shape[1:], generator=generator)
    memory.g_ring[entries] = -torch.exp(1.2 * decay - 1.5).to(DEVICE)


def lengths_of(shape: Shape) -> list[tuple[int, int]]:
    """Return (checkpoint_len, seq_len) of rows: new, ring only, full ring, and folds.

    A fold comes as soon as a step has passed a multiple of L, by up to W tokens.
    """
    grid, most = shape.replay_len, shape.width - 1
    lengths = [(0, 0), (0, grid - 1), (2 * grid, 3 * grid - 1), (2 * grid, 3 * grid + most)]
    if grid > 1:  # a prefill ended off the grid
        lengths += [(3 * grid + grid // 2, 4 * grid - 1), (grid + grid // 2, 2 * grid + most // 2)]
    return lengths


def rotated(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Return every combination of a recurrence with the axes' values.

    Each combination of the axes stays in the short run with one recurrence, in turn; the sweep
    over the others is slow.
    """
    cases = []
    for places in product(range(len(Recurrence)), *(range(len(axis)) for axis in axes)):
        values = [axis[i] for axis, i in zip((list(Recurrence), *axes), places, strict=True)]
        marks = [pytest.mark.slow] if sum(places) % len(Recurrence) else []
        cases.append(pytest.param(*values, marks=marks))
    return cases


@pytest.mark.parametrize(
    ("recurrence", "width", "replay_len"), rotated([1, 2, 3, 4, 8, 16], [1, 4, 16])
)
def test_step_agrees_with_definition(recurrence: Recurrence, width: int, replay_len: int) -> None:
    # trees where there is room for one, but chains of each width too
    is_tree = width > 2 and replay_len != 4
    shape = Shape(recurrence, width, replay_len, value_heads=1, key_dim=64, is_tree=is_tree)
    lengths = lengths_of(shape)
    # the costly shapes keep a full ring and the furthest fold
    check_step(shape, lengths if width < 8 else lengths[2:4])


@pytest.mark.usefixtures("launches_do_nothing")
@pytest.mark.parametrize(
    ("recurrence", "width", "replay_len"),
    [(MAMBA2, 1, 1), (GDN, 1, 4), (KDA, 1, 16), (KDA, 4, 1), (GDN, 4, 16), (MAMBA2, 16, 4)],
)
def test_bytes_are_those_that_a_window_takes(
    recurrence: Recurrence, width: int, replay_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(recurrence, width, replay_len)
    memory, lengths = fresh_memory(shape), np.array([3, 3])
    indices = indices_of(shape, [0, 1], lengths, lengths // replay_len * replay_len)
    inputs = draw(shape, 2, torch.Generator().manual_seed(0))
    made: list[torch.Tensor] = []
    empty = torch.empty

    def watched(*size: Any, **kind: Any) -> torch.Tensor:
        made.append(empty(*size, **kind))
        return made[-1]

    monkeypatch.setattr(triton.torch, "empty", watched)
    out = call(shape, inputs, memory, indices)
    monkeypatch.undo()
    assert sum(x.nbytes for x in made) - out.nbytes == triton.window_bytes(
        2, width, shape.num_replayed, shape.value_heads, shape.key_dim, recurrence
    )


# in this order the short run has those that cost most with the cheaper recurrences
VARIANTS: list[dict[str, Any]] = [
    {"key_heads": 2, "value_heads": 2, "value_dim": 128},
    {"dtype": torch.float32},
    {"key_heads": 2, "value_heads": 4},
    {"key_dim": 128},
    {"dtype": torch.float16, "state_dtype": torch.bfloat16, "eps": None},
    {"key_heads": 1, "value_heads": 4},
    {"replay_len": 40},
    {"key_heads": 1, "value_heads": 3},
    {"key_dim": 256, "launch": Launch(64, 2, 4)},
    {"max_width": 5, "replay_len": 9},
    {"state_dtype": torch.bfloat16},
]


@pytest.mark.parametrize(("recurrence", "width", "change"), rotated([1, 2], VARIANTS))
def test_variants_agree_with_definition(
    recurrence: Recurrence, width: int, change: dict[str, Any]
) -> None:
    shape = replace(Shape(recurrence, width, key_dim=64), **change)
    check_step(shape, lengths_of(shape)[1:4])


# one token in one launch, and in two; programs of one value head, and of several
@pytest.mark.parametrize(
    ("width", "launch"),
    [(1, Launch(32, weights_warps=0)), *((w, Launch(32, heads=n)) for w in (1, 4) for n in (1, 2))],
)
def test_every_way_agrees_with_definition(width: int, launch: Launch) -> None:
    shape = Shape(GDN, width, 8, key_heads=2, value_heads=4, key_dim=64, launch=launch)
    check_step(shape, lengths_of(shape))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_folds_at_every_offset(recurrence: Recurrence, width: int) -> None:
    shape = Shape(recurrence, width, 5, key_dim=64, value_heads=1)
    on_grid = 2 * shape.replay_len
    check_step(
        shape,
        [
            (start, length)
            for start in range(shape.replay_len, on_grid)
            for length in range(on_grid, on_grid + width)
        ][:SLOTS],
    )


class Decode:
    """Slots that decode, with the lengths kept as the engine keeps them, and the true states."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.memory = fresh_memory(shape)
        size = (shape.value_heads, shape.value_dim, shape.key_dim)
        self.states = [[np.zeros(size)] for _ in range(3)]  # per slot, by position
        start = [0, 2 * shape.replay_len, shape.replay_len + shape.replay_len // 2]
        self.checkpoint_len = np.array(start)
        self.seq_lens = np.array(start)
        for slot, length in enumerate(start):
            if length:
                state = 0.3 * torch.randn(*size, generator=self.generator)
                self.memory.checkpoint[slot] = state
                self.states[slot] = [self.memory.checkpoint[slot].double().cpu().numpy()]

    def step(self) -> None:
        """Run one step over three slots and a padded row, compare, and accept some tokens."""
        shape = self.shape
        lengths = [np.append(x, 0) for x in (self.seq_lens, self.checkpoint_len)]
        indices = indices_of(shape, [0, 1, 2, SLOTS], *lengths)
        inputs = draw(shape, 4, self.generator)
        out = call(shape, inputs, self.memory, indices).double().cpu().numpy()
        on_grid = self.seq_lens // shape.replay_len * shape.replay_len
        self.checkpoint_len = np.maximum(self.checkpoint_len, on_grid)
        tokens = tokens_of(shape, inputs)
        for slot, states in enumerate(self.states):
            accepted = int(self.rng.integers(1, shape.width + 1))
            state = states[-1]
            for node in range(shape.width):
                state, wanted = step(state, tokens, slot, node)
                tolerance = bounds(shape.dtype)
                np.testing.assert_allclose(out[slot, node], wanted, **tolerance)
                if node < accepted:
                    states.append(state)
            self.seq_lens[slot] += accepted

    def check_states(self) -> None:
        """Materialize the first, a middle and the last position of every slot and compare."""
        shape = self.shape
        for slot, states in enumerate(self.states):
            first, last = self.checkpoint_len[slot], self.seq_lens[slot]
            for position in {first, (first + last) // 2, last}:
                places = np.arange(shape.num_replayed)
                mask = (places < position - first)[None]
                entries = slot * shape.ring_len + (first + places) % shape.ring_len
                triton.materialize(
                    self.memory,
                    torch.from_numpy(np.where(mask, entries, SLOTS * shape.ring_len)).to(DEVICE),
                    torch.from_numpy(mask).to(DEVICE),
                    read_rows=torch.tensor([slot if first else ZERO_ROW], device=DEVICE),
                    out_rows=torch.tensor([SPARE_ROW], device=DEVICE),
                    l2norm_eps=shape.l2norm_eps,
                )
                wanted = torch.from_numpy(states[position - last - 1])
                got = self.memory.checkpoint[SPARE_ROW]
                assert_near(got, wanted, **bounds(shape.state_dtype))


def tokens_of(shape: Shape, inputs: Inputs) -> Tokens:
    """Widen, normalise, scale, and repeat key heads."""
    q, k, v, beta, log_decay = (
        None if x is None else x.double().cpu().numpy() for x in inputs.tuple()
    )
    group = shape.value_heads // shape.key_heads
    if shape.l2norm_eps is not None:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + shape.l2norm_eps) for x in (q, k))
    return Tokens(
        np.repeat(q, group, -2) * SCALE, np.repeat(k, group, -2), v, beta, log_decay
    )  # fmt: skip


def run(shape: Shape, steps: int, seed: int = 0) -> None:
    """Decode some steps and compare outputs and states with the recurrence."""
    decode = Decode(shape, seed)
    for _ in range(steps):
        decode.step()
    decode.check_states()


# windows of one token with one recurrence; steps of the others are compared above
RUNS = [
    pytest.param(
        recurrence, *sizes,
        marks=() if sizes == (3, 4) or (recurrence is GDN and sizes[0] == 1) else pytest.mark.slow,
    )
    for recurrence in Recurrence
    for sizes in ((1, 1), (1, 3), (3, 1), (3, 4))
]  # fmt: skip


@pytest.mark.parametrize(("recurrence", "width", "replay_len"), RUNS)
def test_run_agrees_with_recurrence(recurrence: Recurrence, width: int, replay_len: int) -> None:
    # other settings than the pinned ones
    shape = Shape(
        recurrence, width, replay_len, value_heads=1, key_dim=64, launch=Launch(32, 2, 2)
    )  # fmt: skip
    # past two multiples of L at least
    run(shape, 1 + 2 * replay_len // (1 if width == 1 else 2))


@pytest.mark.parametrize(("width", "is_tree"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_strong_decay_stays_finite(recurrence: Recurrence, width: int, is_tree: bool) -> None:
    # exp of a positive exponent would be exp(32) and more
    shape = Shape(recurrence, width, key_dim=64, dtype=torch.float32, is_tree=is_tree)
    generator = torch.Generator().manual_seed(0)
    memory, (seq_lens, checkpoint_len) = fresh_memory(shape), (np.array([11]), np.array([8]))
    indices = indices_of(shape, [0], seq_lens, checkpoint_len)
    fill_committed(shape, memory, indices, checkpoint_len, generator)
    memory.g_ring[indices.ring_read.flatten()[:3]] = -32.0
    inputs = draw(shape, 1, generator)
    inputs.log_decay.fill_(-32.0)
    wanted = call_definition(shape, inputs, widened(memory), indices)
    assert_near(call(shape, inputs, memory, indices), wanted, **bounds(torch.float32))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    shape = Shape(key_dim=64, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    memory = fresh_memory(shape)
    checkpoint_len, seq_lens = np.array([8, 4, 0]), np.array([11, 8, 2])
    indices = indices_of(shape, [0, 1, 2], seq_lens, checkpoint_len)
    fill_committed(shape, memory, indices, checkpoint_len, generator)
    inputs = draw(shape, 3, generator)
    alone = ReplayMemory(*(x.clone() for x in tensors(memory)))
    together = call(shape, inputs, memory, indices)
    for row in range(3):
        own = {name: x[row : row + 1] for name, x in vars(indices).items()}
        one = ReplayIndices(**own | {"order": torch.zeros(1, dtype=torch.int64, device=DEVICE)})
        mine = inputs.rows(slice(row, row + 1))
        assert torch.equal(call(shape, mine, alone, one)[0], together[row])
    for together_x, alone_x in zip(tensors(memory), tensors(alone), strict=True):
        assert same_bits(together_x, alone_x)


@pytest.mark.gpu
def test_public_op_runs_the_kernel() -> None:
    shape = Shape()
    generator = torch.Generator().manual_seed(0)
    memory = fresh_memory(shape)
    checkpoint_len, seq_lens = np.array([8, 4]), np.array([11, 8])
    indices = indices_of(shape, [0, 1], seq_lens, checkpoint_len)
    fill_committed(shape, memory, indices, checkpoint_len, generator)
    inputs = draw(shape, 2, generator)
    other = ReplayMemory(*(x.clone() for x in tensors(memory)))
    out = linear_replay.replay_window(
        *inputs.tuple(), other, indices,
        recurrence=shape.recurrence, l2norm_eps=shape.eps, scale=SCALE,
    )  # fmt: skip
    assert same_bits(out, call(shape, inputs, memory, indices))
    for mine, public in zip(tensors(memory), tensors(other), strict=True):
        assert same_bits(mine, public)


def test_other_shapes_name_their_reason() -> None:
    memory = fresh_memory(Shape(key_dim=64))
    reasons = [
        triton.unsupported_window(1, 4, memory, MAMBA2, EPS),
        triton.unsupported_window(17, 20, memory, GDN, None),
        triton.unsupported_window(1, 300, memory, GDN, None),
        triton.unsupported_memory(fresh_memory(Shape(key_dim=96))),
        triton.unsupported_memory(fresh_memory(Shape(state_dtype=torch.float16))),
        triton.unsupported_memory(widened(memory)),
    ]
    words = ["Mamba-2", "17", "300", "K=96", "float16", "float64"]
    for reason, word in zip(reasons, words, strict=True):
        assert reason is not None
        assert word in reason
    assert triton.unsupported_window(16, 20, memory, KDA, None) is None


def test_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    linear_replay._log_fallback.cache_clear()
    with caplog.at_level(logging.INFO, logger="gapless"):
        for _ in range(2):
            linear_replay._log_fallback("wide heads")
    assert [record.getMessage() for record in caplog.records] == [
        "linear replay runs on torch operations: no kernel for wide heads"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_agree_with_recurrence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, key_heads = int(rng.integers(1, 17)), int(rng.integers(1, 3))
    shape = Shape(
        list(Recurrence)[rng.integers(3)],
        width,
        int(rng.integers(1, 20)),
        max_width=width + int(rng.integers(3)),
        key_heads=key_heads,
        value_heads=key_heads * int(rng.integers(1, 4)),
        key_dim=[64, 128][rng.integers(2)],
        value_dim=[64, 128][rng.integers(2)],
        dtype=[torch.float32, torch.bfloat16][rng.integers(2)],
    )
    run(shape, 6, seed)
