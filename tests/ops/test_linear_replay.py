"""Window read-out, fold and materialize against the step-by-step recurrence, over whole runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from gapless.core.specs.linear import Recurrence
from gapless.ops.draft_tree import ancestor_bits
from gapless.ops.linear_replay import ReplayIndices, ReplayMemory, materialize, replay_window
from tests.ops.step_recurrence import (
    KEY_DIM,
    KEY_HEADS,
    SCALE,
    VALUE_DIM,
    VALUE_HEADS,
    Inputs,
    Tokens,
    decay_dim,
    l2norm_eps,
    random_inputs,
    same_bits,
    step,
    tokens_of,
    zero_state,
)

SLOTS = 4  # the last is never in a batch
BATCH = [2, 0, 1]
NAN = float("nan")
TOLERANCE = {torch.float64: (1e-11, 1e-11), torch.float32: (2e-5, 2e-5)}
# float32 arithmetic on exactly read bf16 inputs: what is left is the rounding of the output
TOLERANCE[torch.bfloat16] = (2**-8, 2e-5)


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of one run."""

    recurrence: Recurrence
    width: int  # W
    replay_len: int  # L
    is_tree: bool = False
    dtype: torch.dtype = torch.float64
    state_dtype: torch.dtype | None = None
    ring_len: int | None = None

    @property
    def acc(self) -> torch.dtype:
        """Accumulation dtype."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def ring(self) -> int:
        """R."""
        return self.ring_len or self.replay_len + 2 * self.width


class Run:
    """Slots that prefill and then decode, with the lengths kept as the engine keeps them.

    Checkpoint rows 0..SLOTS-1 belong to the slots, then the null row, the zero row, a spare row.
    Ring entries: slot * R + position % R, the null slot last, then the zero entry.
    """

    null_row, zero_row, spare_row = SLOTS, SLOTS + 1, SLOTS + 2

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        entries = (SLOTS + 1) * shape.ring + 1
        self.zero_entry = entries - 1
        acc, kd = shape.acc, decay_dim(shape.recurrence)
        state_dtype = shape.state_dtype or acc
        heads = (VALUE_HEADS, VALUE_DIM, KEY_DIM)
        self.memory = ReplayMemory(
            torch.full((SLOTS + 3, *heads), NAN, dtype=state_dtype),
            torch.full((entries, VALUE_HEADS, VALUE_DIM), NAN, dtype=acc),
            torch.full((entries, KEY_HEADS, KEY_DIM), NAN, dtype=shape.dtype),
            torch.full((entries, VALUE_HEADS, kd), NAN, dtype=acc),
        )
        self.memory.checkpoint[self.zero_row] = 0
        for ring in (self.memory.d_ring, self.memory.k_ring, self.memory.g_ring):
            ring[self.zero_entry] = 0
        self.seq_lens = np.zeros(SLOTS, dtype=np.int64)
        self.checkpoint_len = np.zeros(SLOTS, dtype=np.int64)
        self.states = [[zero_state()] for _ in range(SLOTS)]  # by position

    def prefill(self, slot: int, num_tokens: int) -> None:
        """Put a slot where a prefill of so many tokens leaves it: all in its checkpoint."""
        inputs = random_inputs(
            self.shape.recurrence, num_tokens, dtype=self.shape.dtype, generator=self.generator
        )
        tokens = tokens_of(inputs, l2norm_eps(self.shape.recurrence))
        for i in range(num_tokens):
            state, _ = step(self.states[slot][-1], tokens, i)
            self.states[slot].append(state)
        if num_tokens:
            self.memory.checkpoint[slot] = torch.from_numpy(self.states[slot][-1])
        self.seq_lens[slot] = self.checkpoint_len[slot] = num_tokens

    def fold_len(self) -> np.ndarray:
        """Return where each slot's checkpoint will be after the next step."""
        grid = self.shape.replay_len
        return np.maximum(self.checkpoint_len, self.seq_lens // grid * grid)

    def ring_read(self, slots: list[int]) -> np.ndarray:  # [B, N]
        """Return the entries of the committed positions from the checkpoint on."""
        places = np.arange(self.shape.replay_len - 1 + self.shape.width)
        positions = self.checkpoint_len[slots][:, None] + places
        entries = np.array(slots)[:, None] * self.shape.ring + positions % self.shape.ring
        return np.where(positions < self.seq_lens[slots][:, None], entries, self.zero_entry)

    def indices(self) -> ReplayIndices:
        """Return the indices of a step over BATCH and one padded row, that one last."""
        ring, width = self.shape.ring, self.shape.width
        read = self.ring_read(BATCH)
        in_window = self.seq_lens[BATCH][:, None] + np.arange(width)
        write = np.array(BATCH)[:, None] * ring + in_window % ring
        ahead = (self.fold_len() - self.checkpoint_len)[BATCH]
        fold_mask = np.arange(read.shape[1]) < ahead[:, None]
        read_rows = np.where(self.checkpoint_len[BATCH] > 0, BATCH, self.zero_row)
        fold_rows = np.where(ahead > 0, BATCH, self.null_row)
        padded = np.arange(width) % ring + SLOTS * ring
        return ReplayIndices(
            torch.from_numpy(np.vstack([read, np.full_like(read[:1], self.zero_entry)])),
            torch.from_numpy(np.vstack([write, padded])),
            torch.from_numpy(np.vstack([fold_mask, np.zeros_like(fold_mask[:1])])),
            torch.from_numpy(np.append(read_rows, self.null_row)),
            torch.from_numpy(np.append(fold_rows, self.null_row)),
            torch.arange(len(BATCH) + 1),
        )

    def parents(self) -> np.ndarray:  # [B, W], -1 at the root
        """Draw a tree per row, or the chain."""
        width = self.shape.width
        parents = np.tile(np.arange(-1, width - 1), (len(BATCH), 1))
        if self.shape.is_tree:
            for row in parents:
                row[1:] = [self.rng.integers(max(0, i - 4), i) for i in range(1, width)]
        return parents

    def step(self) -> None:
        """Run one step, compare every output and every untouched bit, and accept some tokens."""
        shape = self.shape
        parents, indices = self.parents(), self.indices()
        inputs = random_inputs(
            shape.recurrence,
            len(BATCH) + 1,
            shape.width,
            dtype=shape.dtype,
            generator=self.generator,
        )
        for x in (inputs.q, inputs.k, inputs.v):
            x[-1] = NAN
        before = [x.clone() for x in self.tensors()]
        out = self.call(inputs, indices, ancestors_of(parents) if shape.is_tree else None)
        self.check_untouched(before, indices)
        fold_len = self.fold_len()
        tokens = tokens_of(inputs, l2norm_eps(shape.recurrence))
        for row, slot in enumerate(BATCH):
            states, wanted = self.expected(slot, tokens, row, parents[row])
            rtol, atol = TOLERANCE[shape.dtype]
            if shape.state_dtype is torch.bfloat16:
                atol = 0.03
            np.testing.assert_allclose(out[row].double().numpy(), wanted, rtol=rtol, atol=atol)
            path = self.accepted_path(parents[row])
            self.move(slot, path)
            self.states[slot] += [states[node] for node in path]
            self.checkpoint_len[slot] = fold_len[slot]
            self.seq_lens[slot] += len(path)

    def call(
        self, inputs: Inputs, indices: ReplayIndices, ancestors: torch.Tensor | None
    ) -> torch.Tensor:
        """Call the op."""
        return replay_window(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.beta,
            inputs.log_decay,
            self.memory,
            indices,
            recurrence=self.shape.recurrence,
            l2norm_eps=l2norm_eps(self.shape.recurrence),
            scale=SCALE,
            ancestors=ancestors,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Return checkpoint and rings."""
        return [getattr(self.memory, field.name) for field in fields(self.memory)]

    def check_untouched(self, before: list[torch.Tensor], indices: ReplayIndices) -> None:
        """Assert that only the rows and entries named for writing have changed."""
        written = [indices.fold_rows] + 3 * [indices.ring_write.flatten()]
        for old, tensor, places in zip(before, self.tensors(), written, strict=True):
            old[places] = tensor[places]
            assert same_bits(old, tensor)

    def expected(
        self, slot: int, tokens: Tokens, row: int, parents: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return every node's state, and the outputs [W, HV, V]."""
        states: list[np.ndarray] = []
        outputs: list[np.ndarray] = []
        for node, parent in enumerate(parents):
            start = self.states[slot][-1] if parent < 0 else states[parent]
            state, output = step(start, tokens, row, node)
            states.append(state)
            outputs.append(output)
        return states, np.stack(outputs)

    def accepted_path(self, parents: np.ndarray) -> list[int]:
        """Draw a node to accept; return its path from the root."""
        path = [int(self.rng.integers(len(parents)))]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        return path

    def move(self, slot: int, path: list[int]) -> None:
        """Bring the path's ring entries to consecutive positions: load all, then store."""
        ring, start = self.shape.ring, self.seq_lens[slot]
        source = slot * ring + (start + np.array(path)) % ring
        target = slot * ring + (start + np.arange(len(path))) % ring
        for tensor in self.tensors()[1:]:
            tensor[target] = tensor[source]

    def check_states(self) -> None:
        """Materialize every reachable position of every slot and compare."""
        for slot in BATCH:
            for position in range(self.checkpoint_len[slot], self.seq_lens[slot] + 1):
                self.check_state(slot, position)

    def check_state(self, slot: int, position: int) -> None:
        """Materialize one position into the spare row; entries outside the prefix are NaN."""
        checkpoint_len = int(self.checkpoint_len[slot])
        places = np.arange(self.shape.replay_len - 1 + self.shape.width)
        mask = (places < position - checkpoint_len)[None]
        null_entry = SLOTS * self.shape.ring
        self.memory.k_ring[null_entry] = NAN
        materialize(
            self.memory,
            torch.from_numpy(np.where(mask, self.ring_read([slot]), null_entry)),
            torch.from_numpy(mask),
            read_rows=torch.tensor([slot if checkpoint_len else self.zero_row]),
            out_rows=torch.tensor([self.spare_row]),
            l2norm_eps=l2norm_eps(self.shape.recurrence),
        )
        rtol, atol = TOLERANCE[self.shape.acc]
        if self.shape.state_dtype is torch.bfloat16:
            rtol, atol = 2**-6, 0.03
        got = self.memory.checkpoint[self.spare_row].double().numpy()
        np.testing.assert_allclose(got, self.states[slot][position], rtol=rtol, atol=atol)


def ancestors_of(parents: np.ndarray) -> torch.Tensor:
    """Return bits [B + 1, W] for B rows of parents; the padded row is a chain."""
    chain = np.arange(-1, parents.shape[1] - 1)
    return ancestor_bits(torch.from_numpy(np.vstack([parents, chain])))


def run(shape: Shape) -> None:
    """Prefill three slots (empty, on the grid, off the grid), then decode.

    Each slot passes three multiples of L, and all of its ring.
    """
    engine = Run(shape)
    engine.prefill(1, 2 * shape.replay_len)
    engine.prefill(2, 2 * shape.replay_len + max(1, shape.replay_len // 2))
    engine.check_states()
    wanted = engine.seq_lens[BATCH] + max(3 * shape.replay_len, shape.ring) + 1
    while (engine.seq_lens[BATCH] < wanted).any():
        engine.step()
    engine.check_states()


@pytest.mark.parametrize("replay_len", [1, 4, pytest.param(8, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_chain_agrees_with_recurrence(recurrence: Recurrence, width: int, replay_len: int) -> None:
    run(Shape(recurrence, width, replay_len))


@pytest.mark.parametrize("replay_len", [1, 4, pytest.param(8, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("width", [2, 3, 4, 5, 9, 16])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_tree_agrees_with_recurrence(recurrence: Recurrence, width: int, replay_len: int) -> None:
    run(Shape(recurrence, width, replay_len, is_tree=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "is_tree"), [(1, False), (4, False), (5, True)])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_narrow_dtypes_stay_within_rounding(
    recurrence: Recurrence, width: int, is_tree: bool, dtype: torch.dtype
) -> None:
    run(Shape(recurrence, width, 16, is_tree, dtype))


@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_bf16_state_stays_bounded(recurrence: Recurrence) -> None:
    run(Shape(recurrence, 3, 8, dtype=torch.bfloat16, state_dtype=torch.bfloat16))


@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_ring_shorter_than_reads_and_window_fails(recurrence: Recurrence) -> None:
    # a window then lands on committed entries that no step has folded
    with pytest.raises(AssertionError):
        run(Shape(recurrence, 3, 8, ring_len=8))


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_strong_decay_stays_finite(recurrence: Recurrence, is_tree: bool) -> None:
    # exp of an unmasked exponent would be exp(96), which float32 does not hold
    shape = Shape(recurrence, 4, 4, is_tree, torch.float32)
    engine = Run(shape)
    inputs = random_inputs(recurrence, len(BATCH) + 1, 4, dtype=torch.float32)
    inputs.log_decay.fill_(-32.0)
    parents = engine.parents()
    out = engine.call(inputs, engine.indices(), ancestors_of(parents) if is_tree else None)
    tokens = tokens_of(inputs, l2norm_eps(recurrence))
    for row, slot in enumerate(BATCH):
        _, wanted = engine.expected(slot, tokens, row, parents[row])
        np.testing.assert_allclose(out[row].numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_float64_is_float64_throughout(recurrence: Recurrence, width: int) -> None:
    shape = Shape(recurrence, width, 4)
    engine = Run(shape)
    inputs = random_inputs(recurrence, len(BATCH) + 1, width)
    assert engine.call(inputs, engine.indices(), None).dtype is torch.float64
