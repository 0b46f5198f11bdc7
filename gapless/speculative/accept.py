"""How many tokens of a window are emitted: drafts are kept while they equal the target's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Acceptance:
    """What one step emits, B rows."""

    lens: Tensor  # [B] int64, 1 .. W
    newest: Tensor  # [B] int64: the last token emitted
    ends: Tensor  # [B] bool: whether it ends its request


def accept_chain(
    sampled: Tensor,  # [B, W] int64: the target's token after each window position
    window: Tensor,  # [B, W] int64: the newest token, then the drafts
    total_len: Tensor,  # [B] int64: tokens of the request before this step, window[:, 0] included
    limit_len: Tensor,  # [B] int64
    stop_ids: Tensor,  # [B, S] int64, -1 where unused
    num_drafts: Tensor,  # [B] int64: window tokens after the first that are proposals
    forced: Tensor | None = None,  # [B] int64: drafts to keep whatever they are, for benchmarks
) -> Acceptance:
    """Emit sampled tokens up to the first that no draft foretold, or that ends the request."""
    width = sampled.shape[1]
    is_stop = (sampled[:, :, None] == stop_ids[:, None, :]).any(-1)
    lens_after = total_len[:, None] + torch.arange(1, width + 1, device=sampled.device)
    ends = is_stop | (lens_after >= limit_len[:, None])
    if width == 1:
        return Acceptance(torch.ones_like(total_len), sampled[:, 0], ends[:, 0])
    depth = torch.arange(width - 1, device=sampled.device)
    is_kept = sampled[:, :-1] == window[:, 1:] if forced is None else depth < forced[:, None]
    goes_on = is_kept & ~ends[:, :-1] & (depth < num_drafts[:, None])
    last = goes_on.long().cumprod(-1).sum(-1)
    at_last = last[:, None]
    return Acceptance(last + 1, sampled.gather(1, at_last)[:, 0], ends.gather(1, at_last)[:, 0])
