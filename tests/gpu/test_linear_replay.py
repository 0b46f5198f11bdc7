"""The resident kernels against the definition in float64, on memory that is poisoned elsewhere."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.harness import relative
from benchmarks.gpu.linear_replay import (
    D_BOUND,
    EPS,
    OUT_BOUND,
    STATE_BOUND,
    Case,
    Decoding,
    Inputs,
    _step_results,
    call,
)
from gapless.core.specs.linear import Recurrence
from gapless.ops.linear_replay import ReplayMemory, reference, resident, triton
from gapless.ops.linear_replay.resident import window

pytestmark = pytest.mark.gpu

DELTA_RULES = (Recurrence.GATED_DELTA, Recurrence.KIMI_DELTA)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each launch of the resident kernel, which few rows take here, too."""
    monkeypatch.setattr(resident, "LEAST_ITEMS", 1)
    found: list[int] = []
    run = resident.run_resident

    def counted(inputs: tuple[torch.Tensor, ...], *args: object, **settings: object) -> object:
        found.append(len(inputs[0]))
        return run(inputs, *args, **settings)

    monkeypatch.setattr("gapless.ops.linear_replay.triton.run_resident", counted)
    return found


# 132 programs of 32 heads a row: fewer rows than programs have items on their way, and many more
@pytest.mark.parametrize("rows", [1, 8, 12, 33, 64, 131, 256])
@pytest.mark.parametrize("recurrence", DELTA_RULES)
def test_resident_rows_are_what_the_definition_says(
    recurrence: Recurrence, rows: int, launches: list[int]
) -> None:
    torch.manual_seed(rows)
    results = _step_results(Case(recurrence), rows, torch.device("cuda"))
    assert launches == [rows + 1], "with the padded row"
    assert not [found for found in results if not found["ok"]]


@pytest.mark.parametrize("replay_len", [2, 5, 9, 15])
@pytest.mark.parametrize("recurrence", DELTA_RULES)
def test_rings_of_other_lengths(
    recurrence: Recurrence, replay_len: int, launches: list[int]
) -> None:
    torch.manual_seed(replay_len)
    case = Case(recurrence, replay_len=replay_len)
    results = _step_results(case, 40, torch.device("cuda"))
    assert launches == [41]
    assert not [found for found in results if not found["ok"]]


@pytest.mark.parametrize("recurrence", DELTA_RULES)
def test_steps_repeat_to_the_bit(recurrence: Recurrence, launches: list[int]) -> None:
    """Whichever part is faster, sums are the same."""
    device = torch.device("cuda")
    case = Case(recurrence)
    decoding = Decoding(case, 100, device)
    inputs = Inputs.draw(case, 100, device)
    start = decoding.memory()
    found = []
    for _ in range(20):
        memory = type(start)(*(x.clone() for x in vars(start).values()))
        out = call(case, inputs, memory, decoding.indices)
        found.append([out, *vars(memory).values()])
    assert len(launches) == 20
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.fixture
def window_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each launch of the resident kernel of windows."""
    monkeypatch.setattr(window, "LEAST_WINDOW_ITEMS", 1)
    found: list[int] = []
    run = window.run_resident_window

    def counted(inputs: tuple[torch.Tensor, ...], *args: object, **settings: object) -> object:
        found.append(inputs[0].shape[1])
        return run(inputs, *args, **settings)

    monkeypatch.setattr("gapless.ops.linear_replay.triton.run_resident_window", counted)
    return found


@pytest.mark.parametrize("rows", [1, 12, 64, 131])
@pytest.mark.parametrize(("width", "replay_len"), [(2, 15), (3, 5), (4, 13), (4, 16)])
@pytest.mark.parametrize("recurrence", [Recurrence.GATED_DELTA, Recurrence.KIMI_DELTA])
def test_resident_windows_are_what_the_definition_says(
    recurrence: Recurrence, width: int, replay_len: int, rows: int, window_launches: list[int]
) -> None:
    torch.manual_seed(rows)
    case = Case(recurrence, width, replay_len, width)
    results = _step_results(case, rows, torch.device("cuda"))
    assert window_launches == [width]
    assert not [found for found in results if not found["ok"]]


def drawn_ancestors(rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Draw a tree for each row, [rows, width] int64: bit i of node n says that i is on its path."""
    bits = torch.ones(rows, width, dtype=torch.int64, device=device)
    for n in range(1, width):
        parent = torch.randint(n, (rows, 1), device=device)
        bits[:, n] = bits.gather(1, parent)[:, 0] | 1 << n
    return bits


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("rows", [33, 100])
@pytest.mark.parametrize("recurrence", DELTA_RULES)
def test_windows_of_rows_that_all_fold(
    recurrence: Recurrence, rows: int, is_tree: bool, window_launches: list[int]
) -> None:
    """Chains or trees, of which items one after the other fold; and steps repeat to the bit."""
    torch.manual_seed(rows)
    device = torch.device("cuda")
    case = Case(recurrence, 4, 16, 4)
    decoding = Decoding(case, rows, device)
    columns = decoding.columns
    columns.seq_lens[:rows] = columns.checkpoint_len[:rows] + 16 + torch.arange(rows).to(device) % 4
    indices = decoding._plan().replay
    assert indices.fold_mask.any(1).all()
    inputs, start = Inputs.draw(case, rows, device), decoding.memory()
    settings = {
        "recurrence": recurrence,
        "l2norm_eps": EPS,
        "scale": 1.0,
        "ancestors": drawn_ancestors(rows, 4, device) if is_tree else None,
    }
    wanted = ReplayMemory(*(x.double() for x in vars(start).values()))
    wanted_out = reference.replay_window(*inputs.exact, wanted, indices, **settings)
    found = []
    for _ in range(10):
        memory = ReplayMemory(*(x.clone() for x in vars(start).values()))
        out = triton.replay_window(*inputs.args, memory, indices, **settings)
        found.append([out, *vars(memory).values()])
    assert window_launches == [4] * 10
    out, checkpoint, d_ring = found[0][:3]
    written, folded = indices.ring_write.flatten(), indices.fold_rows
    assert relative(out, wanted_out) <= OUT_BOUND
    assert relative(d_ring[written], wanted.d_ring[written]) <= D_BOUND
    bound = STATE_BOUND[torch.float32]
    assert relative(checkpoint[folded], wanted.checkpoint[folded]) <= bound
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
