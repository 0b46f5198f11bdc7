"""Log-probabilities of chosen and of the most likely tokens; also the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def packed_logprobs(
    logits: Tensor,  # [N, V] float32 or wider: the model's own, with no edits
    tokens: Tensor,  # [N] int64
    num_top: int,
) -> Tensor:  # [N, 1 + 2 * num_top] float64
    """Return natural log-probabilities, packed so that one copy takes all of them.

    A row holds that of its token, then the ids of the `num_top` most likely tokens, then their
    log-probabilities, largest first; ties go to the lowest id.
    """
    logprobs = logits.log_softmax(-1)
    parts = [logprobs.gather(1, tokens[:, None])]
    if num_top:
        parts += most_likely(logprobs, num_top)
    return torch.cat([part.to(torch.float64) for part in parts], dim=1)


def most_likely(values: Tensor, count: int) -> tuple[Tensor, Tensor]:  # [N, V] -> [N, count] twice
    """Return ids and values of each row's `count` largest, largest first, ties lowest id first.

    `topk` settles the values, but says nothing about which of several equal ones it takes. So the
    lowest ids that hold the least of them are found apart, and take the place of its own.
    """
    vocab_size = values.shape[1]
    top, ids = values.topk(count, dim=-1)
    least = top[:, -1:]
    ids = ids.masked_fill(top == least, vocab_size)
    descending = torch.arange(vocab_size, 0, -1, device=values.device)
    at_least = torch.where(values == least, descending, 0).topk(count, dim=-1).values
    # ascending, so that the stable sort by value keeps the order of ids among equals
    ids = torch.cat([ids, vocab_size - at_least], dim=1).sort(-1).values
    found = values.gather(1, ids.clamp(max=vocab_size - 1))
    found = found.masked_fill(ids == vocab_size, float("-inf"))
    order = found.sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order.indices[:, :count]), order.values[:, :count]
