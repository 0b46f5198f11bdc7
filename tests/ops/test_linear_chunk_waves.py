"""Prefill in waves: the plan, the flow of states, and who is asked to run it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.core.architecture import Recurrence
from gapless.ops import linear_chunk
from gapless.ops.linear_chunk import fla, plan_waves, reference, wave_arrays, wave_indices
from gapless.ops.linear_chunk.waves import Wave, WaveIndices, run_waves
from tests.ops.step_recurrence import SCALE, Inputs, l2norm_eps, same_bits
from tests.ops.test_linear_chunk import CUTS, LENGTHS, indices_of, make_case, segments_and_cuts

if TYPE_CHECKING:
    from collections.abc import Callable

Drawn = tuple[list[int], list[list[int]]]


def rows_for(lengths: list[int], cuts: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Number final rows, then cut rows, from 100 on."""
    rows = iter(range(100, 1000))
    return [next(rows) for _ in lengths], [[next(rows) for _ in own] for own in cuts]


def indices_on_cpu(lengths: list[int], cuts: list[list[int]], chunk: int) -> WaveIndices:
    plan = plan_waves(lengths, chunk, cuts)
    final_rows, cut_rows = rows_for(lengths, cuts)
    init_rows = list(range(len(lengths)))
    arrays = wave_arrays(plan, init_rows=init_rows, final_rows=final_rows, cut_rows=cut_rows)
    return wave_indices({name: torch.from_numpy(array) for name, array in arrays.items()}, plan)


