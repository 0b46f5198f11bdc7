"""The prefill chunk: packed prompt segments through chunked kernels, metadata decided on the host.

Everything a chunk needs is integers that the host knows, so they are laid out in numpy once per
forward, sent in one copy, and read by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gapless.core.sampling_params import MAX_LOGIT_BIAS
from gapless.layers.batch import AttentionBatch, PrefillBatch
from gapless.ops.linear_chunk import ChunkIndices, plan_chunks
from gapless.ops.sampling import packed_logprobs
from gapless.runner.accept import Verified, accept, draft, sampling_mode
from gapless.runner.inputs import Upload
from gapless.runner.logprobs import LogprobBuffer, LogprobTicket, PrefillLogprobs, num_top
from gapless.runner.slot_table import admission_arrays, count_arrays
from gapless.speculative.drafter import PromptChunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gapless.config.resolve import Config
    from gapless.core.plan import PrefillSegment
    from gapless.ops.step_metadata import Geometry
    from gapless.runner.device import Device

# tokens whose intra-chunk terms are solved together in the linear layers
CHUNK_LEN = 64
# rows of full-vocabulary logits alive at once when prompt log-probabilities are asked for
LOGPROB_ROWS = 256


@dataclass(frozen=True)
class PrefillLayout:
    """One chunk's arrays, and the integers that stay on the host."""

    arrays: dict[str, np.ndarray]
    segments: tuple[tuple[int, int, int, int], ...]  # (q_start, q_end, kv_start, kv_end)
    active: tuple[int, ...]  # segments still running in each round of the chunked scan


def lay_out(
    segments: tuple[PrefillSegment, ...], geometry: Geometry, num_page_columns: int
) -> PrefillLayout:
    """Decide every index of a prefill chunk on the host."""
    lengths = [s.end - s.start for s in segments]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(s.start, s.end) for s in segments])
    slots = np.repeat([s.slot for s in segments], lengths)
    starts = np.repeat([s.start for s in segments], lengths)
    ends = np.repeat([s.end for s in segments], lengths)
    entries = [_entries(s, geometry) for s in segments]
    kv_bounds = np.concatenate([[0], np.cumsum([s.end for s in segments])])

    order, active, gather, scatter = plan_chunks(lengths, CHUNK_LEN)
    ordered = [segments[i] for i in order]
    stays = positions >= ends - geometry.conv_ring_len
    conv_slots = np.where(stays, slots, geometry.null_slot)
    arrays = {
        "token_ids": np.concatenate([s.request.token_ids[s.start : s.end] for s in segments]),
        "successors": np.concatenate([_successors(s) for s in segments]),
        "positions": positions,
        "slot_of_token": slots,
        "kv_write": np.concatenate(
            [e[s.start : s.end] for s, e in zip(segments, entries, strict=True)]
        ),
        "kv_read": np.concatenate([e[: s.end] for s, e in zip(segments, entries, strict=True)]),
        # a drafter's KV stands one position later, and begins at 1
        "shifted_write": np.concatenate(
            [e[s.start + 1 :] for s, e in zip(segments, entries, strict=True)]
        ),
        "shifted_read": np.concatenate([e[1:] for e in entries]),
        "gather": gather,
        "scatter": scatter,
        "init_rows": np.array([s.state_row if s.start else geometry.zero_row for s in ordered]),
        "final_rows": np.array([s.state_row for s in ordered]),
        "conv_prefix": _conv_prefix(segments, geometry),
        "conv_write": conv_slots * geometry.conv_ring_len + positions % geometry.conv_ring_len,
        "conv_taps": _conv_taps(positions, starts, lengths, geometry),
        "last_token": bounds[1:][[s.is_last for s in segments]] - 1,
        "sampled_slots": np.array([s.slot for s in segments if s.is_last], np.int64),
        "sampled_end": np.array([s.end for s in segments if s.is_last], np.int64),
    }
    integers = {name: array.astype(np.int64, copy=False) for name, array in arrays.items()}
    return PrefillLayout(
        arrays=integers | admission_arrays(segments, num_page_columns, geometry.null_page),
        segments=tuple(
            (int(bounds[i]), int(bounds[i + 1]), int(kv_bounds[i]), int(kv_bounds[i + 1]))
            for i in range(len(segments))
        ),
        active=active,
    )


def _successors(segment: PrefillSegment) -> list[int]:
    """The token after each of the segment's; token 0 stands where there is none yet."""
    known = segment.request.token_ids[segment.start + 1 : segment.end + 1]
    return known + [0] * (segment.end - segment.start - len(known))


