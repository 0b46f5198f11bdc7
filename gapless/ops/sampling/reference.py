"""Choosing a token per row: minimum length, temperature, filters, noise; also the CPU path.

With noise that is a function of (seed, position, token id), argmax(log p + Gumbel) is an exact
sample of p (the Gumbel-max trick) that depends on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from gapless.ops.sampling.philox import gumbel_noise

if TYPE_CHECKING:
    from torch import Tensor

NEG_INF = float("-inf")


class SamplingMode(Enum):
    """How much of sampling a batch needs: the host's word about all of its rows."""

    ARGMAX = "argmax"  # no temperature, no edits of logits
    GREEDY = "greedy"  # no temperature
    PLAIN = "plain"  # no filters, no edits of logits
    DRAWN = "drawn"  # no edits of logits
    SAMPLED = "sampled"

    @property
    def is_greedy(self) -> bool:
        """Whether no row has a temperature."""
        return self in (SamplingMode.ARGMAX, SamplingMode.GREEDY)

    @property
    def edits_logits(self) -> bool:
        """Whether some row has a bias, a penalty or a minimum length."""
        return self in (SamplingMode.GREEDY, SamplingMode.SAMPLED)

    @property
    def is_plain(self) -> bool:
        """Whether a row's token is its largest perturbed logit: no filters, no edits."""
        return self in (SamplingMode.ARGMAX, SamplingMode.PLAIN)


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters, one entry per slot; contiguous."""

    temperature: Tensor  # [slots] float32; 0 is greedy
    top_k: Tensor  # [slots] int64; 0 or less keeps all
    top_p: Tensor  # [slots] float32; 1 keeps all
    min_p: Tensor  # [slots] float32; 0 keeps all
    seeds: Tensor  # [slots] int64
    min_len: Tensor  # [slots] int64: positions below it may not hold a stop id
    stop_ids: Tensor  # [slots, 8] int64; -1 is unused


@dataclass(frozen=True)
class SamplingRows:
    """Whose parameters N rows of logits are under: `repeat` in a row are of one slot."""

    columns: SamplingColumns
    slots: Tensor  # [N / repeat] int64, contiguous
    repeat: int = 1

    def of(self, column: Tensor) -> Tensor:  # [slots, ...] -> [N, ...]
        """Gather each row's entry of a column."""
        found = column.index_select(0, self.slots)
        if self.repeat == 1:
            return found
        return found[:, None].expand(-1, self.repeat, *found.shape[1:]).flatten(0, 1)


def sample(
    logits: Tensor,  # [N, V] float32 or wider, bias and penalties applied; not modified
    positions: Tensor,  # [N] int64: position that the sampled token will occupy
    rows: SamplingRows,
    *,
    mode: SamplingMode,
) -> Tensor:  # [N] int64
    """Return one token id per row; ties go to the lowest id.

    Stop ids are masked below the minimum length. Then, for rows with a temperature: division by
    it, top-k, top-p of what top-k left, min-p, each keeping every token at its threshold, Gumbel
    noise, argmax. `mode` leaves out what no row needs.
    """
    if mode.edits_logits:
        logits = _mask_stop_ids(logits, positions, rows)
    # argmax returns the first maximum of a row
    greedy = logits.argmax(-1)
    if mode.is_greedy:
        return greedy
    temperature = rows.of(rows.columns.temperature)
    is_greedy = temperature == 0
    kept = logits / temperature.masked_fill(is_greedy, 1.0).to(logits.dtype)[:, None]
    if not mode.is_plain:
        kept = kept.masked_fill(kept < _threshold(kept, rows), NEG_INF)
    noise = gumbel_noise(rows.of(rows.columns.seeds), positions, logits.shape[1])
    return torch.where(is_greedy, greedy, (kept + noise).argmax(-1))


def _mask_stop_ids(logits: Tensor, positions: Tensor, rows: SamplingRows) -> Tensor:
    num_rows, vocab_size = logits.shape
    stop_ids = rows.of(rows.columns.stop_ids)
    is_early = (positions < rows.of(rows.columns.min_len))[:, None]
    is_id = (stop_ids >= 0) & (stop_ids < vocab_size)
    # unused entries mark a column beyond the vocabulary
    column = torch.where(is_early & is_id, stop_ids, vocab_size)
    masked = torch.zeros(num_rows, vocab_size + 1, dtype=torch.bool, device=logits.device)
    masked.scatter_(1, column, value=True)
    return logits.masked_fill(masked[:, :vocab_size], NEG_INF)


def _threshold(scaled: Tensor, rows: SamplingRows) -> Tensor:  # [N, 1]
    """Return the least logit that top-k, top-p and min-p all keep."""
    vocab_size, columns = scaled.shape[1], rows.columns
    top_k, top_p, min_p = (rows.of(x) for x in (columns.top_k, columns.top_p, columns.min_p))
    descending = scaled.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    by_top_k = descending.gather(1, last[:, None] - 1)

    share = descending.masked_fill(descending < by_top_k, NEG_INF).softmax(-1)
    before = share.cumsum(-1) - share
    num_kept = (before < top_p.to(share.dtype)[:, None]).sum(-1, keepdim=True)
    by_top_p = descending.gather(1, num_kept.clamp(min=1) - 1)
    # rounding may bring the sum of shares to 1 early: all means all
    by_top_p = by_top_p.masked_fill(top_p[:, None] >= 1, NEG_INF)

    by_min_p = descending[:, :1] + min_p.to(scaled.dtype).log()[:, None]
    return torch.maximum(torch.maximum(by_top_k, by_top_p), by_min_p)