@given(segments_and_cuts(), st.sampled_from([1, 3, 16]))
def test_plan_equals_cutting_one_token_at_a_time(drawn: Drawn, chunk: int) -> None:
    lengths, cuts = drawn
    indices = indices_on_cpu(lengths, cuts, chunk)
    final_rows, cut_rows = rows_for(lengths, cuts)
    pieces_of: list[list[list[int]]] = []
    token = 0
    for length, own in zip(lengths, cuts, strict=True):
        pieces: list[list[int]] = [[]]
        for position in range(length):
            if position in own:
                pieces.append([])
            pieces[-1].append(token)
            token += 1
        pieces_of.append(pieces)
    order = sorted(range(len(lengths)), key=lambda s: -len(pieces_of[s]))
    assert indices.init_rows.tolist() == order
    num_waves = max((len(pieces) for pieces in pieces_of), default=0)
    assert len(indices.waves) == num_waves
    placed: list[int] = []
    num_pieces, num_chunks = 0, 0
    for j, wave in enumerate(indices.waves):
        running = [s for s in order if j < len(pieces_of[s])]
        assert running == order[: len(running)]
        begin = len(placed)
        starts, bounds, chunks = [], [begin], []
        for number, s in enumerate(running):
            piece = pieces_of[s][j]
            placed += piece
            starts.append(len(chunks))
            bounds.append(len(placed))
            count = -(-len(piece) // chunk)
            chunks += [[num_pieces + number, i] for i in range(count)]
        assert wave.places == slice(begin, len(placed))
        assert wave.bounds.tolist() == bounds
        assert wave.chunk_starts.tolist() == starts
        assert wave.chunks.tolist() == chunks
        assert indices.chunks[num_chunks : num_chunks + len(chunks)].tolist() == chunks
        assert indices.bounds[num_pieces : num_pieces + len(bounds)].tolist() == bounds
        assert wave.rows.tolist() == [
            final_rows[s] if j == len(pieces_of[s]) - 1 else cut_rows[s][j] for s in running
        ]
        num_pieces, num_chunks = num_pieces + len(running), num_chunks + len(chunks)
    assert sorted(placed) == list(range(token))
    assert len(indices.bounds) == num_pieces + 1
    assert len(indices.chunks) == num_chunks
    if num_waves > 1:
        assert torch.cat([wave.tokens for wave in indices.waves]).tolist() == placed
    assert (indices.gather is None) == (placed == sorted(placed))
    if indices.gather is not None:
        assert indices.gather.tolist() == placed
    at_end = [s for s, own in enumerate(cuts) if own and own[-1] == lengths[s]]
    assert indices.end_rows.tolist() == [final_rows[s] for s in at_end]
    assert indices.end_cut_rows.tolist() == [cut_rows[s][-1] for s in at_end]


@given(segments_and_cuts())
def test_kernels_get_pointers_of_one_alignment(drawn: Drawn) -> None:
    lengths, cuts = drawn
    plan = plan_waves(lengths, 16, cuts)
    rows, cut_rows = rows_for(lengths, cuts)
    arrays = wave_arrays(plan, init_rows=rows, final_rows=rows, cut_rows=cut_rows)
    for name in ("wave_bounds", "wave_chunk_starts", "piece_chunks"):
        assert arrays[name].shape[1] * arrays[name].itemsize % 16 == 0


def wave_of_reference(
    inputs: Inputs, indices: WaveIndices, recurrence: Recurrence, chunk: int
) -> Callable[[Wave, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Run a wave as a prefill of its own, by the definition."""

    def scan(wave: Wave, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = wave.bounds.diff().tolist()
        rows = list(range(len(lengths)))
        order = indices.gather
        tokens = torch.arange(len(inputs.q)) if order is None else order
        own = [None if x is None else x[tokens][wave.places] for x in inputs.args]
        after = states.clone()
        out = reference.chunk_prefill(
            *own, after, indices_of(lengths, chunk, rows, rows),
            recurrence=recurrence, l2norm_eps=l2norm_eps(recurrence), scale=SCALE,
        )  # fmt: skip
        return out, after

    return scan


@pytest.mark.parametrize("recurrence", list(Recurrence))
@pytest.mark.parametrize("cuts", [CUTS, [[] for _ in LENGTHS]], ids=["cut", "uncut"])
def test_waves_equal_the_definition(recurrence: Recurrence, cuts: list[list[int]]) -> None:
    case = make_case(recurrence)
    final_rows = [2 * s + 1 for s in range(len(LENGTHS))]
    # some cuts take over the initial rows of other segments
    cut_rows = [[13 + 8 * s + i for i in range(len(own))] for s, own in enumerate(cuts)]
    if any(cuts):
        cut_rows[2][:3] = [0, 2, 10]
    more = torch.full((50, *case.checkpoint.shape[1:]), float("nan"), dtype=torch.float64)
    checkpoint = torch.cat([case.checkpoint, more])
    indices = indices_of(LENGTHS, 16, case.init_rows, final_rows, cuts, cut_rows)
    wanted_rows, rows = checkpoint.clone(), checkpoint.clone()
    wanted = reference.chunk_prefill(
        *case.inputs.args, wanted_rows, indices,
        recurrence=recurrence, l2norm_eps=l2norm_eps(recurrence), scale=SCALE,
    )  # fmt: skip
    scan = wave_of_reference(case.inputs, indices.waves, recurrence, 16)
    out = run_waves(scan, rows, indices.waves, acc=torch.float64)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    written = [*final_rows, *(row for own in cut_rows for row in own)]
    torch.testing.assert_close(rows[written], wanted_rows[written], rtol=1e-12, atol=1e-12)
    others = [row for row in range(len(rows)) if row not in written]
    assert same_bits(rows[others], checkpoint[others])


@given(segments_and_cuts())
def test_states_flow_from_piece_to_piece(drawn: Drawn) -> None:
    lengths, cuts = drawn
    indices = indices_on_cpu(lengths, cuts, 16)
    num_tokens = sum(lengths)
    order = np.arange(num_tokens) if indices.gather is None else indices.gather.numpy()
    checkpoint = torch.full((1000, 1, 1, 1), float("nan"), dtype=torch.float64)
    checkpoint[: len(lengths), 0, 0, 0] = 1000.0 * torch.arange(len(lengths))

    def scan(wave: Wave, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # an output says which state its piece started from; a state counts its tokens
        sizes = wave.bounds.diff()
        seen = torch.repeat_interleave(states[:, 0, 0, 0], sizes)
        tokens = torch.from_numpy(order[wave.places].astype(np.float64))
        return torch.stack([seen, tokens], 1), states + sizes[:, None, None, None]

    if not lengths:
        return
    out = run_waves(scan, checkpoint, indices, acc=torch.float64)
    final_rows, cut_rows = rows_for(lengths, cuts)
    assert out[:, 1].tolist() == list(range(num_tokens))
    wanted = [
        1000.0 * s + max((cut for cut in cuts[s] if cut <= position), default=0)
        for s, length in enumerate(lengths)
        for position in range(length)
    ]
    assert out[:, 0].tolist() == wanted
    for s, (length, own) in enumerate(zip(lengths, cuts, strict=True)):
        assert checkpoint[final_rows[s]].item() == 1000 * s + length
        assert checkpoint[cut_rows[s]].flatten().tolist() == [1000 * s + cut for cut in own]


# the interpreter truncates to bfloat16, so the half type that it rounds to stands for both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("key_dim", [64, 80])
@pytest.mark.parametrize("is_gathered", [False, True])
def test_normalized_reads_views(*, dtype: torch.dtype, key_dim: int, is_gathered: bool) -> None:
    num_tokens, num_heads, eps = 21, 3, 1e-2
    size = num_heads * key_dim
    mixed = torch.randn(num_tokens, 2 * size + 8).to(dtype)
    q, k = (mixed[:, i * size : (i + 1) * size].view(-1, num_heads, key_dim) for i in range(2))
    gather = torch.randperm(num_tokens) if is_gathered else None
    found = fla.normalized(q, k, gather, eps=eps)
    for x, out in zip((q, k), found, strict=True):
        source = (x if gather is None else x[gather]).double()
        wanted = source * (source.square().sum(-1, keepdim=True) + eps).rsqrt()
        rtol = 2e-6 if dtype is torch.float32 else 2**-10
        torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=2**-24)
        assert out.dtype is dtype
        assert out.is_contiguous()


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
    indices: Any = SimpleNamespace(gather=np.zeros((1, chunk)), waves=None)
    rest: Any = (q, q, q, q, q)
    found: Any = linear_chunk.chunk_prefill(
        q, *rest, indices, recurrence=recurrence, l2norm_eps=1e-6, scale=1.0
    )
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
