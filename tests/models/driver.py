"""Runs the served prefill and decode paths over given tokens and keeps every position's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gapless.config.options import EngineOptions
from gapless.core.plan import DecodeRow, PrefillSegment, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.engine.load import load

if TYPE_CHECKING:
    from pathlib import Path

    from gapless.layers.batch import Batch
    from gapless.layers.logits import LogitShard
    from gapless.models.decoder import Decoder
    from gapless.runner.device import Device

PAGES_PER_SLOT = 8


class Recorder:
    """A model that keeps the hidden states of each forward."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.architecture = model.architecture
        self.hidden: Tensor | None = None

    def forward(self, token_ids: Tensor, memory: object, batch: Batch) -> Tensor:
        self.hidden = self._model.forward(token_ids, memory, batch)
        return self.hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def logit_shard(self, hidden: Tensor) -> LogitShard:
        return self._model.logit_shard(hidden)


class TeacherForced:
    """Slots whose tokens the caller decides; logits of every token run so far by slot."""

    def __init__(self, checkpoint: Path, *, dtype: str, slots: int = 4, **options: object) -> None:
        loaded = load(
            EngineOptions.from_dict(
                {
                    "model": str(checkpoint), "dtype": dtype, "max_running_requests": slots,
                    "page_size": 16, "max_model_len": 16 * (PAGES_PER_SLOT - 1), **options,
                }
            )
        )  # fmt: skip
        self.runner = loaded.runner
        self.device: Device = loaded.runner.device
        self.recorder = Recorder(self.device.model)
        object.__setattr__(self.device, "model", self.recorder)
        self.logits: dict[int, list[Tensor]] = {slot: [] for slot in range(slots)}
        self._requests: dict[int, Request] = {}

    def prefill(self, *chunks: tuple[int, list[int], int]) -> None:
        """Run one packed prefill: `(slot, all tokens up to its end, its start)` each."""
        segments = []
        for slot, tokens, start in chunks:
            if start == 0:
                self.logits[slot] = []
            self._requests[slot] = request = _request(tokens)
            segments.append(
                PrefillSegment(
                    request=request, slot=slot, state_row=slot, pages=self._pages(slot),
                    start=start, end=len(tokens), is_last=True,
                )
            )  # fmt: skip
        self.runner.run(StepPlan(0, tuple(segments), (), (), 0)).wait()
        self._keep([(s.slot, s.end - s.start) for s in segments])

    def decode(self, tokens: dict[int, int]) -> None:
        """Run one decode step that commits the given token of each slot."""
        for slot, token in tokens.items():
            self.device.table.window_tokens[slot, 0] = token
            self.device.table.columns.done[slot] = False
        rows = tuple(DecodeRow(self._requests[slot], slot) for slot in tokens)
        longest = 16 * (PAGES_PER_SLOT - 1)
        result = self.runner.run(StepPlan(0, (), rows, (), longest)).wait()
        assert (result.decode_lens == 1).all(), "every row emits"
        self._keep([(slot, 1) for slot in tokens])

    def all_logits(self, slot: int) -> Tensor:
        """Logits [T, V] of the slot's tokens."""
        return torch.cat(self.logits[slot])

    def _pages(self, slot: int) -> tuple[int, ...]:
        # deliberately out of order, and interleaved between slots
        slots = self.device.geometry.num_slots
        return tuple(int(p) * slots + slot for p in np.arange(PAGES_PER_SLOT - 1)[::-1])

    def _keep(self, counts: list[tuple[int, int]]) -> None:
        hidden = self.recorder.hidden
        assert hidden is not None, "a forward has run"
        start = 0
        for slot, count in counts:
            self.logits[slot].append(self.recorder.logits(hidden[start : start + count]).clone())
            start += count


def _request(tokens: list[int]) -> Request:
    return Request(
        request_id="forced", prompt_ids=tuple(tokens), params=SamplingParams(temperature=0.0),
        seed=0, stop_ids=(), limit_len=10**6,
    )  # fmt: skip
