"""A runner whose plans the test writes, and what a snapshot or a slot then holds."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.config.options import EngineOptions
from gapless.core.plan import DecodeRow, PageCopy, PrefillSegment, SlotSave, Snapshot, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.engine.load import build, decide
from gapless.layers.batch import LinearMemory
from gapless.layers.placement import Alone
from gapless.runner.syncs import forbid_syncs
from gapless.speculative.mtp import MtpDrafter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gapless.core.plan import StepResult
    from gapless.runner.device import Device
    from gapless.runner.runner import StepHandle

NUM_SLOTS = 3
# rows 0 to NUM_SLOTS - 1 are those of the slots, the others are for snapshots
NUM_ROWS = 12
PAGE_SIZE = 4
PAGES_PER_SLOT = 15
# pages that no slot owns at first
SPARE_PAGE = NUM_SLOTS * PAGES_PER_SLOT
NAN = float("nan")


@dataclass
class Running:
    """A request in a slot, and the pages that it holds."""

    request: Request
    slot: int
    pages: tuple[int, ...]

    def segment(
        self, start: int, end: int, *, resumed_row: int | None = None,
        snapshots: Mapping[int, int] | None = None, is_first: bool = True,
    ) -> PrefillSegment:  # fmt: skip
        """Tokens `[start, end)`; `snapshots` maps positions to rows."""
        return PrefillSegment(
            request=self.request, slot=self.slot, state_row=self.slot, pages=self.pages,
            start=start, end=end, is_last=end == len(self.request.token_ids),
            resumed_row=resumed_row, is_first=is_first,
            snapshots=tuple(Snapshot(p, row) for p, row in (snapshots or {}).items()),
        )  # fmt: skip


def own_pages(slot: int) -> tuple[int, ...]:
    """Pages of a slot that shares none, out of order and interleaved with those of others."""
    return tuple(page * NUM_SLOTS + slot for page in reversed(range(PAGES_PER_SLOT)))


def sequence(tokens: Sequence[int], slot: int, pages: tuple[int, ...] | None = None) -> Running:
    """A greedy request without an end."""
    request = Request(
        request_id=f"of slot {slot}", prompt_ids=tuple(tokens), seed=0, stop_ids=(),
        params=SamplingParams(temperature=0.0), limit_len=10**6,
    )  # fmt: skip
    return Running(request, slot, pages or own_pages(slot))


class Rig:
    """Float64, reference path; the first launch of each kind may not synchronise."""

    def __init__(
        self, checkpoint: Path | None, *, prefill_buckets: tuple[int, ...] = (), **options: Any
    ) -> None:
        """Args: prefill_buckets: tokens that prefill chunks are padded to, as on a GPU."""
        defaults = {
            "model": None if checkpoint is None else str(checkpoint), "dtype": "float64",
            "max_running_requests": NUM_SLOTS, "page_size": PAGE_SIZE,
            "max_model_len": PAGES_PER_SLOT * PAGE_SIZE,
        }  # fmt: skip
        recipe = decide(EngineOptions.from_dict(defaults | options))
        sizes = {
            "num_state_rows": NUM_ROWS, "num_pages": SPARE_PAGE + 4,
            "prefill_buckets": prefill_buckets,
        }  # fmt: skip
        recipe = replace(recipe, config=replace(recipe.config, **sizes))  # type: ignore[arg-type]
        self.runner = build(recipe, 0, Alone())
        self.device: Device = self.runner.device
        self.hidden = torch.empty(0)
        self._guarded: set[tuple[bool, ...]] = set()
        honest = self.device.model.forward

        def keeping(*args: Any) -> Tensor:
            self.hidden = honest(*args)
            return self.hidden

        self.device.model.forward = keeping  # type: ignore[method-assign]

    def launch(
        self, *, saves: Sequence[SlotSave] = (), copies: Sequence[PageCopy] = (),
        prefill: Sequence[PrefillSegment] = (), decode: Sequence[Running] = (),
    ) -> StepHandle:  # fmt: skip
        """Launch one step."""
        rows = tuple(DecodeRow(s.request, s.slot) for s in decode)
        plan = StepPlan(
            step_id=0, prefill=tuple(prefill), decode=rows, page_entries=(), max_seq_len=40,
            saves=tuple(saves), page_copies=tuple(copies),
        )  # fmt: skip
        kind = (
            bool(saves), bool(copies), bool(prefill), bool(decode),
            any(segment.snapshots for segment in prefill),
            any(segment.resumed_row is not None for segment in prefill),
        )  # fmt: skip
        # watching takes longer than the step
        watch = nullcontext() if kind in self._guarded else forbid_syncs()
        self._guarded.add(kind)
        with watch:
            return self.runner.run(plan)

    def run(self, **parts: Any) -> StepResult:
        """Launch one step and read it."""
        return self.launch(**parts).wait()

    def logits(self) -> Tensor:
        """Logits [T, V] of the last forward."""
        return self.device.model.logits(self.hidden)

    @property
    def drafter(self) -> MtpDrafter:
        """The MTP drafter of a rig that has one."""
        assert isinstance(self.device.drafter, MtpDrafter)
        return self.device.drafter

    def snapshot(self, row: int, position: int) -> dict[str, Tensor]:
        """What a state row holds for resuming at a position."""
        found: dict[str, Tensor] = {}
        tail = list(self.device.geometry.conv_tail(row))[-position:]
        for i, memory in enumerate(self.device.memory):
            if isinstance(memory, LinearMemory):
                found[f"{i}.state"] = memory.replay.checkpoint[row]
                found[f"{i}.tail"] = memory.conv_ring[tail]
        if isinstance(self.device.drafter, MtpDrafter):
            found["hidden"] = self.drafter._hidden_rows[row]
        return {name: tensor.clone() for name, tensor in found.items()}

    def prefilled(self, slot: int, end: int) -> dict[str, Tensor]:
        """What a slot holds right after its prompt of `end` tokens."""
        geometry, columns = self.device.geometry, self.device.table.columns
        assert columns.seq_lens[slot] == columns.checkpoint_len[slot] == end
        taps = torch.arange(max(0, end - geometry.conv_width + 1), end)
        ring = slot * geometry.conv_ring_len + taps % geometry.conv_ring_len
        found = {"window": self.device.table.window_tokens[slot]}
        for i, memory in enumerate(self.device.memory):
            if isinstance(memory, LinearMemory):
                found[f"{i}.state"] = memory.replay.checkpoint[slot]
                found[f"{i}.conv"] = memory.conv_ring[ring]
            else:
                found[f"{i}.kv"] = memory[self.entries(slot, 0, end)]
        for i, memory in enumerate(self.device.pools.mtp_layers):
            found[f"mtp.{i}.kv"] = memory[self.entries(slot, 1, end + 1)]
        return {name: tensor.clone() for name, tensor in found.items()}

    def entries(self, slot: int, first: int, end: int) -> Tensor:
        """KV entries of a slot's positions."""
        positions = torch.arange(first, end)
        pages = self.device.table.columns.page_table[slot, positions // PAGE_SIZE]
        return pages * PAGE_SIZE + positions % PAGE_SIZE

    def poison(self, *, rows: set[int], slots: set[int], pages: set[int]) -> None:
        """Fill with NaN what belongs to none of these rows, slots and pages."""
        geometry = self.device.geometry
        lost_rows = [r for r in range(NUM_ROWS + 1) if r not in rows]
        lost_slots = [s for s in range(NUM_SLOTS + 1) if s not in slots]
        conv = [e for r in lost_rows for e in geometry.conv_tail(r)]
        conv += [e for s in lost_slots for e in _run(s, geometry.conv_ring_len)]
        ring = [e for s in lost_slots for e in _run(s, geometry.ring_len)]
        for memory in self.device.pools.linear:
            memory.conv_ring[:, conv] = NAN
            memory.replay.checkpoint[:, lost_rows] = NAN
            for part in (memory.replay.d_ring, memory.replay.k_ring, memory.replay.g_ring):
                part[:, ring] = NAN
        lost_pages = [p for p in range(geometry.num_pages + 1) if p not in pages]
        for pool in self.device.pools.kv:
            pool.view(pool.shape[0], -1, PAGE_SIZE, *pool.shape[2:])[:, lost_pages] = NAN
        if isinstance(self.device.drafter, MtpDrafter):
            self.drafter._hidden_rows[lost_rows] = NAN
            hidden = [e for s in lost_slots for e in _run(s, geometry.hidden_ring_len)]
            self.drafter._hidden_ring[hidden] = NAN


def _run(slot: int, length: int) -> range:
    return range(slot * length, (slot + 1) * length)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare tensor by tensor; NaN is never right."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.shape == expected[name].shape, name
        assert not tensor.numel() or (tensor - expected[name]).abs().max() <= 1e-10, name
