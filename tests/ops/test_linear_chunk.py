"""Chunked prefill against the step-by-step recurrence; the chunk plan against its definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.specs.linear import Recurrence
from gapless.ops.linear_chunk import (
    ChunkIndices,
    RoundIndices,
    ScanRoom,
    chunk_prefill,
    plan_chunks,
    scan_arrays,
    scan_indices,
)
from tests.ops.step_recurrence import (
    KEY_DIM,
    SCALE,
    VALUE_DIM,
    VALUE_HEADS,
    Inputs,
    l2norm_eps,
    normalised,
    random_inputs,
    same_bits,
    step,
    tokens_of,
)

LENGTHS = [64, 1, 130, 2, 65, 63]
# where states are wanted on the way: nowhere, at a segment's end, side by side, on the grid, off it
CUTS = [[], [1], [1, 2, 64, 65, 129, 130], [1], [16, 30], [63]]
# segments with an initial state: one short, one of several chunks
CONTINUED = (1, 2, 5)
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """Packed segments, their checkpoint rows, and what the recurrence makes of them."""

    inputs: Inputs
    checkpoint: torch.Tensor  # row 2s: where segment s starts, 2s + 1: where it ends; zero row last
    init_rows: list[int]  # by segment
    outputs: np.ndarray  # [T, HV, V]
    after: np.ndarray  # [T, HV, V, K]: the state after each token

    @property
    def states(self) -> np.ndarray:  # [S, HV, V, K]
        """The segments' final states."""
        return self.after[np.cumsum(LENGTHS) - 1]


def make_case(recurrence: Recurrence, dtype: torch.dtype = torch.float64) -> Case:
    """Draw inputs and initial states, and run the recurrence."""
    acc = torch.promote_types(dtype, torch.float32)
    drawn = random_inputs(recurrence, sum(LENGTHS), dtype=dtype)
    inputs = normalised(drawn, l2norm_eps(recurrence))
    tokens = tokens_of(inputs, None)
    zero_row = 2 * len(LENGTHS)
    checkpoint = torch.full((zero_row + 1, VALUE_HEADS, VALUE_DIM, KEY_DIM), NAN, dtype=acc)
    checkpoint[zero_row] = 0
    init_rows = [2 * s if s in CONTINUED else zero_row for s in range(len(LENGTHS))]
    for s in CONTINUED:
        checkpoint[2 * s] = torch.randn(VALUE_HEADS, VALUE_DIM, KEY_DIM)
    outputs, after, token = [], [], 0
    for s, length in enumerate(LENGTHS):
        state = checkpoint[init_rows[s]].double().numpy()
        for _ in range(length):
            state, output = step(state, tokens, token)
            outputs.append(output)
            after.append(state)
            token += 1
    return Case(inputs, checkpoint, init_rows, np.stack(outputs), np.stack(after))


def indices_of(
    lengths: list[int],
    chunk: int,
    init_rows: list[int],
    final_rows: list[int],
    cuts: list[list[int]] | None = None,
    cut_rows: list[list[int]] | None = None,
    room: ScanRoom | None = None,
) -> ChunkIndices:
    """Plan segments; turn the plans and the rows of the segments into tensors."""
    plan = plan_chunks(lengths, chunk, cuts)
    cut_rows = cut_rows or [[] for _ in lengths]
    arrays = scan_arrays(
        lengths, chunk, init_rows=init_rows, final_rows=final_rows,
        cuts=cuts, cut_rows=cut_rows, room=room,
    )  # fmt: skip
    rows = [cut_rows[plan.order[cut.place]][cut.number] for cut in plan.cuts]
    rounds = RoundIndices(
        gather=torch.from_numpy(plan.gather),
        scatter=torch.from_numpy(plan.scatter),
        active=plan.active,
        init_rows=torch.tensor([init_rows[s] for s in plan.order]),
        final_rows=torch.tensor([final_rows[s] for s in plan.order]),
        num_cuts=plan.num_cuts,
        cut_places=torch.tensor([cut.place for cut in plan.cuts], dtype=torch.int64),
        cut_rows=torch.tensor(rows, dtype=torch.int64),
    )
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return ChunkIndices(chunk, scan_indices(tensors), rounds)


