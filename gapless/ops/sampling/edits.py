"""Bias and penalties: what changes logits before a token is chosen; also the CPU path.

A token's logit z becomes, one after the other,

    z + bias
    z / r  if z > 0 else  z * r     where the token is in prompt or output (repetition r)
    z - f * n - p * [n > 0]         for n times in the output (frequency f, presence p)

the first penalty as in Keskar et al. 2019, "CTRL", section 4.1, with a sign rule that makes every
r > 1 discourage; the others as in OpenAI's API.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from gapless.ops.draft_tree import unpack

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class EditRows:
    """Bias, penalties and the tokens that they weigh, one entry per row."""

    repetition: Tensor  # [B] float32, above 0; 1 is none
    frequency: Tensor  # [B] float32
    presence: Tensor  # [B] float32
    bias_ids: Tensor  # [B, 64] int64, each once; -1 is unused
    bias: Tensor  # [B, 64] float32
    in_prompt: Tensor  # [B, V] bool
    output_counts: Tensor  # [B, V] int32

    def after(
        self,
        tokens: Tensor,  # [B, N] int64
        is_output: Tensor | None = None,  # [B, N] bool; None is all
    ) -> EditRows:
        """Return the rows with some more tokens of output each."""
        dtype = self.output_counts.dtype
        ones = torch.ones_like(tokens, dtype=dtype) if is_output is None else is_output.to(dtype)
        return replace(self, output_counts=self.output_counts.scatter_add(1, tokens, ones))

    def repeated(self, count: int) -> EditRows:
        """Return each row `count` times in a row."""
        parts: dict[str, Tensor] = vars(self)
        return EditRows(
            **{
                name: part[:, None].expand(-1, count, -1).flatten(0, 1)
                if part.ndim == 2
                else part[:, None].expand(-1, count).flatten()
                for name, part in parts.items()
            }
        )


def edit_logits(
    logits: Tensor,  # [B, V] float32 or wider; not modified
    rows: EditRows,
) -> Tensor:  # [B, V]
    """Apply each row's bias and penalties; a row that has none keeps its values."""
    dtype = logits.dtype
    logits = logits + _dense_bias(rows, logits)
    is_output = rows.output_counts > 0
    repetition = torch.where(is_output | rows.in_prompt, rows.repetition.to(dtype)[:, None], 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - rows.frequency.to(dtype)[:, None] * rows.output_counts.to(dtype)
    return logits - rows.presence.to(dtype)[:, None] * is_output.to(dtype)


def edit_windows(
    logits: Tensor,  # [B, W, V]: after each window token; not modified
    window: Tensor,  # [B, W] int64: the newest token, which the rows count, then the drafts
    rows: EditRows,
) -> Tensor:  # [B, W, V]
    """Apply `edit_logits` at every window position, counting the drafts before it as output."""
    edited = []
    for position in range(window.shape[1]):
        if position:
            rows = rows.after(window[:, position : position + 1])
        edited.append(edit_logits(logits[:, position], rows))
    return torch.stack(edited, dim=1)


def edit_trees(
    logits: Tensor,  # [B, W, V]: after each node; not modified
    window: Tensor,  # [B, W] int64: the newest token, which the rows count, then the drafts
    bits: Tensor,  # [B, W] int64: `draft_tree.ancestor_bits`
    rows: EditRows,
) -> Tensor:  # [B, W, V]
    """Apply `edit_logits` at every node, counting the drafts on the path to it as output."""
    on_path = unpack(bits, window.shape[1])
    edited = [edit_logits(logits[:, 0], rows)]
    for node in range(1, window.shape[1]):
        drafts = slice(1, node + 1)
        counted = rows.after(window[:, drafts], on_path[:, node, drafts])
        edited.append(edit_logits(logits[:, node], counted))
    return torch.stack(edited, dim=1)


def _dense_bias(rows: EditRows, logits: Tensor) -> Tensor:  # [B, V]
    vocab_size = logits.shape[1]
    # unused entries write to a column beyond the vocabulary
    column = rows.bias_ids.masked_fill(rows.bias_ids < 0, vocab_size)
    dense = logits.new_zeros(logits.shape[0], vocab_size + 1)
    return dense.scatter_(1, column, rows.bias.to(logits.dtype))[:, :vocab_size]
