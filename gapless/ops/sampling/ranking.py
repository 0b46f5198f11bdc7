"""Tokens that the target is likely to sample, judged by logits that foretell its own.

The target samples the argmax of its perturbed logits: edited, divided by the temperature, filtered,
with noise added that is known beforehand. So the best guesses are the largest of a draft's logits
under the same treatment; by how much they stand out says how good they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.ops.sampling.logprobs import most_likely
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
    perturbed = logits
    if noise is not None:
        is_greedy = (temperature == 0)[:, None]
        scaled = logits / temperature.to(logits.dtype)[:, None].masked_fill(is_greedy, 1.0)
        perturbed = scaled + noise.masked_fill(is_greedy, 0.0)
    best = perturbed.gather(1, sampled[:, None])
    perturbed = perturbed.masked_fill(perturbed > best, NEG_INF)
    ids, logprobs = most_likely(perturbed.log_softmax(-1), count)
    # of a row without numbers, such as a padded one may be, the ids mean nothing
    return ids.clamp(max=logits.shape[1] - 1), logprobs
