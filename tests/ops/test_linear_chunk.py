"""Chunked prefill against the step-by-step recurrence; the chunk plan against its definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gapless.core.architecture import Recurrence
from gapless.ops.linear_chunk import ChunkIndices, chunk_prefill, plan_chunks
from tests.ops.step_recurrence import (
    KEY_DIM,
    SCALE,
    VALUE_DIM,
    VALUE_HEADS,
    Inputs,
    l2norm_eps,
    random_inputs,
    same_bits,
    step,
    tokens_of,
)

LENGTHS = [64, 1, 130, 2, 65, 63]
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
    states: np.ndarray  # [S, HV, V, K]


def make_case(recurrence: Recurrence, dtype: torch.dtype = torch.float64) -> Case:
    """Draw inputs and initial states, and run the recurrence."""
    acc = torch.promote_types(dtype, torch.float32)
    inputs = random_inputs(recurrence, sum(LENGTHS), dtype=dtype)
    tokens = tokens_of(recurrence, inputs)
    zero_row = 2 * len(LENGTHS)
    checkpoint = torch.full((zero_row + 1, VALUE_HEADS, VALUE_DIM, KEY_DIM), NAN, dtype=acc)
    checkpoint[zero_row] = 0
    init_rows = [2 * s if s in CONTINUED else zero_row for s in range(len(LENGTHS))]
    for s in CONTINUED:
        checkpoint[2 * s] = torch.randn(VALUE_HEADS, VALUE_DIM, KEY_DIM)
    outputs, states, token = [], [], 0
    for s, length in enumerate(LENGTHS):
        state = checkpoint[init_rows[s]].double().numpy()
        for _ in range(length):
            state, output = step(state, tokens, token)
            outputs.append(output)
            token += 1
        states.append(state)
    return Case(inputs, checkpoint, init_rows, np.stack(outputs), np.stack(states))


def run(case: Case, recurrence: Recurrence, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs and the checkpoint after a prefill."""
    plan = plan_chunks(LENGTHS, chunk)
    indices = ChunkIndices(
        torch.from_numpy(plan.gather),
        torch.from_numpy(plan.scatter),
        plan.active,
        torch.tensor([case.init_rows[s] for s in plan.order]),
        torch.tensor([2 * s + 1 for s in plan.order]),
    )
    checkpoint = case.checkpoint.clone()
    return call(case.inputs, checkpoint, indices, recurrence), checkpoint


def call(
    x: Inputs, checkpoint: torch.Tensor, indices: ChunkIndices, recurrence: Recurrence
) -> torch.Tensor:
    """Call the op on the tokens that the indices speak of."""
    num_tokens = len(indices.scatter)
    return chunk_prefill(
        x.q[:num_tokens],
        x.k[:num_tokens],
        x.v[:num_tokens],
        None if x.beta is None else x.beta[:num_tokens],
        x.log_decay[:num_tokens],
        checkpoint,
        indices,
        recurrence=recurrence,
        l2norm_eps=l2norm_eps(recurrence),
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
    plan = plan_chunks([LENGTHS[0], LENGTHS[1]], 16)
    checkpoint = case.checkpoint.clone()
    zero_row, fresh_row, continued_row = len(checkpoint) - 1, 0, 2
    init_rows, final_rows = (zero_row, continued_row), (fresh_row, continued_row)
    indices = ChunkIndices(
        torch.from_numpy(plan.gather),
        torch.from_numpy(plan.scatter),
        plan.active,
        torch.tensor([init_rows[s] for s in plan.order]),
        torch.tensor([final_rows[s] for s in plan.order]),
    )
    call(case.inputs, checkpoint, indices, recurrence)
    torch.testing.assert_close(checkpoint[continued_row], apart[3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(checkpoint[fresh_row], apart[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("lengths", [[5], [3, 0, 7, 7, 1], [16, 32, 15, 17]])
def test_plan_places_every_token_once(lengths: list[int], chunk: int) -> None:
    plan = plan_chunks(lengths, chunk)
    total = sum(lengths)
    assert [lengths[s] for s in plan.order] == sorted(lengths, reverse=True)
    assert plan.gather.dtype == plan.scatter.dtype == np.int64
    np.testing.assert_array_equal(plan.gather.ravel()[plan.scatter], np.arange(total))
    assert np.count_nonzero(plan.gather < total) == total
    starts = np.cumsum([0, *lengths])
    rows = iter(plan.gather)
    for j, num_active in enumerate(plan.active):
        for segment in plan.order[:num_active]:
            wanted = np.arange(starts[segment] + j * chunk, starts[segment + 1])[:chunk]
            row = next(rows)
            np.testing.assert_array_equal(row[: len(wanted)], wanted)
            assert (row[len(wanted) :] == total).all()
    assert next(rows, None) is None


def test_plan_of_nothing_is_empty() -> None:
    plan = plan_chunks([], 16)
    assert plan.active == ()
    assert plan.gather.shape == (0, 16)
    assert plan.scatter.shape == (0,)
