"""Tokens that the target is likely to sample, judged by logits that foretell its own.

The target samples the argmax of its perturbed logits: edited, divided by the temperature, filtered,
with noise added that is known beforehand. So the best guesses are the largest of a draft's logits
under the same treatment; by how much they stand out says how good they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gapless.ops.sampling.reference import NEG_INF

if TYPE_CHECKING:
    from torch import Tensor


def rank_tokens(
    logits: Tensor,  # [N, V] float32 or wider, bias and penalties applied; not modified
    sampled: Tensor,  # [N] int64: what `sample` returns for them
    temperature: Tensor,  # [N] float32; 0 is greedy
    noise: Tensor | None,  # [N, V] float32, not added to greedy rows; None if all are greedy
    *,
    count: int,
) -> tuple[Tensor, Tensor]:  # [N, count] int64 and logits' dtype
    """Return tokens, best first, and log-softmax of their perturbed logits; `sampled` is the first.

    No sort finds what filters leave: a token that stands above the sampled one was filtered out,
    and counts for nothing here; what else they remove stays, behind it. Ties go to the lowest id.
    """
    perturbed = perturb(logits, temperature, noise)
    best = perturbed.gather(1, sampled[:, None])
    # above what stands for a token that is taken, so that none is taken twice
    nothing = torch.finfo(perturbed.dtype).min / 4
    return largest(perturbed.masked_fill(perturbed > best, nothing).log_softmax(-1), count)


def perturb(
    logits: Tensor,  # [N, V]; not modified
    temperature: Tensor,  # [N] float32; 0 is greedy
    noise: Tensor | None,  # [N, V] float32, not added to greedy rows; None if all are greedy
) -> Tensor:  # [N, V]: may be `logits`
    """Return logits over their row's temperature, with noise; those of greedy rows as they are."""
    if noise is None:
        return logits
    is_greedy = (temperature == 0)[:, None]
    scaled = logits / temperature.to(logits.dtype)[:, None].masked_fill(is_greedy, 1.0)
    return scaled.add_(noise.masked_fill(is_greedy, 0.0))


def largest(
    values: Tensor,  # [N, V]; spoilt
    count: int,
) -> tuple[Tensor, Tensor]:  # [N, count] int64 and values' dtype
    """Return indices and values of each row's largest, best first; ties go to the lowest index."""
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(count):
        # the first of several equal ones; a pass each, since `topk` leaves open which it takes
        value, index = values.max(-1, keepdim=True)
        values.scatter_(1, index, NEG_INF)
        found.append((index, value))
    indices, best = zip(*found, strict=True)
    return torch.cat(indices, dim=1), torch.cat(best, dim=1)
