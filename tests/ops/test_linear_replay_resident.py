"""The resident kernel without a GPU: its values, whichever part is ahead, and that it compiles.

It runs on the multiprocessor of `gluon.py`; on a GPU it is compared in
`tests/gpu/test_linear_replay.py`.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from gapless.ops.linear_replay import ReplayMemory, resident, triton
from gapless.ops.linear_replay.resident import kernel, window
from tests.ops.compiling import found_by
from tests.ops.gluon import Launcher
from tests.ops.test_linear_replay_triton import GDN, KDA, Shape, check_step, lengths_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.core.specs.linear import Recurrence

# shared memory of a program on sm_90, of which 1 KiB is the system's
MOST_SHARED = 227 << 10

PROGRAM = """
import json
import torch
from gapless.ops.linear_replay import ReplayIndices, ReplayMemory, resident
from tests.ops.compiling import catch_launches, stack_of

compiled = catch_launches(resident)
zeros, bf16, i64 = torch.zeros, torch.bfloat16, torch.int64
read, of_rows = zeros(64, 16, dtype=i64), zeros(64, dtype=i64)
indices = ReplayIndices(read, zeros(64, 1, dtype=i64), read > 0, of_rows, of_rows, of_rows)
for heads, channels, eps in ((16, 1, 1e-6), (16, 1, None), (32, 128, 1e-6), (32, 128, None)):
    memory = ReplayMemory(
        zeros(1, 32, 128, 128), zeros(1, 32, 128), zeros(1, heads, 128, dtype=bf16),
        zeros(1, 32, channels),
    )
    keys, values = zeros(64, 1, heads, 128, dtype=bf16), zeros(64, 1, 32, 128, dtype=bf16)
    resident.run_resident(
        (keys, keys, values, zeros(64, 1, 32), zeros(64, 1, 32, channels)), memory, indices,
        l2norm_eps=eps, scale=1.0, num_programs=132,
    )