def run(case: Case, recurrence: Recurrence, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the checkpoint after a prefill."""
    final_rows = [2 * s + 1 for s in range(len(LENGTHS))]
    indices = indices_of(LENGTHS, chunk, case.init_rows, final_rows)
    checkpoint = case.checkpoint.clone()
    return call(case.inputs, checkpoint, indices, recurrence), checkpoint


def call(
    x: Inputs, checkpoint: torch.Tensor, indices: ChunkIndices, recurrence: Recurrence
) -> torch.Tensor:
    """Call the op on the tokens that the indices speak of."""
    assert indices.rounds is not None
    num_tokens = len(indices.rounds.scatter)
    return chunk_prefill(
        x.q[:num_tokens],
        x.k[:num_tokens],
        x.v[:num_tokens],
        None if x.beta is None else x.beta[:num_tokens],
        x.log_decay[:num_tokens],
        checkpoint,
        indices,
        recurrence=recurrence,
        scale=SCALE,
    )


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_agrees_with_recurrence(recurrence: Recurrence, chunk: int) -> None:
    case = make_case(recurrence)
    outputs, checkpoint = run(case, recurrence, chunk)
    assert outputs.dtype is torch.float64
    np.testing.assert_allclose(outputs.numpy(), case.outputs, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(checkpoint[1:-1:2].numpy(), case.states, rtol=1e-10, atol=1e-10)
    # initial states are read only
    assert same_bits(checkpoint[0::2], case.checkpoint[0::2])


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)], ids=str
)
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_narrow_dtypes_stay_within_rounding(
    recurrence: Recurrence, dtype: torch.dtype, rtol: float
) -> None:
    case = make_case(recurrence, dtype)
    outputs, checkpoint = run(case, recurrence, 64)
    assert outputs.dtype is dtype
    assert checkpoint.dtype is torch.float32
    np.testing.assert_allclose(outputs.double().numpy(), case.outputs, rtol=rtol, atol=2e-5)
    got = checkpoint[1:-1:2].double().numpy()
    np.testing.assert_allclose(got, case.states, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_segments_do_not_leak(recurrence: Recurrence) -> None:
    case = make_case(recurrence)
    outputs, checkpoint = run(case, recurrence, 16)
    start = LENGTHS[0] + LENGTHS[1]
    poisoned = slice(start, start + LENGTHS[2])
    for x in (case.inputs.q, case.inputs.k, case.inputs.v, case.inputs.log_decay):
        x[poisoned] = NAN
    after, checkpoint_after = run(case, recurrence, 16)
    others = np.delete(np.arange(sum(LENGTHS)), poisoned)
    assert same_bits(outputs[others], after[others])
    assert torch.isnan(after[poisoned]).all()
    rows = [2 * s + 1 for s in range(len(LENGTHS)) if s != 2]
    assert same_bits(checkpoint[rows], checkpoint_after[rows])


@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_strong_decay_stays_finite(recurrence: Recurrence) -> None:
    case = make_case(recurrence, torch.float32)
    case.inputs.log_decay.fill_(-32.0)
    outputs, checkpoint = run(case, recurrence, 64)
    assert torch.isfinite(outputs).all()
    assert torch.isfinite(checkpoint[1:-1:2]).all()


@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_row_may_start_and_end_in_place(recurrence: Recurrence) -> None:
    case = make_case(recurrence)
    _, apart = run(case, recurrence, 16)
    checkpoint = case.checkpoint.clone()
    zero_row, fresh_row, continued_row = len(checkpoint) - 1, 0, 2
    indices = indices_of(LENGTHS[:2], 16, [zero_row, continued_row], [fresh_row, continued_row])
    call(case.inputs, checkpoint, indices, recurrence)
    torch.testing.assert_close(checkpoint[continued_row], apart[3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(checkpoint[fresh_row], apart[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("recurrence", list(Recurrence))
def test_states_at_cuts(recurrence: Recurrence, chunk: int) -> None:
    case = make_case(recurrence)
    outputs, checkpoint = run(case, recurrence, chunk)
    # the cuts of segment 2, which starts from its row 4, take over the initial rows of others
    cut_rows = [[], [0], [6, 8, 13, 14, 15, 2], [10], [16, 4], [17]]
    final_rows = [2 * s + 1 for s in range(len(LENGTHS))]
    cut = torch.cat([case.checkpoint, torch.full((5, *checkpoint.shape[1:]), NAN).double()])
    indices = indices_of(LENGTHS, chunk, case.init_rows, final_rows, CUTS, cut_rows)
    torch.testing.assert_close(
        call(case.inputs, cut, indices, recurrence), outputs, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(cut[1:12:2], checkpoint[1:12:2], rtol=1e-12, atol=1e-12)
    starts = np.cumsum([0, *LENGTHS])
    for s, rows in enumerate(cut_rows):
        for position, row in zip(CUTS[s], rows, strict=True):
            wanted = case.after[starts[s] + position - 1]
            np.testing.assert_allclose(cut[row].numpy(), wanted, rtol=1e-10, atol=1e-10)


@st.composite
def segments_and_cuts(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths, and some of each segment's positions from 1 to its length."""
    lengths = draw(st.lists(st.integers(0, 40), max_size=6))
    cuts = [
        sorted(draw(st.sets(st.integers(1, length), max_size=5))) if length else []
        for length in lengths
    ]
    return lengths, cuts


@given(segments_and_cuts(), st.sampled_from([1, 3, 16, 64]))
def test_plan_equals_cutting_one_token_at_a_time(
    drawn: tuple[list[int], list[list[int]]], chunk: int
) -> None:
    lengths, cuts = drawn
    plan = plan_chunks(lengths, chunk, cuts)
    chunks_of: list[list[list[int]]] = []
    token = 0
    for length, own in zip(lengths, cuts, strict=True):
        chunks: list[list[int]] = []
        for position in range(length):
            if position in own or not chunks or len(chunks[-1]) == chunk:
                chunks.append([])
            chunks[-1].append(token)
            token += 1
        chunks_of.append(chunks)
    counts = [len(chunks) for chunks in chunks_of]
    assert plan.order == sorted(range(len(lengths)), key=lambda s: -counts[s])
    rows = [
        (j, place, chunks_of[s][j])
        for j in range(max(counts, default=0))
        for place, s in enumerate(plan.order)
        if j < counts[s]
    ]
    assert plan.active == tuple(sum(j < n for n in counts) for j in range(max(counts, default=0)))
    padded = [own + [token] * (chunk - len(own)) for _, _, own in rows]
    assert plan.gather.dtype == plan.scatter.dtype == np.int64
    np.testing.assert_array_equal(plan.gather, np.array(padded).reshape(-1, chunk))
    np.testing.assert_array_equal(plan.gather.ravel()[plan.scatter], np.arange(token))
    starts = np.cumsum([0, *lengths])
    last_of = {own[-1]: (j, place) for j, place, own in rows}
    wanted = [
        (*last_of[starts[s] + cut - 1], number)
        for s, own in enumerate(cuts)
        for number, cut in enumerate(own)
    ]
    assert plan.cuts == sorted(wanted)
    assert plan.num_cuts == tuple(
        sum(cut.round == j for cut in plan.cuts) for j in range(len(plan.active))
    )


def test_plan_of_nothing_is_empty() -> None:
    plan = plan_chunks([], 16)
    assert plan.active == plan.num_cuts == ()
    assert plan.gather.shape == (0, 16)
    assert plan.scatter.shape == (0,)
