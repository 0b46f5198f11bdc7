"""The slot table: everything that crosses steps, on the device, one row per slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gapless.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS
from gapless.ops.acceptance import AcceptColumns
from gapless.ops.sampling import EditRows, SamplingColumns, SamplingRows
from gapless.ops.step_metadata import Geometry, SlotColumns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gapless.core.plan import PrefillSegment

# columns that a prefill segment sets from its request, by name
REQUEST_COLUMNS = (
    "limit_len", "min_len", "stop_ids", "temperature", "top_k", "top_p", "min_p", "seeds",
    "repetition", "frequency", "presence", "bias_ids", "bias",
)  # fmt: skip


class SlotTable:
    """Device columns indexed by slot; the last row is the null slot, done for ever at length 0."""

    def __init__(
        self, geometry: Geometry, num_page_columns: int, vocab_size: int, device: torch.device
    ) -> None:
        rows = geometry.num_slots + 1
        self._vocab_size = vocab_size

        def column(fill: float, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((rows, *shape), fill, dtype=dtype, device=device)

        self.columns = SlotColumns(
            seq_lens=column(0),
            checkpoint_len=column(0),
            state_rows=column(geometry.null_row),
            done=column(1, dtype=torch.bool),
            page_table=column(geometry.null_page, num_page_columns),
            window_tokens=column(0, geometry.max_window),
        )
        # as many as there may be, unless the drafter counts them
        self.num_drafts = column(geometry.max_window - 1)
        # of tree drafts: a bit for each node on the path to a node; a row of drafts to begin with
        self.draft_bits = column(0, geometry.max_window)
        self.draft_bits.copy_((2 << torch.arange(geometry.max_window, device=device)) - 1)
        self.limit_len = column(0)
        self.min_len = column(0)
        self.stop_ids = column(-1, MAX_STOP_IDS)
        self.temperature = column(0, dtype=torch.float32)
        self.top_k = column(0)
        self.top_p = column(1, dtype=torch.float32)
        self.min_p = column(0, dtype=torch.float32)
        self.seeds = column(0)
        self.repetition = column(1, dtype=torch.float32)
        self.frequency = column(0, dtype=torch.float32)
        self.presence = column(0, dtype=torch.float32)
        self.bias_ids = column(-1, MAX_LOGIT_BIAS)
        self.bias = column(0, MAX_LOGIT_BIAS, dtype=torch.float32)
        # right for slots whose request has penalties, anything for the others
        self.in_prompt = column(0, vocab_size, dtype=torch.bool)
        self.output_counts = column(0, vocab_size, dtype=torch.int32)

    @property
    def window_tokens(self) -> Tensor:
        """The newest token of each slot, then its drafts: [slots + 1, W_max] int64."""
        return self.columns.window_tokens

    @property
    def accept_columns(self) -> AcceptColumns:
        """The columns that acceptance reads or writes."""
        return AcceptColumns(
            seq_lens=self.columns.seq_lens,
            checkpoint_len=self.columns.checkpoint_len,
            done=self.columns.done,
            window_tokens=self.window_tokens,
            num_drafts=self.num_drafts,
            limit_len=self.limit_len,
            stop_ids=self.stop_ids,
        )

    def sampling_rows(self, slots: Tensor, *, repeat: int) -> SamplingRows:
        """Name the parameters of `repeat` rows of logits for each of `slots` [B]."""
        columns = SamplingColumns(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            min_len=self.min_len,
            stop_ids=self.stop_ids,
        )
        return SamplingRows(columns, slots, repeat)

    def edit_rows(self, slots: Tensor) -> EditRows:
        """Gather bias, penalties and counted tokens of `slots` [B]."""
        return EditRows(
            repetition=self.repetition.index_select(0, slots),
            frequency=self.frequency.index_select(0, slots),
            presence=self.presence.index_select(0, slots),
            bias_ids=self.bias_ids.index_select(0, slots),
            bias=self.bias.index_select(0, slots),
            in_prompt=self.in_prompt.index_select(0, slots),
            output_counts=self.output_counts.index_select(0, slots),
        )

    def recount(self, inputs: Mapping[str, Tensor]) -> None:
        """Count slots' tokens afresh; `inputs` as `count_arrays` packs them."""
        slots, output = inputs["counted_slots"], inputs["output_entries"]
        self.in_prompt.index_fill_(0, slots, value=False)
        self.in_prompt.view(-1).index_fill_(0, inputs["prompt_entries"], value=True)
        self.output_counts.index_fill_(0, slots, value=0)
        ones = torch.ones_like(output, dtype=torch.int32)
        self.output_counts.view(-1).scatter_add_(0, output, ones)

    def count(self, slots: Tensor, tokens: Tensor, is_emitted: Tensor) -> None:
        """Count what a step emitted: `tokens` [B, W] of `slots` [B], where `is_emitted` [B, W]."""
        entries = slots[:, None] * self._vocab_size + tokens
        self.output_counts.view(-1).scatter_add_(
            0, entries.view(-1), is_emitted.to(torch.int32).view(-1)
        )

    def admit(self, inputs: Mapping[str, Tensor]) -> None:
        """Write the rows of a prefill chunk's slots; `inputs` as `admission_arrays` packs them."""
        slots, end = inputs["slots"], inputs["end"]
        columns = self.columns
        columns.page_table.index_copy_(0, slots, inputs["null_pages"].expand(slots.shape[0], -1))
        columns.page_table.view(-1).index_copy_(0, inputs["page_index"], inputs["page_value"])
        columns.seq_lens.index_copy_(0, slots, end)
        columns.checkpoint_len.index_copy_(0, slots, end)
        columns.state_rows.index_copy_(0, slots, inputs["state_rows"])
        columns.done.index_copy_(0, slots, inputs["is_partial"])
        for name, column in self._request_columns().items():
            column.index_copy_(0, slots, inputs[name])

    def _request_columns(self) -> dict[str, Tensor]:
        own: dict[str, Any] = vars(self)
        return {name: own[name] for name in REQUEST_COLUMNS}