print(json.dumps([[x.name, stack_of(x), x.metadata.shared] for x in compiled]))
"""


def check(
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 0,
    num_programs: int = 1,
    is_folding: bool = False,  # every row
    **sizes: object,
) -> None:
    """Compare a step of eight rows, folds and padded ones among them, with the definition."""
    run = partial(resident.run_resident, num_programs=num_programs)
    monkeypatch.setattr(triton, "can_reside", lambda *_: True)
    monkeypatch.setattr(triton, "run_resident", run)
    monkeypatch.setattr(kernel, "_resident_kernel", Launcher(kernel._resident_kernel, seed))
    heads = {"key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
    shape = Shape(**({"replay_len": 8} | heads | sizes))
    lengths = lengths_of(shape)
    if shape.max_width:  # windows before were wider, so what is folded is not all that there is
        lengths = [(start, length + 3) for start, length in lengths]
    if is_folding:
        lengths = [(shape.replay_len, 2 * shape.replay_len)] * len(lengths)
    check_step(shape, lengths, seed)


# a program of 32 items goes round all of its buffers, one of 2 fills none
@pytest.mark.parametrize("num_programs", [1, 3, 16])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recurrence", [GDN, KDA])
def test_a_step_is_what_the_definition_says_whichever_part_is_ahead(
    recurrence: Recurrence, seed: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, seed, num_programs, recurrence=recurrence)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recurrence", [GDN, KDA])
def test_folds_one_after_the_other(
    recurrence: Recurrence, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, seed, is_folding=True, recurrence=recurrence)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 40))
@pytest.mark.parametrize("recurrence", [GDN, KDA])
def test_many_orders_of_parts_and_copies(
    recurrence: Recurrence, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, seed, 1 + seed % 5, recurrence=recurrence)


@pytest.mark.parametrize("recurrence", [GDN, KDA])
@pytest.mark.parametrize(
    "sizes",
    [
        {"replay_len": 2},
        {"replay_len": 5},
        {"replay_len": 15},
        {"replay_len": 16},
        {"max_width": 4},
        {"eps": None},
        {"key_heads": 4},
        {"key_heads": 1},
    ],
    ids=str,
)
def test_rings_and_heads_of_other_sizes(
    sizes: dict[str, int | None], recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, recurrence=recurrence, **sizes)


@pytest.mark.timeout(300)
def test_the_kernel_compiles_and_fits() -> None:
    found = found_by(PROGRAM)
    assert [name for name, *_ in found] == ["_resident_kernel"] * 4
    for _, stack, shared in found:
        assert stack == 0, "no thread spills"
        assert shared <= MOST_SHARED


def visits(first: int, count: int) -> list[int]:
    from gapless.ops.linear_replay.resident.items import _visited

    return [_visited.fn(j, first, count) for j in range(count)]


@pytest.mark.parametrize("first", [0, 1, 5, 131])
def test_a_program_visits_each_of_its_items_once(first: int) -> None:
    for count in range(1, 130):
        assert sorted(visits(first, count)) == list(range(count))


def test_items_that_fold_are_visited_apart_and_by_programs_at_different_times() -> None:
    count, folding = 62, range(4)
    for first in (0, 7, 61):
        times = sorted(j for j, i in enumerate(visits(first, count)) if i in folding)
        assert min(after - before for before, after in pairwise(times)) >= 4
    assert len({visits(first, count).index(0) for first in range(count)}) == count


class Case:
    """What rows of Qwen3.5 bring, and which kernel is asked whether it serves them."""

    def __init__(
        self, rows: int = 64, width: int = 1, serves: Callable[..., bool] = resident.can_reside
    ) -> None:
        self.mixed = torch.zeros(rows, width, 8192, dtype=torch.bfloat16)
        self.beta: torch.Tensor | None = torch.zeros(rows, width, 32)
        self.log_decay = torch.zeros(rows, width, 32, 1)
        self.memory = ReplayMemory(
            torch.zeros(2, 32, 128, 128),
            torch.zeros(2, 32, 128),
            torch.zeros(2, 16, 128, dtype=torch.bfloat16),
            torch.zeros(2, 32, 1),
        )
        self.num_replayed = 16
        self.serves = serves

    def resides(self) -> bool:
        q, k, v = self.mixed.split([2048, 2048, 4096], dim=-1)
        vectors = (x.unflatten(-1, (-1, 128)) for x in (q, k, v))
        inputs = (*vectors, self.beta, self.log_decay)
        return self.serves(inputs, self.memory, self.num_replayed)


def test_rows_of_a_delta_rule_reside_on_a_hopper_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Case().resides()
    monkeypatch.setattr(resident, "nvidia_capability", lambda _: (9, 0))
    assert Case().resides()
    assert not Case(rows=resident.LEAST_ITEMS // 32 - 1).resides()


@pytest.mark.parametrize(
    "changed",
    [
        {"beta": None},
        {"num_replayed": 1},
        {"num_replayed": 17},
        {"log_decay": torch.zeros(64, 1, 32, 64)},
        {"mixed": torch.zeros(64, 1, 8192, dtype=torch.float16)},
        {"mixed": torch.zeros(64, 1, 8200, dtype=torch.bfloat16)[..., :8192]},
        {"mixed": torch.zeros(64, 1, 8208, dtype=torch.bfloat16)[..., 1:8193]},
    ],
    ids=[
        "no delta rule",
        "few entries",
        "many entries",
        "other channels",
        "fp16",
        "stride",
        "start",
    ],
)
def test_what_the_resident_kernel_does_not_serve(
    changed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "nvidia_capability", lambda _: (9, 0))
    case = Case()
    vars(case).update(changed)
    assert not case.resides()


@pytest.mark.parametrize("dims", [(64, 128), (128, 64)])
@pytest.mark.parametrize(
    "case", [Case(), Case(width=4, serves=window.can_reside_window)], ids=["token", "window"]
)
def test_states_of_other_sizes_or_types_do_not_reside(
    case: Case, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "nvidia_capability", lambda _: (9, 0))
    whole = torch.zeros(2, 32, 128, 128)
    for checkpoint in (torch.zeros(2, 32, *dims), whole.bfloat16()):
        case.memory = replace(case.memory, checkpoint=checkpoint)
        assert not case.resides()
    case.memory = replace(case.memory, checkpoint=whole)
    assert case.resides()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("fetch", "_fetch"),
        ("weigh", "_weigh"),
        ("weigh_channels", "_weigh_channels"),
        ("read", "_read"),
        ("window/fetch", "_fetch"),
        ("window/kernel", "_weigh"),
        ("window/read", "_read"),
    ],
)
def test_each_part_waits_once_for_the_kernels_before(file: str, name: str) -> None:
    path = Path(resident.__file__).parent / f"{file}.py"
    part = next(
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    waits = ast.unparse(part).count("gdc_wait()")
    lets_go = ast.unparse(part).count("gdc_launch_dependents()")
    assert (waits, lets_go) == (1, int(name == "_read"))
