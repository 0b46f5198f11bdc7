"""The decode step: verify, accept, extend, draft, over a bucket of rows; one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from gapless.config.buckets import bucket_for
from gapless.layers.batch import WindowBatch
from gapless.ops.draft_tree import TreeMask
from gapless.ops.sampling import SamplingMode
from gapless.ops.step_metadata import (
    FreshPages,
    StepConstants,
    WindowIndices,
    has_kernel,
    window_indices,
)
from gapless.runner.accept import Accepted, Verified, accept, draft, sampling_mode
from gapless.runner.graphs import GraphRunner, StepGraph
from gapless.runner.host_plans import VERIFY_PLAN, HostPlans, Seams
from gapless.runner.inputs import Download, Ticket, Upload
from gapless.runner.logprobs import LogprobBuffer, LogprobTicket, num_top
from gapless.runner.masks import WindowDrafts
from gapless.runner.stages import Stage
from gapless.speculative.drafter import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from gapless.config.config import Config
    from gapless.core.counters import LaunchCounters
    from gapless.core.plan import DecodeRow, PageEntry, StepPlan
    from gapless.observe.trace import Trace
    from gapless.runner.device import Device
    from gapless.runner.graphs import Capture
    from gapless.runner.masks import MaskUpload
    from gapless.speculative.drafter import Drafter

# on a GPU one graph serves greedy and drawn rows: its kernels look at each row
GPU_MODES = (SamplingMode.DRAWN, SamplingMode.SAMPLED)
# of several ranks, one more settles without whole logits what has no filters
GPU_MODES_OF_RANKS = (SamplingMode.PLAIN, *GPU_MODES)


@dataclass(frozen=True)
class _RowSet:
    """What rows decide by themselves. Most steps name the rows of the step before."""

    rows: tuple[DecodeRow, ...]
    inputs: dict[str, np.ndarray]  # as `_blank_inputs` makes them
    places: dict[int, int]  # by slot, of a row's first fresh page
    mode: SamplingMode
    num_top: int | None
    is_constrained: bool  # whether a grammar masks some row

    @property
    def slots(self) -> np.ndarray:
        """Slots [B], padding included: null slots at the end."""
        return self.inputs["slots"]


@dataclass(frozen=True)
class DecodeKey:
    """What a captured decode step depends on; all of it known to the host."""

    num_rows: int  # batch rows, padding included
    window: int  # W
    kv_len: int  # bound of the positions that the step reaches, drafting included
    mode: SamplingMode
    num_top: int | None  # most likely tokens to report beside each; None reports nothing
    is_masked: bool  # whether grammars' masks are filled between verify and accept

    @property
    def tokens(self) -> int:
        """Tokens of the step."""
        return self.num_rows * self.window


def _captured(
    mode: SamplingMode, modes: Collection[SamplingMode], *, is_masked: bool
) -> SamplingMode:
    """Return the least of the captured `modes` that serves."""
    if is_masked:
        return SamplingMode.SAMPLED
    if mode.is_plain and SamplingMode.PLAIN in modes:
        return SamplingMode.PLAIN
    return SamplingMode.DRAWN


class DecodeRunner:
    """Runs decode steps over static buffers."""

    def __init__(
        self,
        device: Device,
        config: Config,
        emitted: Tensor,
        masks: MaskUpload,
        host_plans: HostPlans | None,
        counters: LaunchCounters,
        capture: Capture | None,
    ) -> None:
        """Args: emitted: [max rows, 2 + W_max] int64: each row's emitted and proposed counts, and
        its tokens. host_plans: given if a backend plans on the host."""
        self._device = device
        self._buckets = config.buckets
        self._window = config.max_window
        self._kv_lens = device.backend.kv_lens(device.num_page_columns * config.page_size)
        self._is_on_gpu = device.device.type == "cuda"
        self._gpu_modes = GPU_MODES if config.tp == 1 else GPU_MODES_OF_RANKS
        self._pages_per_row = -(-self._window // config.page_size) + 1
        self._constants = StepConstants(device.geometry, device.device)
        self._graphs = GraphRunner(capture, config.switches.graphs, counters)
        self._fuses_metadata = config.switches.fuses_metadata
        self._host_plans = host_plans
        self._counters = counters
        self._emitted = emitted
        self._masks = masks
        rows = config.max_running_requests
        # what constrained rows' windows hold, on its way to the host: count and drafts, and for
        # trees who descends from whom
        width = self._window * (1 if device.tree is None else 2)
        self._drafts = torch.zeros(rows, width, dtype=torch.int64, device=device.device)
        self._drafts_down = Download(self._drafts.view(-1))
        self._awaited: tuple[Sequence[DecodeRow], Ticket] | None = None
        self._row_set = self._make_row_set(())
        self._logprobs = LogprobBuffer(rows * self._window, device.device)
        self._upload = Upload(8 * rows * (1 + 2 * self._pages_per_row) + 64, device.device)

    def run(self, plan: StepPlan) -> LogprobTicket | None:
        """Launch the plan's decode step; results land in the emitted buffer, rows in plan order.

        Returns log-probabilities [rows * W], padding included, where a row wants some.
        """
        if plan.decode != self._row_set.rows:
            self._row_set = self._make_row_set(plan.decode)
        row_set = self._row_set
        key = self._key(row_set, plan.max_seq_len)
        graph = self._graphs.get(key, lambda: self._stages(key))
        arrays = self._inputs(row_set, plan.page_entries)
        self._upload.send(arrays)
        if row_set.is_constrained:
            slots = self._upload.views(arrays)["slots"]
            self._awaited = plan.decode, self._fetch_drafts(slots)
        if self._host_plans is not None:
            self._host_plans.begin(row_set.slots)
        graph.launch()
        if self._host_plans is not None:
            self._host_plans.end()
        self._count(graph)
        if key.num_top is None:
            return None
        return self._logprobs.fetch(key.tokens, key.num_top)

    def _count(self, graph: StepGraph) -> None:
        self._counters.num_steps += 1
        self._counters.num_launches += graph.num_launches
        self._counters.num_fused += self._fuses_metadata and has_kernel(self._device.device.type)

    def capture(self) -> None:
        """Capture the steps that will be asked for, largest first: later ones fit its memory."""
        keys = [
            DecodeKey(num_rows, self._window, kv_len, mode, None, is_masked=mode.edits_logits)
            for num_rows in reversed(self._buckets)
            for kv_len in reversed(self._kv_lens)
            for mode in self._gpu_modes
        ]
        for key in tqdm(keys, desc="capturing decode steps", unit="graph", disable=None):
            self._graphs.capture(key, lambda key=key: self._stages(key))  # type: ignore[misc]

    def watch(self, trace: Trace | None) -> None:
        """Record seams and graph launches from now on; None ends it."""
        self._graphs.watch(trace)

    def forget_graphs(self) -> None:
        """Destroy the captured steps."""
        self._graphs.clear()

    def _make_row_set(self, rows: tuple[DecodeRow, ...]) -> _RowSet:
        slots = np.full(bucket_for(len(rows), self._buckets), self._device.geometry.null_slot)
        slots[: len(rows)] = [row.slot for row in rows]
        return _RowSet(
            rows=rows,
            inputs=self._blank_inputs(slots),
            places={row.slot: i * self._pages_per_row for i, row in enumerate(rows)},
            mode=sampling_mode(row.request.params for row in rows),
            num_top=num_top(row.request.params.logprobs for row in rows),
            is_constrained=any(row.request.is_constrained for row in rows),
        )

    def _key(self, row_set: _RowSet, max_seq_len: int) -> DecodeKey:
        reach = min(max_seq_len + self._device.step_reach, self._kv_lens[-1])
        mode, is_masked = row_set.mode, row_set.is_constrained
        if self._is_on_gpu:
            # edits and masks share their graphs
            is_masked |= mode.edits_logits
            mode = _captured(mode, self._gpu_modes, is_masked=is_masked)
        return DecodeKey(
            num_rows=row_set.slots.size,
            window=self._window,
            kv_len=bucket_for(reach, self._kv_lens),
            mode=mode,
            num_top=row_set.num_top,
            is_masked=is_masked,
        )

    def _fetch_drafts(self, slots: Tensor) -> Ticket:
        """Start to bring down windows of `slots` [B]: number of drafts, those, a tree's bits."""
        table, rows = self._device.table, slots.shape[0]
        windows = self._drafts[:rows]
        windows[:, : self._window].copy_(table.window_tokens.index_select(0, slots))
        windows[:, 0].copy_(table.num_drafts.index_select(0, slots))
        if self._device.tree is not None:
            windows[:, self._window :].copy_(table.draft_bits.index_select(0, slots))
        return self._drafts_down.fetch(windows.numel())

    def _plan_masks(self) -> None:
        """Fill the masks of the step under way, while verify runs."""
        if self._awaited is None:
            self._masks.clear()
            return
        (rows, ticket), self._awaited = self._awaited, None
        windows = ticket.read().reshape(-1, self._drafts.shape[1])[: len(rows)].tolist()
        drafts = [self._window_drafts(window) for window in windows]
        self._masks.send([row.request for row in rows], drafts, self._window)

    def _window_drafts(self, fetched: list[int]) -> WindowDrafts:
        """Read one row of what `_fetch_drafts` brought down."""
        count = fetched[0]
        bits = fetched[self._window :]
        parents: Sequence[int] = range(count)
        if bits:
            # the highest bit below a node's own
            parents = [(bits[i] ^ 1 << i).bit_length() - 1 for i in range(1, 1 + count)]
        return WindowDrafts(fetched[1 : 1 + count], parents)

    def _blank_inputs(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Inputs of a step over `slots` [B] int64 none of which has a fresh page."""
        geometry, shape = self._device.geometry, (slots.size, self._pages_per_row)
        return {
            "slots": slots,
            "page_index": np.full(shape, geometry.null_slot * self._device.num_page_columns),
            "page_value": np.full(shape, geometry.null_page),
        }

    def _inputs(self, row_set: _RowSet, entries: Sequence[PageEntry]) -> dict[str, np.ndarray]:
        inputs = {name: array.copy() for name, array in row_set.inputs.items()}
        index, value = inputs["page_index"].reshape(-1), inputs["page_value"].reshape(-1)
        columns, null_page = self._device.num_page_columns, self._device.geometry.null_page
        for entry in entries:
            # a slot's entries of one step follow each other
            place = row_set.places[entry.slot] + entry.index % self._pages_per_row
            assert value[place] == null_page, f"too many page entries of slot {entry.slot}"
            index[place] = entry.slot * columns + entry.index
            value[place] = entry.page
        return inputs

    def _stages(self, key: DecodeKey) -> list[Stage]:
        slots = np.full(key.num_rows, self._device.geometry.null_slot)
        arrays = self._blank_inputs(slots)
        self._upload.send(arrays)
        inputs = self._upload.views(arrays)
        seams = Seams()
        if self._host_plans is not None:
            self._host_plans.begin(slots, is_dummy=True)
            seams = self._host_plans.seams(key.kv_len)
        stages = [
            Stage("verify", lambda _: self._verify(key, inputs), plan=seams.verify),
            Stage(
                "accept",
                lambda verified: self._accept(key, *verified),
                plan=self._plan_masks if key.is_masked else None,
            ),
        ]
        drafter = self._device.drafter
        if drafter is not None:
            stages += [
                Stage(
                    "extend",
                    lambda settled: self._extend(key, drafter, *settled),
                    plan=seams.extend,
                ),
                Stage(
                    "draft",
                    lambda extended: self._draft(key, drafter, *extended),
                    plan=seams.draft,
                ),
            ]
        return stages

    def _verify(self, key: DecodeKey, inputs: Mapping[str, Tensor]) -> tuple[Verified, Tensor]:
        """Run the target model over the windows, writing KV and rings at their positions."""
        device = self._device
        table = device.table
        indices = window_indices(
            inputs["slots"],
            table.columns,
            device.geometry,
            self._constants,
            window=key.window,
            tree=None if device.tree is None else table.draft_bits,
            fresh=FreshPages(inputs["page_index"], inputs["page_value"]),
            is_fused=self._fuses_metadata,
        )
        tokens = indices.tokens.view(-1)
        hidden = device.model.forward(tokens, device.memory, self._batch(key, indices))
        assert hidden.shape[0] == key.tokens, "decode rows == batch"
        logits = device.model.logit_shard(hidden)
        verified = Verified(
            indices.slots,
            indices.seq_lens,
            indices.fold_len,
            indices.sampled_at,
            logits,
            indices.ancestors,
        )
        return verified, hidden

    def _accept(
        self, key: DecodeKey, verified: Verified, hidden: Tensor
    ) -> tuple[Verified, Tensor, Accepted]:
        """Settle what the step emits."""
        masks = self._masks.rows(key.num_rows, key.window) if key.is_masked else None
        emitted = self._emitted[: key.num_rows]
        accepted = accept(self._device, verified, emitted, key.mode, key.num_top, masks)
        if self._host_plans is not None:
            self._host_plans.store(accepted)
        if accepted.logprobs is not None and key.num_top is not None:
            self._logprobs.rows(key.tokens, key.num_top).copy_(accepted.logprobs)
        return verified, hidden, accepted

    def _extend(
        self,
        key: DecodeKey,
        drafter: Drafter,
        verified: Verified,
        hidden: Tensor,
        accepted: Accepted,
    ) -> tuple[Accepted, Tensor]:
        """Let the drafter take in the window while its hidden states are there."""
        tokens = accepted.tokens
        if accepted.path is not None:
            # no path has as many tokens as its tree
            path = accepted.path[:, : self._device.most_emitted]
            index = path[:, :, None].expand(-1, -1, hidden.shape[1])
            hidden = hidden.view(*tokens.shape, -1).gather(1, index).flatten(0, 1)
            tokens = tokens[:, : path.shape[1]]
        outcome = Outcome(
            slots=verified.slots,
            seq_lens=verified.seq_lens,
            lens=accepted.lens,
            tokens=tokens,
            hidden=hidden,
            kv_len=key.kv_len,
        )
        return accepted, drafter.read_window(outcome)

    def _draft(self, key: DecodeKey, drafter: Drafter, accepted: Accepted, carry: Tensor) -> None:
        """Propose the next windows."""
        draft(
            self._device,
            drafter,
            accepted,
            carry,
            kv_len=key.kv_len,
            mode=key.mode,
            is_planned=True,
        )

    def _batch(self, key: DecodeKey, indices: WindowIndices) -> WindowBatch:
        device = self._device
        bits = indices.ancestors
        attention = device.backend.plan_window(
            indices.slots,
            indices.positions,
            device.table.columns.page_table,
            kv_len=key.kv_len,
            tree=None if bits is None else TreeMask(indices.seq_lens, bits),
            host_plan=VERIFY_PLAN,
        )
        return WindowBatch(
            num_rows=key.num_rows,
            positions=indices.logical.view(-1),
            kv_write=indices.kv_write,
            attention=attention,
            live=indices.live,
            replay=indices.replay,
            conv_write=indices.conv_write,
            conv_taps=indices.conv_taps,
            ancestors=bits,
        )
