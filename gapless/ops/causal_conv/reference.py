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
    by_tap = weight.to(acc).t()
    out = torch.zeros((), dtype=acc, device=source.device) if bias is None else bias.to(acc)
    for rows, tap_weight in zip(taps.unbind(0), by_tap.unbind(0), strict=True):
        out = torch.addcmul(out, source.index_select(0, rows).to(acc), tap_weight)
    if activation == "silu":
        out = torch.nn.functional.silu(out)
    return out.to(source.dtype)
