"""The resident kernel of windows without a GPU: its values, whichever part is ahead, and that it
compiles.

It runs on the multiprocessor of `gluon.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless.ops.linear_replay import ReplayIndices, ReplayMemory, resident, triton
from gapless.ops.linear_replay.resident import window
from gapless.ops.linear_replay.resident.window import kernel
from tests.ops.compiling import found_by
from tests.ops.gluon import Launcher
from tests.ops.test_linear_replay_resident import MOST_SHARED, Case
from tests.ops.test_linear_replay_triton import GDN, KDA, Shape, check_step, lengths_of

if TYPE_CHECKING:
    from gapless.core.specs.linear import Recurrence

# padded rows compute on NaN
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PROGRAM = """
import json
from itertools import product
import torch
from gapless.ops.linear_replay import ReplayIndices, ReplayMemory
from gapless.ops.linear_replay.resident import window
from tests.ops.compiling import catch_launches, stack_of

compiled = catch_launches(window)
zeros, bf16, i64 = torch.zeros, torch.bfloat16, torch.int64
of_rows = zeros(64, dtype=i64)
for decay_dim, num_replayed in product((1, 128), (16, 19)):
    read = zeros(64, num_replayed, dtype=i64)
    rings = zeros(1, 32, 128), zeros(1, 16, 128, dtype=bf16), zeros(1, 32, decay_dim)
    memory = ReplayMemory(zeros(1, 32, 128, 128), *rings)
    for width, is_tree in ((2, False), (4, False), (4, True)):
        indices = ReplayIndices(
            read, zeros(64, width, dtype=i64), read > 0, of_rows, of_rows, of_rows
        )
        mixed = zeros(64, width, 8192, dtype=bf16).split([2048, 2048, 4096], dim=-1)
        gates = zeros(64, width, 32), zeros(64, width, 32, decay_dim)
        window.run_resident_window(
            (*(x.unflatten(-1, (-1, 128)) for x in mixed), *gates), memory, indices,
            l2norm_eps=1e-6, scale=1.0, num_programs=132,
            ancestors=zeros(64, width, dtype=i64) if is_tree else None,
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
    """Compare a step of eight rows, folds and padded ones among them, with the definition.

    What is allocated is NaN at first.
    """
    run = partial(window.run_resident_window, num_programs=num_programs)
    empty = torch.empty

    def poisoned(*size: Any, **kind: Any) -> torch.Tensor:
        made = empty(*size, **kind)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(triton, "can_reside_window", lambda *_: True)
    monkeypatch.setattr(triton, "run_resident_window", run)
    launcher = Launcher(kernel._resident_window_kernel, seed)
    monkeypatch.setattr(kernel, "_resident_window_kernel", launcher)
    heads = {"key_heads": 2, "value_heads": 4, "key_dim": 128, "value_dim": 128}
    shape = Shape(**({"replay_len": 8, "width": 4} | heads | sizes))
    lengths = lengths_of(shape)
    if is_folding:
        lengths = [(shape.replay_len, 2 * shape.replay_len + i % shape.width) for i in range(6)]
    check_step(shape, lengths, seed)


# a program of 32 items goes round all of its buffers, one of 2 fills none or half of them
@pytest.mark.parametrize("num_programs", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("recurrence", [GDN, KDA])
def test_folds_of_many_steps_stay_exact(
    recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step folds 16 entries, of heads from slow to fast decay, into what the last has left."""
    launcher = Launcher(kernel._resident_window_kernel)
    monkeypatch.setattr(kernel, "_resident_window_kernel", launcher)
    torch.manual_seed(0)
    heads, key_heads, decay_dim = 4, *((2, 1) if recurrence is GDN else (4, 128))
    zeros, bf16, zero_row = torch.zeros, torch.bfloat16, torch.zeros(1, dtype=torch.int64)
    rings = zeros(25, heads, 128), zeros(25, key_heads, 128).to(bf16), zeros(25, heads, decay_dim)
    memory = ReplayMemory(zeros(1, heads, 128, 128), *rings)
    read = torch.cat([torch.arange(16), torch.full((3,), 24)])[None]
    indices = ReplayIndices(
        read, torch.arange(16, 20)[None], read < 16, zero_row, zero_row, zero_row
    )
    rate = torch.logspace(-3, 0.5, heads)[:, None]
    state = memory.checkpoint.double()
    for _ in range(8):
        for ring in rings[:2]:
            ring[:16].normal_()
        rings[2][:16] = -rate * torch.rand(16, heads, decay_dim)
        window.run_resident_window(
            (
                *(torch.randn(1, 4, key_heads, 128).to(bf16) for _ in range(2)),
                torch.randn(1, 4, heads, 128).to(bf16),
                torch.rand(1, 4, heads),
                -torch.rand(1, 4, heads, decay_dim),
            ),
            memory, indices, l2norm_eps=1e-6, scale=1.0, ancestors=None, num_programs=1,
        )  # fmt: skip
        d, keys, g = (ring[:16].double() for ring in rings)
        keys *= (keys.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        keys = keys.repeat_interleave(heads // key_heads, 1) * (g.sum(0) - g.cumsum(0)).exp()
        state = state * g.sum(0)[:, None].exp() + torch.einsum("jhv,jhk->hvk", d, keys)
    assert (memory.checkpoint - state).norm() <= 1e-6 * state.norm()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 40))
@pytest.mark.parametrize("recurrence", [GDN, KDA])
def test_many_orders_of_parts_and_copies(
    recurrence: Recurrence, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"recurrence": recurrence, "width": 2 + seed % 3}
    check(monkeypatch, seed, 1 + seed % 5, **sizes)


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("recurrence", [GDN, KDA])
def test_windows_of_every_width(
    recurrence: Recurrence, width: int, is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, recurrence=recurrence, width=width, is_tree=is_tree)


@pytest.mark.parametrize("recurrence", [GDN, KDA])
@pytest.mark.parametrize(
    "sizes",
    [
        {"replay_len": 1, "width": 2},
        {"replay_len": 5},
        {"replay_len": 13},
        {"replay_len": 16},
        {"replay_len": 20},
        {"eps": None},
        {"key_heads": 4},
        {"key_heads": 1},
    ],
    ids=str,
)
def test_rings_and_heads_of_other_sizes(
    sizes: dict[str, Any], recurrence: Recurrence, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, recurrence=recurrence, **sizes)


@pytest.mark.timeout(300)
def test_the_kernel_compiles_and_fits() -> None:
    found = found_by(PROGRAM)
    assert [name for name, *_ in found] == ["_resident_window_kernel"] * 12
    for i, (_, stack, shared) in enumerate(found):
        is_tree = i % 3 == 2
        assert is_tree or stack == 0, "no thread of a chain's spills"
        assert shared <= MOST_SHARED


WindowCase = partial(Case, width=4, serves=window.can_reside_window)


def test_rows_of_a_delta_rule_reside_on_a_hopper_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not WindowCase().resides()
    monkeypatch.setattr(resident, "nvidia_capability", lambda _: (9, 0))
    assert not WindowCase(rows=window.LEAST_WINDOW_ITEMS // 32 - 1).resides()
    assert [width for width in range(1, 9) if WindowCase(width=width).resides()] == [2, 3, 4]
    case = WindowCase()
    case.log_decay = torch.zeros(64, 4, 32, 128)
    assert case.resides()


@pytest.mark.parametrize(
    "changed",
    [
        {"beta": None},
        {"num_replayed": 24},
        {"mixed": torch.zeros(64, 4, 8192, dtype=torch.float16)},
        {"mixed": torch.zeros(64, 4, 8200, dtype=torch.bfloat16)[..., :8192]},
        {"mixed": torch.zeros(64, 4, 8208, dtype=torch.bfloat16)[..., 1:8193]},
    ],
    ids=["no delta rule", "many entries", "fp16", "stride", "start"],
)
def test_what_the_resident_kernel_does_not_serve(
    changed: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident, "nvidia_capability", lambda _: (9, 0))
    case = WindowCase()
    vars(case).update(changed)
    assert not case.resides()
