"""The prefill chunk: packed prompt segments through chunked kernels, metadata decided on the host.

Everything a chunk needs is integers that the host knows, so they are laid out once per forward
(`runner/layout.py`), sent in one copy, and read by every layer. A short chunk would leave a GPU
waiting for launches: it is padded to a room, and the whole of it is one captured graph.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from gapless.core.sampling_params import MAX_LOGIT_BIAS
from gapless.core.specs.linear import ShortConvSpec
from gapless.layers.batch import AttentionBatch, PrefillBatch
from gapless.ops.causal_conv import SegmentIndices
from gapless.ops.linear_chunk import ChunkIndices, RoundIndices, kernels_lack, scan_indices
from gapless.ops.sampling import SamplingMode, packed_logprobs
from gapless.runner.accept import Verified, accept, draft, sampling_mode
from gapless.runner.graphs import GraphRunner
from gapless.runner.inputs import Upload, packed_bytes
from gapless.runner.layout import CHUNK_LEN, PrefillLayout, PrefillRoom, lay_out
from gapless.runner.logprobs import LogprobBuffer, LogprobTicket, PrefillLogprobs, num_top
from gapless.runner.masks import NO_DRAFTS
from gapless.runner.slot_table import count_arrays
from gapless.runner.stages import Stage
from gapless.speculative.drafter import KeptTokens, PastTokens, PromptChunk, ShiftedChunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from gapless.config.config import Config
    from gapless.core.plan import PrefillSegment
    from gapless.observe.trace import Trace
    from gapless.ops.sampling import MaskRows
    from gapless.runner.accept import Accepted
    from gapless.runner.device import Device
    from gapless.runner.graphs import Capture, StepGraph
    from gapless.runner.masks import MaskUpload

logger = logging.getLogger(__name__)

# rows of full-vocabulary logits alive at once when prompt log-probabilities are asked for
LOGPROB_ROWS = 256
# a room's segments: one for so many tokens, within these bounds; each is a row to sample and draft
TOKENS_PER_SEGMENT = 64
FEWEST_SEGMENTS, MOST_SEGMENTS = 8, 32
# a segment of more tokens than this has rooms of its own: scans of one know that nothing fills the
# device beside them
TOKENS_BESIDE = 1024
SNAPSHOTS_PER_SEGMENT = 3
# on a GPU one graph serves greedy and drawn rows: its kernels look at each row
GPU_MODES = (SamplingMode.DRAWN,)
# of several ranks, one more settles without whole logits what has no filters
GPU_MODES_OF_RANKS = (*GPU_MODES, SamplingMode.PLAIN)


@dataclass(frozen=True)
class _Chunk:
    """A chunk on the device, and what of it stays on the host."""

    layout: PrefillLayout
    inputs: Mapping[str, Tensor]
    num_sampled: int
    """Rows that are sampled, padding included."""
    mode: SamplingMode
    kv_len: int
    """Bound of the positions that drafting reaches."""
    num_top: int | None = None
    masks: MaskRows | None = None


class PrefillRunner:
    """Runs prefill chunks: captured where they fit a room, else launch by launch."""

    def __init__(
        self,
        device: Device,
        config: Config,
        first_tokens: Tensor,
        masks: MaskUpload,
        capture: Capture | None,
    ) -> None:
        """Args: first_tokens: [max segments] int64, where sampled tokens go in plan order."""
        self._device = device
        self._first_tokens = first_tokens
        self._masks = masks
        self._is_on_gpu = device.device.type == "cuda"
        self._max_kv_len = device.num_page_columns * config.page_size
        tokens = config.chunked_prefill_size
        segments = min(tokens, config.max_running_requests)
        width = device.geometry.conv_width
        pages = device.geometry.num_pages + device.num_page_columns
        entries = config.num_pages * config.page_size
        per_token = 16 + width + 3
        per_segment = CHUNK_LEN + 4 * width + 72 + 2 * MAX_LOGIT_BIAS
        elements = tokens * per_token + segments * per_segment + 2 * pages + entries + 1024
        # enough for requests that share no pages and store one snapshot each; else it grows
        self._upload = Upload(8 * elements, device.device)
        self._prompt_logprobs = LogprobBuffer(tokens, device.device)
        self._first_logprobs = LogprobBuffer(segments, device.device)
        lacks = _kernels_lack(device, config)
        self._has_rounds = not self._is_on_gpu or lacks is not None
        # in use, smallest first; without any, every chunk is launched kernel by kernel
        self.rooms = _rooms(device, config, lacks)
        self._graphs = GraphRunner(capture)
        self._gpu_modes = GPU_MODES if config.tp == 1 else GPU_MODES_OF_RANKS
        # what is captured never moves; chunks that it has no room for run launch by launch
        arrays = [packed_bytes(self._arrays(self._lay_out((), room), room)) for room in self.rooms]
        self._room_upload = Upload(max([0, *arrays]) + 8 * elements, device.device)

    def run(self, segments: tuple[PrefillSegment, ...]) -> PrefillLogprobs:
        """Launch one chunk: KV, rings, checkpoints, and the first token of each last segment."""
        for room in self.rooms:
            if self._suits(room, segments):
                layout = self._lay_out(segments, room)
                arrays = self._arrays(layout, room) | layout.admission
                if self._room_upload.holds(arrays):
                    self._run_in(room, layout, arrays, segments)
                    return PrefillLogprobs(None, None)
        return self._run_exactly(segments)

    def capture(self) -> None:
        """Capture a chunk of each room, on CUDA; largest first: later ones fit its memory."""
        if self._is_on_gpu:
            keys = list(product(self.rooms[::-1], self._gpu_modes))
            for key in tqdm(keys, desc="capturing prefill", unit="graph", disable=None):
                self._graphs.capture(key, lambda key=key: self._stages(*key))  # type: ignore[misc]

    def watch(self, trace: Trace | None) -> None:
        """Record graph launches from now on; None ends it."""
        self._graphs.watch(trace)

    def forget_graphs(self) -> None:
        """Destroy the captured chunks; all chunks then run launch by launch."""
        self._graphs.clear()

    def graph_for(
        self, room: PrefillRoom, segments: tuple[PrefillSegment, ...]
    ) -> StepGraph | None:
        """Return what was captured for a chunk of these segments, None if nothing was."""
        mode = sampling_mode(s.request.params for s in segments if s.is_last)
        settles_shards = mode.is_plain and SamplingMode.PLAIN in self._gpu_modes
        mode = SamplingMode.PLAIN if settles_shards else SamplingMode.DRAWN
        return self._graphs.find((room, mode))

    def _suits(self, room: PrefillRoom, segments: tuple[PrefillSegment, ...]) -> bool:
        """Whether a chunk can run in a room; those that ask for more than tokens cannot."""
        if self._is_on_gpu and self.graph_for(room, segments) is None:
            return False
        requests = [s.request for s in segments]
        return (
            room.holds(segments)
            and not self._with_past(segments)
            and not sampling_mode(r.params for r in requests).edits_logits
            and not any(
                r.is_constrained or r.wants_prompt_logprobs or r.params.logprobs is not None
                for r in requests
            )
        )

    def _run_in(
        self,
        room: PrefillRoom,
        layout: PrefillLayout,
        arrays: Mapping[str, np.ndarray],
        segments: tuple[PrefillSegment, ...],
    ) -> None:
        self._room_upload.send(arrays)
        inputs = self._room_upload.views(arrays)
        self._device.table.admit(inputs)
        graph = self.graph_for(room, segments)
        if graph is None:
            mode = sampling_mode(s.request.params for s in segments if s.is_last)
            self._step(self._chunk_in(room, layout, inputs, mode))
        else:
            graph.launch()

    def _stages(self, room: PrefillRoom, mode: SamplingMode) -> list[Stage]:
        layout = self._lay_out((), room)
        arrays = self._arrays(layout, room)
        self._room_upload.send(arrays)
        inputs = self._room_upload.views(arrays)
        chunk = self._chunk_in(room, layout, inputs, mode)
        return [Stage("prefill", lambda _: self._step(chunk))]

    def _chunk_in(
        self,
        room: PrefillRoom,
        layout: PrefillLayout,
        inputs: Mapping[str, Tensor],
        mode: SamplingMode,
    ) -> _Chunk:
        return _Chunk(layout, inputs, room.segments, mode, self._max_kv_len)

    def _run_exactly(self, segments: tuple[PrefillSegment, ...]) -> PrefillLogprobs:
        """Run a chunk without padding, and report what is asked for beside tokens."""
        device = self._device
        layout = self._lay_out(segments, None)
        counts = count_arrays(segments, device.model.architecture.vocab_size)
        arrays = self._arrays(layout, None) | layout.admission | counts
        self._upload.reserve(arrays)
        self._upload.send(arrays)
        inputs = self._upload.views(arrays)
        device.table.admit(inputs)
        if counts["counted_slots"].size:
            device.table.recount(inputs)
        sampled = [s.request for s in segments if s.is_last]
        masks = None
        if any(request.is_constrained for request in sampled):
            self._masks.send(sampled, [NO_DRAFTS] * len(sampled), 1)
            masks = self._masks.rows(len(sampled), 1)
        chunk = _Chunk(
            layout=layout,
            inputs=inputs,
            num_sampled=len(sampled),
            mode=sampling_mode(request.params for request in sampled),
            kv_len=max(s.end for s in segments) + device.step_reach,
            num_top=num_top(request.params.logprobs for request in sampled),
            masks=masks,
        )
        hidden, accepted = self._step(chunk)
        return PrefillLogprobs(
            self._score(segments, hidden, inputs["successors"]), self._report(chunk, accepted)
        )

    def _lay_out(
        self, segments: tuple[PrefillSegment, ...], room: PrefillRoom | None
    ) -> PrefillLayout:
        device = self._device
        return lay_out(
            segments,
            device.geometry,
            device.num_page_columns,
            with_past=self._with_past(segments),
            has_rounds=self._has_rounds,
            room=room,
        )

    def _arrays(self, layout: PrefillLayout, room: PrefillRoom | None) -> dict[str, np.ndarray]:
        """What goes up for the forward; what varies in size with the context comes last."""
        backend, sizes, shifted_sizes = self._device.backend, None, None
        if room is not None:
            sizes = (room.tokens, room.segments)
            shifted_sizes = (room.tokens + room.segments, room.segments)
        tiles = backend.prefill_tiles(layout.segments, sizes)
        arrays = layout.arrays | {f"tiles_{size}": array for size, array in tiles.items()}
        if self._device.drafter is not None:
            tiles = backend.prefill_tiles(layout.shifted_segments, shifted_sizes)
            arrays |= {f"shifted_tiles_{size}": array for size, array in tiles.items()}
        return arrays | {"kv_entries": layout.kv_entries}

    def _with_past(self, segments: tuple[PrefillSegment, ...]) -> list[PrefillSegment]:
        """Segments whose cached tokens the drafter has not read, and wants to."""
        drafter = self._device.drafter
        if drafter is None or not drafter.reads_past:
            return []
        return [s for s in segments if s.is_first and s.start]

    def _step(self, chunk: _Chunk) -> tuple[Tensor, Accepted | None]:
        """Run the model, sample first tokens, and let the drafter take in the chunk and propose.

        Reads nothing of the chunk's layout but on the reference path.
        """
        device, inputs = self._device, chunk.inputs
        hidden = device.model.forward(inputs["token_ids"], device.memory, self._batch(chunk))
        accepted, next_ids = None, inputs["successors"]
        if chunk.num_sampled:
            logits = device.model.logit_shard(hidden.index_select(0, inputs["last_token"]))
            # the prompt's last token is a window of one: it commits, and the sample follows it
            verified = Verified(
                inputs["sampled_slots"],
                inputs["sampled_start"],
                inputs["sampled_end"],
                inputs["sampled_end"][:, None],
                logits,
                None,
            )
            # the host reads the first tokens alone
            emitted = logits.part.new_empty(chunk.num_sampled, 3, dtype=torch.int64)
            accepted = accept(device, verified, emitted, chunk.mode, chunk.num_top, chunk.masks)
            self._first_tokens[: chunk.num_sampled].copy_(accepted.newest)
            next_ids = torch.cat((next_ids, accepted.newest))
            next_ids = next_ids.index_select(0, inputs["next_source"])
        if device.drafter is not None:
            carry = device.drafter.read_prompt(self._prompt(chunk, next_ids, hidden))
            if accepted is not None:
                draft(device, device.drafter, accepted, carry, kv_len=chunk.kv_len, mode=chunk.mode)
        return hidden, accepted

    def _report(self, chunk: _Chunk, accepted: Accepted | None) -> LogprobTicket | None:
        """Bring log-probabilities of first tokens down, if some are asked for."""
        if accepted is None or accepted.logprobs is None or chunk.num_top is None:
            return None
        self._first_logprobs.rows(chunk.num_sampled, chunk.num_top).copy_(accepted.logprobs)
        return self._first_logprobs.fetch(chunk.num_sampled, chunk.num_top)

    def _prompt(self, chunk: _Chunk, next_ids: Tensor, hidden: Tensor) -> PromptChunk:
        inputs = chunk.inputs
        attention = self._device.backend.plan_prefill(
            inputs["kv_entries"],
            chunk.layout.shifted_segments,
            _tiles(inputs, "shifted_tiles_"),
        )
        return PromptChunk(
            slots=inputs["slot_of_token"],
            positions=inputs["positions"],
            token_ids=inputs["token_ids"],
            next_ids=next_ids,
            hidden=hidden,
            last_token=inputs["last_token"],
            shifted=ShiftedChunk(
                batch=AttentionBatch(
                    positions=inputs["shifted_positions"],
                    kv_write=inputs["shifted_write"],
                    attention=attention,
                    live=inputs.get("shifted_live"),
                ),
                order=inputs["shifted_order"],
                resumed_rows=inputs["resumed_rows"],
                resumed_ids=inputs["resumed_ids"],
                last_token=inputs["shifted_last"],
            ),
            past=PastTokens(inputs["past_slots"], inputs["past_positions"], inputs["past_ids"]),
            kept=KeptTokens(inputs["ends"], inputs["snapshot_tokens"], inputs["snapshot_rows"]),
        )

    def _batch(self, chunk: _Chunk) -> PrefillBatch:
        inputs, layout = chunk.inputs, chunk.layout
        rounds = None
        if self._has_rounds:
            rounds = RoundIndices(
                gather=inputs["gather"],
                scatter=inputs["scatter"],
                active=layout.active,
                init_rows=inputs["init_rows"],
                final_rows=inputs["final_rows"],
                num_cuts=layout.num_cuts,
                cut_places=inputs["cut_places"],
                cut_rows=inputs["cut_rows"],
            )
        return PrefillBatch(
            positions=inputs["positions"],
            kv_write=inputs["kv_write"],
            attention=self._device.backend.plan_prefill(
                inputs["kv_entries"], layout.segments, _tiles(inputs, "tiles_")
            ),
            live=inputs.get("live"),
            chunks=ChunkIndices(CHUNK_LEN, scan_indices(inputs), rounds),
            conv=SegmentIndices(
                prefix=inputs["conv_prefix"],
                taps=inputs["conv_taps"],
                keep=inputs["conv_keep"],
                write=inputs["conv_write"],
            ),
        )

    def _score(
        self, segments: tuple[PrefillSegment, ...], hidden: Tensor, successors: Tensor
    ) -> LogprobTicket | None:
        """Find each position's log-probabilities of the token that follows it, if one is asked."""
        asking = [s.request.params for s in segments if s.request.wants_prompt_logprobs]
        top = num_top(params.prompt_logprobs for params in asking)
        if top is None:
            return None
        total = successors.shape[0]
        found = self._prompt_logprobs.rows(total, top)
        for start in range(0, total, LOGPROB_ROWS):
            rows = slice(start, start + LOGPROB_ROWS)
            logits = self._device.model.logits(hidden[rows])
            found[rows].copy_(packed_logprobs(logits, successors[rows], top))
        return self._prompt_logprobs.fetch(total, top)


