"""Prefill on kernels: the plan, the scan of states on their rows, and who is asked to run it."""

from __future__ import annotations

import logging
import sys
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.specs.linear import Recurrence
from gapless.ops import linear_chunk
from gapless.ops.linear_chunk import ScanRoom, fla, reference, scan_arrays
from tests.ops.fla_stand_ins import STAND_INS
from tests.ops.step_recurrence import SCALE, same_bits
from tests.ops.test_linear_chunk import CUTS, LENGTHS, indices_of, make_case, segments_and_cuts

Drawn = tuple[list[int], list[list[int]]]
# two cases that differ in everything, and all others
UNCUT: list[list[int]] = [[] for _ in LENGTHS]
FAST = [(Recurrence.GATED_DELTA, CUTS, None), (Recurrence.KIMI_DELTA, UNCUT, 7)]
SCANS = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in product(
        (Recurrence.GATED_DELTA, Recurrence.KIMI_DELTA), (CUTS, UNCUT), (None, 0, 7)
    )
]


def arrays_of(
    lengths: list[int], cuts: list[list[int]], chunk: int, room: ScanRoom | None = None
) -> dict[str, np.ndarray]:
    """Number initial rows from 0 on, final rows, then cut rows, from 100 on."""
    rows = iter(range(100, 1000))
    final_rows, cut_rows = [next(rows) for _ in lengths], [[next(rows) for _ in c] for c in cuts]
    return scan_arrays(
        lengths, chunk, init_rows=range(len(lengths)), final_rows=final_rows,
        cuts=cuts, cut_rows=cut_rows, room=room,
    )  # fmt: skip


