"""The prefill chunk: packed prompt segments through chunked kernels, metadata decided on the host.

Everything a chunk needs is integers that the host knows, so they are laid out once per forward
(`runner/layout.py`), sent in one copy, and read by every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.sampling_params import MAX_LOGIT_BIAS
from gapless.layers.batch import AttentionBatch, PrefillBatch
from gapless.ops.linear_chunk import ChunkIndices, wave_indices
from gapless.ops.sampling import packed_logprobs
from gapless.runner.accept import Verified, accept, draft, sampling_mode
from gapless.runner.inputs import Upload
from gapless.runner.layout import CHUNK_LEN, PrefillLayout, lay_out
from gapless.runner.logprobs import LogprobBuffer, LogprobTicket, PrefillLogprobs, num_top
from gapless.runner.masks import NO_DRAFTS
from gapless.runner.slot_table import count_arrays
from gapless.speculative.drafter import KeptTokens, PastTokens, PromptChunk, ShiftedChunk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from gapless.config.resolve import Config
    from gapless.core.plan import PrefillSegment
    from gapless.runner.device import Device
    from gapless.runner.masks import MaskUpload

# rows of full-vocabulary logits alive at once when prompt log-probabilities are asked for
LOGPROB_ROWS = 256


class PrefillRunner:
    """Runs prefill chunks eagerly."""

    def __init__(
        self, device: Device, config: Config, first_tokens: Tensor, masks: MaskUpload
    ) -> None:
        """Args: first_tokens: [max segments] int64, where sampled tokens go in plan order."""
        self._device = device
        self._first_tokens = first_tokens
        self._masks = masks
        tokens = config.chunked_prefill_size
        segments = min(tokens, config.max_running_requests)
        width = device.geometry.conv_width
        pages = device.geometry.num_pages + device.num_page_columns
        entries = config.num_pages * config.page_size
        per_token = 13 + width + 2
        per_segment = CHUNK_LEN + 4 * width + 64 + 2 * MAX_LOGIT_BIAS
        elements = tokens * per_token + segments * per_segment + 2 * pages + 3 * entries + 1024
        # enough for requests that share no pages and store one snapshot each; else it grows
        self._upload = Upload(8 * elements, device.device)
        self._prompt_logprobs = LogprobBuffer(tokens, device.device)
        self._first_logprobs = LogprobBuffer(segments, device.device)

    def run(self, segments: tuple[PrefillSegment, ...]) -> PrefillLogprobs:
        """Launch one chunk: KV, rings, checkpoints, and the first token of each last segment."""
        device = self._device
        layout = lay_out(
            segments, device.geometry, device.num_page_columns, self._with_past(segments)
        )
        counts = count_arrays(segments, device.model.architecture.vocab_size)
        arrays = layout.arrays | counts
        self._upload.reserve(arrays)
        inputs = self._upload.send(arrays)
        device.table.admit(inputs)
        if counts["counted_slots"].size:
            device.table.recount(inputs)
        hidden = device.model.forward(
            inputs["token_ids"], device.memory, self._batch(layout, inputs)
        )
        prompt = self._score(segments, hidden, inputs["successors"])
        return PrefillLogprobs(prompt, self._settle(segments, layout, inputs, hidden))

    def _with_past(self, segments: tuple[PrefillSegment, ...]) -> list[PrefillSegment]:
        """Segments whose cached tokens the drafter has not read, and wants to."""
        drafter = self._device.drafter
        if drafter is None or not drafter.reads_past:
            return []
        return [s for s in segments if s.is_first and s.start]

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
            verified = Verified(inputs["sampled_slots"], end - 1, end, logits, None)
            masks = None
            if any(request.is_constrained for request in sampled):
                self._masks.send(sampled, [NO_DRAFTS] * len(sampled), 1)
                masks = self._masks.rows(len(sampled), 1)
            accepted = accept(device, verified, mode, top, masks)
            self._first_tokens[: len(sampled)].copy_(accepted.newest)
            next_ids = next_ids.index_copy(0, inputs["last_token"], accepted.newest)
            if accepted.logprobs is not None and top is not None:
                self._first_logprobs.rows(len(sampled), top).copy_(accepted.logprobs)
                logprobs = self._first_logprobs.fetch(len(sampled), top)
        if device.drafter is not None:
            carry = device.drafter.read_prompt(self._chunk(layout, inputs, next_ids, hidden))
            if accepted is not None:
                kv_len = max(s.end for s in segments) + device.step_reach
                draft(device, device.drafter, accepted, carry, kv_len=kv_len, mode=mode)
        return logprobs

    def _chunk(
        self,
        layout: PrefillLayout,
        inputs: Mapping[str, Tensor],
        next_ids: Tensor,
        hidden: Tensor,
    ) -> PromptChunk:
        attention = self._device.backend.plan_prefill(
            inputs["shifted_read"], layout.shifted_segments
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
                    live=None,
                ),
                order=inputs["shifted_order"],
                resumed_rows=inputs["resumed_rows"],
                resumed_ids=inputs["resumed_ids"],
                last_token=inputs["shifted_last"],
            ),
            past=PastTokens(inputs["past_slots"], inputs["past_positions"], inputs["past_ids"]),
            kept=KeptTokens(inputs["ends"], inputs["snapshot_tokens"], inputs["snapshot_rows"]),
        )

    def _batch(self, layout: PrefillLayout, inputs: Mapping[str, Tensor]) -> PrefillBatch:
        return PrefillBatch(
            positions=inputs["positions"],
            kv_write=inputs["kv_write"],
            attention=self._device.backend.plan_prefill(inputs["kv_read"], layout.segments),
            live=None,
            chunks=ChunkIndices(
                gather=inputs["gather"],
                scatter=inputs["scatter"],
                active=layout.active,
                init_rows=inputs["init_rows"],
                final_rows=inputs["final_rows"],
                num_cuts=layout.num_cuts,
                cut_places=inputs["cut_places"],
                cut_rows=inputs["cut_rows"],
                waves=wave_indices(inputs, layout.waves),
            ),
            conv_prefix=inputs["conv_prefix"],
            conv_taps=inputs["conv_taps"],
            conv_keep=inputs["conv_keep"],
            conv_write=inputs["conv_write"],
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
