"""What a decode step may touch: padding is a no-op, done rows stay still, nothing is allocated."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from gapless import LLM, SamplingParams
from gapless.core.plan import DecodeRow, StepPlan
from gapless.layers.batch import LinearMemory
from gapless.runner import decode
from gapless.runner.graphs import StepGraph
from tests.models.driver import TeacherForced
from tests.runner.allocations import Allocations

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gapless.runner.device import Device

TOKENS = [7, 9, 11, 13, 15, 17, 19]


def of_slot(device: Device, slot: int) -> dict[str, Tensor]:
    """Everything on the device that belongs to a slot, copied."""
    geometry, columns = device.geometry, device.table.columns
    found = {f"table.{n}": c[slot] for n, c in vars(columns).items()}
    found |= {n: c[slot] for n, c in vars(device.table).items() if isinstance(c, Tensor)}
    pages = columns.page_table[slot]
    own = pages[pages != geometry.null_page]
    ring = slice(slot * geometry.ring_len, (slot + 1) * geometry.ring_len)
    conv = slice(slot * geometry.conv_ring_len, (slot + 1) * geometry.conv_ring_len)
    for i, memory in enumerate(device.memory):
        if isinstance(memory, LinearMemory):
            row = columns.state_rows[slot]
            found |= {
                f"{i}.conv": memory.conv_ring[conv], f"{i}.state": memory.replay.checkpoint[row],
                f"{i}.d": memory.replay.d_ring[ring], f"{i}.k": memory.replay.k_ring[ring],
                f"{i}.g": memory.replay.g_ring[ring],
            }  # fmt: skip
        else:
            found[f"{i}.kv"] = memory.view(-1, geometry.page_size, *memory.shape[1:])[own]
    return {name: tensor.clone() for name, tensor in found.items()}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    return {
        name
        for name, tensor in before.items()
        if not torch.equal(tensor.view(torch.uint8) if tensor.ndim else tensor,
                           after[name].view(torch.uint8) if tensor.ndim else after[name])
    }  # fmt: skip


def _started(checkpoint: Path) -> TeacherForced:
    forced = TeacherForced(checkpoint, dtype="float64", linear_replayssm_cache_len=4)
    forced.prefill((0, TOKENS[:5], 0), (1, TOKENS[:3], 0), (2, TOKENS[:6], 0))
    for step in range(4):
        forced.decode({0: 20 + step, 1: 30 + step, 2: 40 + step})
    return forced


def _decode_done(forced: TeacherForced, steps: int) -> None:
    """Decode slots 0 and 1 while slot 1 is done and the host does not know."""
    launch = forced.runner.run
    forced.device.table.columns.done[1] = True
    for step in range(steps):
        forced.device.table.window_tokens[0, 0] = 50 + step
        rows = tuple(DecodeRow(forced._requests[slot], slot) for slot in (0, 1))
        result = launch(StepPlan(0, (), rows, (), 100)).wait()
        assert result.decode_lens.tolist() == [1, 0], "a done row emits nothing"


def test_done_row_and_idle_slots_stay_bit_identical(tiny_checkpoint: Path) -> None:
    forced = _started(tiny_checkpoint)
    before = {slot: of_slot(forced.device, slot) for slot in (0, 1, 2, 3)}
    _decode_done(forced, 6)
    after = {slot: of_slot(forced.device, slot) for slot in (0, 1, 2, 3)}
    assert changed(before[0], after[0]) >= {"0.conv", "0.d", "0.state", "3.kv"}
    assert changed(before[1], after[1]) <= {"table.done"}
    assert changed(before[2], after[2]) == set()
    assert changed(before[3], after[3]) == set()


def test_planted_done_row_that_is_not_renamed_moves(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = decode.window_indices

    def not_renamed(slots: Tensor, columns: Any, *args: Any, **kwargs: Any) -> Any:
        fake = type(columns)(**{**vars(columns), "done": torch.zeros_like(columns.done)})
        return honest(slots, fake, *args, **kwargs)

    monkeypatch.setattr(decode, "window_indices", not_renamed)
    forced = _started(tiny_checkpoint)
    before = of_slot(forced.device, 1)
    with pytest.raises(AssertionError, match="a done row emits nothing"):
        _decode_done(forced, 6)
    assert changed(before, of_slot(forced.device, 1)) > {"0.d", "3.kv"}


def test_null_slot_stays_done_at_length_zero(tiny_checkpoint: Path) -> None:
    forced = _started(tiny_checkpoint)
    columns, null = forced.device.table.columns, forced.device.geometry.null_slot
    assert columns.seq_lens[null] == 0
    assert columns.checkpoint_len[null] == 0
    assert columns.done[null]
    assert columns.state_rows[null] == forced.device.geometry.null_row
    assert (columns.page_table[null] == forced.device.geometry.null_page).all()


def test_zero_entries_stay_zero(tiny_checkpoint: Path) -> None:
    forced = _started(tiny_checkpoint)
    geometry = forced.device.geometry
    for memory in forced.device.memory:
        if isinstance(memory, LinearMemory):
            assert (memory.conv_ring[geometry.conv_zero] == 0).all()
            assert (memory.replay.checkpoint[geometry.zero_row] == 0).all()
            for ring in (memory.replay.d_ring, memory.replay.k_ring, memory.replay.g_ring):
                assert (ring[geometry.ring_zero] == 0).all()


def test_poison_in_null_memory_never_reaches_a_real_row(tiny_checkpoint: Path) -> None:
    forced, clean = _started(tiny_checkpoint), _started(tiny_checkpoint)
    geometry = forced.device.geometry
    null_ring = slice(geometry.null_slot * geometry.ring_len, geometry.ring_zero)
    null_conv = slice(geometry.null_slot * geometry.conv_ring_len, geometry.conv_zero)
    for memory in forced.device.memory:
        if isinstance(memory, LinearMemory):
            memory.conv_ring[null_conv] = float("nan")
            memory.replay.checkpoint[geometry.null_row] = float("nan")
            memory.replay.d_ring[null_ring] = float("nan")
            memory.replay.k_ring[null_ring] = float("nan")
        else:
            memory[geometry.null_page * geometry.page_size :] = float("nan")
    for step in range(3):  # three rows are padded to four
        for each in (forced, clean):
            each.decode({0: 60 + step, 1: 70 + step, 2: 80 + step})
    for slot in (0, 1, 2):
        assert torch.equal(forced.all_logits(slot), clean.all_logits(slot))
        assert forced.all_logits(slot).isfinite().all()


def _num_storages() -> int:
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return len({t.untyped_storage().data_ptr() for t in tensors})


def test_steady_decode_allocates_nothing(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_checkpoint), max_running_requests=4, max_model_len=300)
    params = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)
    streams = [llm.stream([5 + i] * 9, params) for i in range(3)]
    for stream in streams:
        for _ in range(20):
            next(stream)
    watch = Allocations()
    launch = StepGraph.launch

    def inside(graph: StepGraph) -> Any:
        watch.in_graph = True
        out = launch(graph)
        watch.in_graph = False
        return out

    monkeypatch.setattr(StepGraph, "launch", inside)
    live = []
    with watch:
        for _ in range(25):
            llm.engine.step()
            live.append(_num_storages())
    assert watch.found == []
    assert len(set(live[10:])) == 1, f"live storages: {live}"
