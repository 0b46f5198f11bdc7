"""Short depthwise causal convolution over gathered taps; the definition, and the CPU path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


def causal_conv(
    source: Tensor,  # [N, C]
    taps: Tensor,  # [width, T] int64 rows of source, the token's own last
    weight: Tensor,  # [C, width]
    bias: Tensor | None,  # [C]
    *,
    activation: Literal["silu", "none"],
) -> Tensor:  # [T, C] in source's dtype
    """Return act(sum_w weight[:, w] source[taps[w]] + bias) for every token.

    A zero row of `source` stands for positions below 0. Taps of a chain are the positions before
    the token, of a tree its ancestors. Sums oldest tap first, in at least float32.
    """
    acc = torch.promote_types(source.dtype, torch.float32)
    # contiguous rows per tap: broadcasting a transposed view takes three times as long
    first, *later = weight.to(acc).t().contiguous().unbind(0)
    rows = source.index_select(0, taps.reshape(-1)).to(acc).view(*taps.shape, -1)
    out = rows[0] * first if bias is None else torch.addcmul(bias.to(acc), rows[0], first)
    for tap, tap_weight in enumerate(later, start=1):
        out.addcmul_(rows[tap], tap_weight)
    if activation == "silu":
        out = torch.nn.functional.silu(out)
    return out.to(source.dtype)