def _tiles(inputs: Mapping[str, Tensor], prefix: str) -> dict[int, Tensor]:
    """Tiles by their tokens."""
    found = {n.removeprefix(prefix): tensor for n, tensor in inputs.items() if n.startswith(prefix)}
    return {int(size): tensor for size, tensor in found.items()}


def _rooms(device: Device, config: Config, lacks: str | None) -> tuple[PrefillRoom, ...]:
    """Rooms that chunks are padded to, smallest first; on a GPU only where they can be captured."""
    if not config.prefill_buckets:
        return ()
    if device.device.type == "cuda" and not device.backend.captures_prefill:
        lacks = "attention on torch operations"
    if device.device.type == "cuda" and lacks is not None:
        logger.info("prefill runs launch by launch: %s", lacks)
        return ()
    rooms = []
    for tokens in config.prefill_buckets:
        wanted = min(MOST_SEGMENTS, max(FEWEST_SEGMENTS, tokens // TOKENS_PER_SEGMENT))
        most = min(wanted, tokens, config.max_running_requests)
        for segments in sorted({most, 1} if tokens > TOKENS_BESIDE else {most}):
            rooms.append(PrefillRoom(tokens, segments, SNAPSHOTS_PER_SEGMENT * segments))
    return tuple(rooms)


def _kernels_lack(device: Device, config: Config) -> str | None:
    """What of the linear layers' scans no kernel for CUDA serves; None if all are served."""
    dtype: torch.dtype = vars(torch)[config.dtype]
    scanned = [
        spec
        for spec in device.model.architecture.linear_layers
        if not isinstance(spec, ShortConvSpec)
    ]
    found = [kernels_lack(dtype, s.key_dim, CHUNK_LEN, s.recurrence) for s in scanned]
    return next((reason for reason in found if reason), None)