@given(segments_and_cuts(), st.sampled_from([1, 3, 16]))
def test_plan_equals_counting_one_token_at_a_time(drawn: Drawn, chunk: int) -> None:
    lengths, cuts = drawn
    found = {name: array.tolist() for name, array in arrays_of(lengths, cuts, chunk).items()}
    rows = iter(range(100, 1000))
    final_rows = [next(rows) for _ in lengths]
    bounds, chunks, firsts, first_stops, stops = [0], [], [], [0], []
    for s, (length, own) in enumerate(zip(lengths, cuts, strict=True)):
        firsts.append(len(chunks))
        for position in range(length):
            if position % chunk == 0:
                chunks.append([s, position // chunk])
            if position + 1 in own:
                stops.append((position + 1, next(rows)))
        stops.append((length, final_rows[s]))
        bounds.append(bounds[-1] + length)
        first_stops.append(len(stops))
    assert found == {
        "scan_bounds": bounds,
        "scan_chunks": chunks,
        "scan_firsts": firsts,
        "scan_init_rows": list(range(len(lengths))),
        "first_stops": first_stops,
        "stop_tokens": [token for token, _ in stops],
        "stop_rows": [row for _, row in stops],
    }


@given(segments_and_cuts(), st.sampled_from([1, 3, 16]), st.integers(0, 9))
def test_padding_changes_shapes_alone(drawn: Drawn, chunk: int, spare: int) -> None:
    lengths, cuts = drawn
    exact = arrays_of(lengths, cuts, chunk)
    room = ScanRoom(256 + spare, len(lengths) + spare, sum(map(len, cuts)) + spare)
    padded, empty = arrays_of(lengths, cuts, chunk, room), arrays_of([], [], chunk, room)
    assert {n: a.shape for n, a in padded.items()} == {n: a.shape for n, a in empty.items()}
    for name, array in exact.items():
        assert padded[name].dtype == array.dtype == np.int64
        assert padded[name][: len(array)].tolist() == array.tolist()
    bounds = padded["scan_bounds"]
    assert bounds[-1] == bounds[-2] == room.tokens, "the last segment is empty, within the tokens"
    spare_chunks = padded["scan_chunks"][len(exact["scan_chunks"]) :]
    assert (spare_chunks == [len(bounds) - 2, 0]).all()
    assert (np.diff(padded["first_stops"][len(lengths) :]) == 0).all()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the package's kernels, which need a GPU."""
    for name, functions in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("recurrence", "cuts", "spare"), SCANS)
def test_scan_equals_the_definition(
    recurrence: Recurrence, cuts: list[list[int]], spare: int | None
) -> None:
    case = make_case(recurrence, torch.float32)
    final_rows = [2 * s + 1 for s in range(len(LENGTHS))]
    # segment 2 starts and ends in its row; nobody starts from those of the cuts
    final_rows[2] = 4
    cut_rows = [[13 + 8 * s + i for i in range(len(own))] for s, own in enumerate(cuts)]
    more = torch.full((50, *case.checkpoint.shape[1:]), float("nan"))
    checkpoint = torch.cat([case.checkpoint, more])
    exact = indices_of(LENGTHS, 64, case.init_rows, final_rows, cuts, cut_rows)
    wanted_rows, rows = checkpoint.clone(), checkpoint.clone()
    arguments: dict[str, Any] = {"recurrence": recurrence, "scale": SCALE}
    assert exact.rounds is not None
    wanted = reference.chunk_prefill(
        *case.inputs.args, wanted_rows, exact.rounds, **arguments
    )  # fmt: skip
    args, scan, total = case.inputs.args, exact.scan, sum(LENGTHS)
    if spare is not None:
        room = ScanRoom(total + spare, len(LENGTHS) + spare, sum(map(len, cuts)) + spare)
        scan = indices_of(LENGTHS, 64, case.init_rows, final_rows, cuts, cut_rows, room).scan
        args = tuple(_with_nan(x, spare) for x in args if x is not None)
    out = fla.chunk_prefill(*args, rows, scan, **arguments)  # type: ignore[arg-type]
    torch.testing.assert_close(out[:total], wanted, rtol=2e-5, atol=2e-5)
    written = [*final_rows, *(row for own in cut_rows for row in own)]
    torch.testing.assert_close(rows[written], wanted_rows[written], rtol=2e-5, atol=2e-5)
    others = [row for row in range(len(rows)) if row not in written]
    assert same_bits(rows[others], checkpoint[others])


def _with_nan(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([x, x.new_full((count, *x.shape[1:]), float("nan"))])


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_states_may_be_narrow() -> None:
    case = make_case(Recurrence.GATED_DELTA, torch.float32)
    final_rows = [2 * s + 1 for s in range(len(LENGTHS))]
    indices = indices_of(LENGTHS, 64, case.init_rows, final_rows)
    checkpoint = case.checkpoint.half()
    fla.chunk_prefill(
        *case.inputs.args, checkpoint, indices.scan,  # type: ignore[arg-type]
        recurrence=Recurrence.GATED_DELTA, scale=SCALE,
    )  # fmt: skip
    found = checkpoint[final_rows].double().numpy()
    np.testing.assert_allclose(found, case.states, rtol=2e-2, atol=2e-2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that a version of fla-core is installed; the choice is made afresh."""
    fla._missing.cache_clear()
    linear_chunk._log_fallback.cache_clear()

    def set_version(found: str) -> None:
        monkeypatch.setattr(fla, "version", lambda name: {"fla-core": found}[name])

    yield set_version
    fla._missing.cache_clear()
    linear_chunk._log_fallback.cache_clear()


def on_cuda(dtype: torch.dtype = torch.bfloat16, key_dim: int = 128) -> Any:
    return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(10, 2, key_dim))


def dispatch(
    monkeypatch: pytest.MonkeyPatch, q: Any, recurrence: Recurrence, chunk: int = 64
) -> str:
    """Return which implementation is called."""
    for module in (fla, reference):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "chunk_prefill", lambda *_, name=name, **__: name)
    indices: Any = SimpleNamespace(chunk=chunk, scan=None, rounds=())
    rest: Any = (q, q, q, q, q)
    found: Any = linear_chunk.chunk_prefill(q, *rest, indices, recurrence=recurrence, scale=1.0)
    return str(found)


@pytest.mark.parametrize(
    ("q", "recurrence", "chunk", "reason"),
    [
        (on_cuda(), Recurrence.GATED_DELTA, 64, None),
        (on_cuda(torch.float16), Recurrence.KIMI_DELTA, 64, None),
        (on_cuda(), Recurrence.MAMBA2, 64, "Mamba-2"),
        (on_cuda(torch.float32), Recurrence.GATED_DELTA, 64, "torch.float32"),
        (on_cuda(key_dim=512), Recurrence.GATED_DELTA, 64, "key dim 512, want at most 256"),
        (on_cuda(), Recurrence.GATED_DELTA, 16, "chunks of 16 tokens, want 64"),
        (SimpleNamespace(is_cuda=False), Recurrence.GATED_DELTA, 64, ""),
    ],
)
def test_serves_what_it_can(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    installed: Any,
    q: Any,
    recurrence: Recurrence,
    chunk: int,
    reason: str | None,
) -> None:
    installed("0.6.0")
    found = dispatch(monkeypatch, q, recurrence, chunk)
    assert found == ("fla" if reason is None else "reference")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (1 if reason else 0)
    assert all(reason in message for message in messages if reason)


@pytest.mark.parametrize("found", [None, "0.5.1", "0.7.0"])
def test_what_is_missing_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    installed: Any,
    found: str | None,
) -> None:
    if found is not None:
        installed(found)
    else:

        def missing(name: str) -> str:
            raise fla.PackageNotFoundError(name)

        monkeypatch.setattr(fla, "version", missing)
    for _ in range(3):
        assert dispatch(monkeypatch, on_cuda(), Recurrence.GATED_DELTA) == "reference"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (found or "not installed") in record.getMessage()
    assert "pip install 'gapless[cuda]'" in record.getMessage()