def admission_arrays(
    segments: tuple[PrefillSegment, ...], num_page_columns: int, null_page: int
) -> dict[str, np.ndarray]:
    """Pack what the slot table must know of a prefill chunk's segments."""
    stop_ids = np.full((len(segments), MAX_STOP_IDS), -1, np.int64)
    for i, segment in enumerate(segments):
        stop_ids[i, : len(segment.request.stop_ids)] = segment.request.stop_ids
    params = [segment.request.params for segment in segments]
    bias_ids, bias = _bias_arrays([p.logit_bias or {} for p in params])
    return {
        "slots": np.array([s.slot for s in segments], np.int64),
        "end": np.array([s.end for s in segments], np.int64),
        "state_rows": np.array([s.state_row for s in segments], np.int64),
        "is_partial": np.array([not s.is_last for s in segments], np.bool_),
        "null_pages": np.full(num_page_columns, null_page, np.int64),
        "page_index": np.concatenate(
            [s.slot * num_page_columns + np.arange(len(s.pages)) for s in segments]
        ).astype(np.int64),
        "page_value": np.concatenate([np.array(s.pages, np.int64) for s in segments]),
        "limit_len": np.array([s.request.limit_len for s in segments], np.int64),
        "min_len": np.array([s.request.min_len for s in segments], np.int64),
        "stop_ids": stop_ids,
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int64),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seeds": np.array([s.request.seed for s in segments], np.int64),
        "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], np.float32),
        "presence": np.array([p.presence_penalty for p in params], np.float32),
        "bias_ids": bias_ids,
        "bias": bias,
    }


def count_arrays(segments: Sequence[PrefillSegment], vocab_size: int) -> dict[str, np.ndarray]:
    """Pack the tokens that penalties weigh, prompt and output apart.

    Whole requests, whatever of them was cached or run in earlier chunks; so only segments that
    sample a token are wanted, and the others count nothing.
    """
    counted = [s for s in segments if s.is_last and s.request.params.has_penalties]
    prompt = [s.slot * vocab_size + np.array(s.request.prompt_ids, np.int64) for s in counted]
    output = [s.slot * vocab_size + np.array(_generated(s), np.int64) for s in counted]
    nothing = np.zeros(0, np.int64)
    return {
        "counted_slots": np.array([s.slot for s in counted], np.int64),
        "prompt_entries": np.concatenate([nothing, *prompt]),
        "output_entries": np.concatenate([nothing, *output]),
    }


def _generated(segment: PrefillSegment) -> list[int]:
    """Tokens that the request had generated when it was retracted."""
    return segment.request.token_ids[len(segment.request.prompt_ids) : segment.end]


def _bias_arrays(biases: Sequence[Mapping[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(biases), MAX_LOGIT_BIAS), -1, np.int64)
    values = np.zeros((len(biases), MAX_LOGIT_BIAS), np.float32)
    for i, bias in enumerate(biases):
        ids[i, : len(bias)] = list(bias)
        values[i, : len(bias)] = list(bias.values())
    return ids, values
