"""Counter-based noise: Philox4x32-10 keyed by seed, position and token id.

Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section 4.3. Words are held in
int64. Its products wrap modulo 2^64, so their low 32 bits are right, and so are bits 32 to 63
after an arithmetic shift, once masked; the masks are put off to where a word is multiplied or
returned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROUNDS = 10
WORD_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LARGEST_UNIFORM = 1.0 - 2.0**-24


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],  # int64 words below 2^32, broadcastable
    key: tuple[Tensor, Tensor],  # int64 words below 2^32, broadcastable
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # int64 words below 2^32
    """Return the four random words of every counter under its key."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for number in range(NUM_ROUNDS):
        if number:
            k0, k1 = k0 + KEY_STEPS[0], k1 + KEY_STEPS[1]
        product0, product2 = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0 = ((product2 >> 32) ^ (x1 ^ k0)) & WORD_MASK
        x2 = ((product0 >> 32) ^ (x3 ^ k1)) & WORD_MASK
        x1, x3 = product2, product0
    return x0, x1 & WORD_MASK, x2, x3 & WORD_MASK


def gumbel_noise(
    seeds: Tensor,  # [N] int64, all 64 bits used
    positions: Tensor,  # [N] int64
    num_ids: int,
    first: int = 0,
) -> Tensor:  # [N, num_ids] float32
    """Return standard Gumbel noise, a function of (seed, position, token id) alone.

    That of `num_ids` tokens from id `first` on. Id i takes word i % 4 of counter (i // 4, position,
    0, 0). With u = (word + 1/2) 2^-32, kept below 1, the noise is -log(-log1p(-u)): fine where it
    is large, which decides an argmax.
    """
    lead = first % 4
    counters = first // 4, -(-(first + num_ids) // 4)
    block = torch.arange(*counters, dtype=torch.int64, device=seeds.device)[None]
    position = positions.to(torch.int64)[:, None] & WORD_MASK
    nothing = torch.zeros_like(position)
    seed = seeds[:, None]
    key = (seed & WORD_MASK, (seed >> 32) & WORD_MASK)
    words = philox((block, position, nothing, nothing), key)
    uniform = torch.stack([word.to(torch.float32) for word in words], dim=-1)
    uniform = uniform.add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_().flatten(1)[:, lead : lead + num_ids]