def _entries(segment: PrefillSegment, geometry: Geometry) -> np.ndarray:
    """KV entries of positions 0 to `end`, both included, of a segment's request."""
    position = np.arange(segment.end + 1)
    # without drafts no page needs to exist for the token that is sampled
    pages = np.array([*segment.pages, geometry.null_page], np.int64)
    return (
        pages[position // geometry.page_size] * geometry.page_size + position % geometry.page_size
    )


def _conv_prefix(segments: tuple[PrefillSegment, ...], geometry: Geometry) -> np.ndarray:
    """Ring entries of the taps before each segment's start, then the zero entry."""
    distance = np.arange(geometry.conv_width - 1, 0, -1)
    position = np.array([s.start for s in segments])[:, None] - distance
    entry = np.array([s.slot for s in segments])[:, None] * geometry.conv_ring_len
    entry = np.where(position < 0, geometry.conv_zero, entry + position % geometry.conv_ring_len)
    return np.append(entry.reshape(-1), geometry.conv_zero)


def _conv_taps(
    positions: np.ndarray, starts: np.ndarray, lengths: list[int], geometry: Geometry
) -> np.ndarray:
    """Source row of each tap of each token: the chunk's inputs, or the prefix that follows them."""
    total, before = len(positions), geometry.conv_width - 1
    distance = np.arange(before, -1, -1)[:, None]
    tapped = positions - distance
    segment = np.repeat(np.arange(len(lengths)), lengths)
    # the prefix holds `before` rows per segment, the last one right before its start
    in_prefix = total + segment * before + before - (starts - tapped)
    return np.where(tapped >= starts, np.arange(total) - distance, in_prefix)


class PrefillRunner:
    """Runs prefill chunks eagerly."""

    def __init__(self, device: Device, config: Config, first_tokens: Tensor) -> None:
        """Args: first_tokens: [max segments] int64, where sampled tokens go in plan order."""
        self._device = device
        self._first_tokens = first_tokens
        tokens = config.chunked_prefill_size
        segments = min(tokens, config.max_running_requests)
        width = device.geometry.conv_width
        pages = device.geometry.num_pages + device.num_page_columns
        entries = config.num_pages * config.page_size
        per_token = 8 + width + 2
        per_segment = CHUNK_LEN + width + 40 + 2 * MAX_LOGIT_BIAS
        elements = tokens * per_token + segments * per_segment + 2 * pages + 3 * entries + 1024
        self._upload = Upload(8 * elements, device.device)
        self._prompt_logprobs = LogprobBuffer(tokens, device.device)
        self._first_logprobs = LogprobBuffer(segments, device.device)

    def run(self, segments: tuple[PrefillSegment, ...]) -> PrefillLogprobs:
        """Launch one chunk: KV, rings, checkpoints, and the first token of each last segment."""
        device = self._device
        layout = lay_out(segments, device.geometry, device.num_page_columns)
        counts = count_arrays(segments, device.model.architecture.vocab_size)
        inputs = self._upload.send(layout.arrays | counts)
        device.table.admit(inputs)
        if counts["counted_slots"].size:
            device.table.recount(inputs)
        hidden = device.model.forward(
            inputs["token_ids"], device.memory, self._batch(layout, inputs)
        )
        prompt = self._score(segments, hidden, inputs["successors"])
        return PrefillLogprobs(prompt, self._settle(segments, layout, inputs, hidden))

    def _settle(
        self,
        segments: tuple[PrefillSegment, ...],
        layout: PrefillLayout,
        inputs: Mapping[str, Tensor],
        hidden: Tensor,
    ) -> LogprobTicket | None:
        """Sample the first tokens, and let the drafter take in the chunk and propose."""
        device = self._device
        sampled = [s.request for s in segments if s.is_last]
        mode = sampling_mode(request.params for request in sampled)
        top = num_top(request.params.logprobs for request in sampled)
        next_ids = inputs["successors"]
        accepted, logprobs = None, None
        if sampled:
            end = inputs["sampled_end"]
            logits = device.model.logits(hidden.index_select(0, inputs["last_token"]))
            # the prompt's last token is a window of one: it commits, and the sample follows it
            verified = Verified(inputs["sampled_slots"], end - 1, end, logits)
            accepted = accept(device, verified, mode, top)
            self._first_tokens[: len(sampled)].copy_(accepted.newest)
            next_ids = next_ids.index_copy(0, inputs["last_token"], accepted.newest)
            if accepted.logprobs is not None and top is not None:
                self._first_logprobs.rows(len(sampled), top).copy_(accepted.logprobs)
                logprobs = self._first_logprobs.fetch(len(sampled), top)
        if device.drafter is not None:
            carry = device.drafter.read_prompt(self._chunk(layout, inputs, next_ids, hidden))
            if accepted is not None:
                kv_len = max(s.end for s in segments) + device.geometry.max_window
                draft(device, device.drafter, accepted, carry, kv_len=kv_len, mode=mode)
        return logprobs

    def _chunk(
        self,
        layout: PrefillLayout,
        inputs: Mapping[str, Tensor],
        next_ids: Tensor,
        hidden: Tensor,
    ) -> PromptChunk:
        backend = self._device.backend
        return PromptChunk(
            slots=inputs["slot_of_token"],
            positions=inputs["positions"],
            token_ids=inputs["token_ids"],
            next_ids=next_ids,
            hidden=hidden,
            shifted=AttentionBatch(
                positions=inputs["positions"] + 1,
                kv_write=inputs["shifted_write"],
                attention=backend.plan_prefill(inputs["shifted_read"], layout.segments),
            ),
            last_token=inputs["last_token"],
        )

    def _batch(self, layout: PrefillLayout, inputs: Mapping[str, Tensor]) -> PrefillBatch:
        return PrefillBatch(
            positions=inputs["positions"],
            kv_write=inputs["kv_write"],
            attention=self._device.backend.plan_prefill(inputs["kv_read"], layout.segments),
            chunks=ChunkIndices(
                gather=inputs["gather"],
                scatter=inputs["scatter"],
                active=layout.active,
                init_rows=inputs["init_rows"],
                final_rows=inputs["final_rows"],
            ),
            conv_prefix=inputs["conv_prefix"],
            conv_write=inputs["conv_write"],
            conv_taps=inputs["conv_taps"],
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
