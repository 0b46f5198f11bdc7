"""The decode step: verify, then accept, over a bucket of rows; one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gapless.config.resolve import Config, bucket_for
from gapless.layers.batch import WindowBatch
from gapless.ops.step_metadata import StepConstants, WindowIndices, window_indices
from gapless.runner.device import Device, Emitted, Verified, accept
from gapless.runner.graphs import GraphRunner
from gapless.runner.inputs import Upload
from gapless.runner.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from gapless.core.plan import DecodeRow, PageEntry, StepPlan

# graphs are keyed by how far rows may reach, in steps of this many tokens
KV_LEN_STEP = 64


@dataclass(frozen=True)
class DecodeKey:
    """What a captured decode step depends on; all of it known to the host."""

    num_rows: int  # batch rows, padding included
    window: int  # W
    kv_len: int  # bound of every row's length, window included
    all_greedy: bool

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.num_rows * self.window


class DecodeRunner:
    """Runs decode steps over static buffers."""

    def __init__(self, device: Device, config: Config, emitted: Tensor) -> None:
        """Args: emitted: [max rows, 1 + W_max] int64, where each row's count and tokens go."""
        self._device = device
        self._buckets = config.buckets
        self._window = config.max_window
        self._kv_len_limit = device.num_page_columns * config.page_size
        self._pages_per_row = -(-self._window // config.page_size) + 1
        self._constants = StepConstants(device.geometry, device.device)
        self._graphs = GraphRunner(device.device)
        self._emitted = emitted
        rows = config.max_running_requests
        self._upload = Upload(8 * rows * (1 + 2 * self._pages_per_row) + 64, device.device)

    def run(self, plan: StepPlan) -> None:
        """Launch the plan's decode step; results land in the emitted buffer, rows in plan order."""
        key = self._key(plan)
        graph = self._graphs.get(key, lambda: self._stages(key))
        self._upload.send(self._arrays(key, plan.decode, plan.page_entries))
        graph.launch()

    def _key(self, plan: StepPlan) -> DecodeKey:
        reach = plan.max_seq_len + self._window
        return DecodeKey(
            num_rows=bucket_for(len(plan.decode), self._buckets),
            window=self._window,
            kv_len=min(-(-reach // KV_LEN_STEP) * KV_LEN_STEP, self._kv_len_limit),
            all_greedy=all(row.request.params.is_greedy for row in plan.decode),
        )

    def _arrays(
        self, key: DecodeKey, rows: Sequence[DecodeRow], entries: Sequence[PageEntry]
    ) -> dict[str, np.ndarray]:
        geometry, columns = self._device.geometry, self._device.num_page_columns
        num_padding = key.num_rows - len(rows)
        num_entries = key.num_rows * self._pages_per_row
        assert len(entries) <= num_entries, f"{len(entries)} page entries, room for {num_entries}"
        spare = num_entries - len(entries)
        null_entry = geometry.null_slot * columns
        return {
            "slots": np.array(
                [r.slot for r in rows] + [geometry.null_slot] * num_padding, np.int64
            ),
            "page_index": np.array(
                [e.slot * columns + e.index for e in entries] + [null_entry] * spare, np.int64
            ),
            "page_value": np.array(
                [e.page for e in entries] + [geometry.null_page] * spare, np.int64
            ),
        }

    def _stages(self, key: DecodeKey) -> list[Stage]:
        inputs = self._upload.send(self._arrays(key, (), ()))
        return [
            Stage("verify", lambda _: self._verify(key, inputs)),
            Stage("accept", lambda verified: self._accept(key, verified)),
        ]

    def _verify(self, key: DecodeKey, inputs: Mapping[str, Tensor]) -> Verified:
        """Run the target model over the windows, writing KV and rings at their positions."""
        device = self._device
        table = device.table
        page_table = table.columns.page_table
        page_table.view(-1).index_copy_(0, inputs["page_index"], inputs["page_value"])
        indices = window_indices(
            inputs["slots"], table.columns, device.geometry, self._constants, window=key.window
        )
        tokens = table.window_tokens.index_select(0, indices.slots)[:, : key.window].reshape(-1)
        batch = self._batch(key, indices)
        hidden = device.model.forward(tokens, device.memory, batch)
        assert hidden.shape[0] == key.tokens, "decode rows == batch"
        logits = device.model.logits(hidden)
        return Verified(indices.slots, indices.seq_lens, indices.fold_len, logits)

    def _batch(self, key: DecodeKey, indices: WindowIndices) -> WindowBatch:
        device = self._device
        attention = device.backend.plan_window(
            indices.slots, indices.positions, device.table.columns.page_table, kv_len=key.kv_len
        )
        return WindowBatch(
            num_rows=key.num_rows,
            positions=indices.positions.view(-1),
            kv_write=indices.kv_write,
            attention=attention,
            replay=indices.replay,
            conv_write=indices.conv_write,
            conv_taps=indices.conv_taps,
        )

    def _accept(self, key: DecodeKey, verified: Verified) -> Emitted:
        emitted = accept(self._device, verified, all_greedy=key.all_greedy)
        self._emitted[: key.num_rows, 0].copy_(emitted.lens)
        self._emitted[: key.num_rows, 1 : 1 + key.window].copy_(emitted.tokens)
        return emitted
