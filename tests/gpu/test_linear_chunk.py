"""Chunked prefill on fla-core's kernels: right, from the rows and to the rows, without a sync."""

from __future__ import annotations

import pytest
import torch
import triton

from benchmarks.gpu.linear_chunk import (
    CHECKED,
    CHECKED_CUTS,
    OUT_BOUND,
    SHAPES,
    STATE_BOUND,
    Problem,
    Shape,
    last_cuts,
    relative,
)
from gapless.ops.linear_chunk import ScanRoom, kernels_lack
from gapless.runner.syncs import forbid_syncs
from tests.ops.step_recurrence import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # torch warns while fla is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DEVICE = torch.device("cuda")
SHORT = (1, 2, 3, 63, 1)


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    """A shape whose kernels are tuned."""
    found: Shape = request.param
    problem = Problem(found, (2048,), None, DEVICE)
    assert kernels_lack(torch.bfloat16, found.key_dim, 64, found.recurrence) is None
    problem.run(problem.inputs, problem.checkpoint)
    return found


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "cuts"),
    [(CHECKED, None), (CHECKED, CHECKED_CUTS), (SHORT, None), (SHORT, last_cuts(SHORT))],
    ids=["uncut", "cut", "short", "short and cut"],
)
def test_agrees_with_the_definition(
    shape: Shape,
    lengths: tuple[int, ...],
    cuts: list[list[int]] | None,
    state_dtype: torch.dtype,
) -> None:
    problem = Problem(shape, lengths, cuts, DEVICE, state_dtype=state_dtype)
    out, states = problem.errors()
    assert out <= OUT_BOUND
    assert states <= STATE_BOUND


def test_writes_its_rows_alone(shape: Shape) -> None:
    problem = Problem(shape, CHECKED, CHECKED_CUTS, DEVICE)
    checkpoint = problem.checkpoint.clone()
    problem.run(problem.inputs, checkpoint)
    assert torch.isfinite(checkpoint[problem.written]).all()
    others = [row for row in range(len(checkpoint)) if row not in problem.written]
    assert same_bits(checkpoint[others], problem.checkpoint[others])


def test_states_on_the_way_change_no_bit_of_the_rest(shape: Shape) -> None:
    torch.manual_seed(0)
    cut = Problem(shape, CHECKED, CHECKED_CUTS, DEVICE)
    cut_rows, rows = cut.checkpoint.clone(), cut.checkpoint.clone()
    wanted = cut.run(cut.inputs, cut_rows)
    cut.indices = cut._indices([[]] * len(CHECKED), [[]] * len(CHECKED))
    assert same_bits(cut.run(cut.inputs, rows), wanted)
    assert same_bits(rows[cut.final_rows], cut_rows[cut.final_rows])


def test_continues_where_a_chunk_ended(shape: Shape) -> None:
    whole = Problem(shape, (200,), None, DEVICE)
    wanted, _ = whole.wanted()
    checkpoint = whole.checkpoint.clone()
    out = []
    for begin, end, row in ((0, 128, whole.zero_row), (128, 200, 1)):
        part = Problem(shape, (end - begin,), None, DEVICE)
        part.init_rows = [row]
        part.indices = part._indices([[]], [[]])
        out.append(part.run([x[begin:end] for x in whole.inputs], checkpoint))
    assert relative(torch.cat(out), wanted) <= OUT_BOUND


def test_never_syncs_and_compiles_nothing_later(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = Problem(shape, (300, 200), last_cuts((300, 200)), DEVICE)
    warm.run(warm.inputs, warm.checkpoint)
    problems = [
        Problem(shape, lengths, cuts, DEVICE)
        for lengths, cuts in ((CHECKED, CHECKED_CUTS), ((1,), None), ((16,) * 17, None))
    ]
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **found: compiled.append(found["repr"]),
    )
    torch.cuda.synchronize()
    with forbid_syncs():
        for problem in problems:
            problem.run(problem.inputs, problem.checkpoint)
    assert not compiled


def test_padding_changes_no_bit(shape: Shape) -> None:
    """Indices padded to a room, and tokens that hold NaN after those of the segments."""
    problem = Problem(shape, CHECKED, CHECKED_CUTS, DEVICE)
    wanted_rows, rows = problem.checkpoint.clone(), problem.checkpoint.clone()
    wanted = problem.run(problem.inputs, wanted_rows)
    problem.pad(ScanRoom(sum(CHECKED) + 100, len(CHECKED) + 3, 40))
    inputs = [torch.cat([x, x.new_full((100, *x.shape[1:]), float("nan"))]) for x in problem.inputs]
    out = problem.run(inputs, rows)
    assert same_bits(out[: len(wanted)], wanted)
    assert same_bits(rows, wanted_rows)
