"""Short depthwise causal convolution over gathered taps; the definition, and the CPU path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SegmentIndices:
    """Where the segments of a chunk find what came before them, and leave what comes after.

    Rows are those of the chunk's inputs, T in all, then those of the prefix.
    """

    prefix: Tensor  # [P] int64 entries of the ring, as it is before any row is kept
    taps: Tensor  # [at least width, T] int64 rows: of the widest convolution, a token's own last
    keep: Tensor  # [N] int64 rows that outlive the chunk: in a slot's ring, in a tail
    write: Tensor  # [N] int64 entries that they go to; rows that share one are the same


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
    the token, of a tree its ancestors. Sums in at least float32.
    """
    acc = torch.promote_types(source.dtype, torch.float32)
    width, num_tokens = taps.shape
    tapped = source.index_select(0, taps.reshape(-1)).view(width, num_tokens, -1).to(acc)
    out = (tapped * weight.to(acc).t()[:, None]).sum(0)
    if bias is not None:
        out = out.add_(bias)
    if activation == "silu":
        out = torch.nn.functional.silu(out)
    return out.to(source.dtype)


def convolve_segments(
    inputs: Tensor,  # [T, C]
    ring: Tensor,  # [entries, C], written
    indices: SegmentIndices,
    weight: Tensor,  # [C, width]
    bias: Tensor | None,  # [C]
    *,
    activation: Literal["silu", "none"],
) -> Tensor:  # [T, C] in ring's dtype
    """Return `causal_conv` over a chunk's inputs and its prefix, and keep rows in the ring."""
    source = torch.cat((inputs, ring.index_select(0, indices.prefix)))
    ring.index_copy_(0, indices.write, source.index_select(0, indices.keep))
    taps = indices.taps[-weight.shape[1] :]
    return causal_conv(source, taps, weight, bias, activation=activation)


def convolve_segments_qkv(
    inputs: Tensor,  # [T, C]: all q, all k, all v
    ring: Tensor,  # [entries, C], written
    indices: SegmentIndices,
    weight: Tensor,  # [C, width]
    *,
    num_heads: int,  # H, of q as of k
    key_dim: int,
    l2norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # [T, H * K] twice, and [T, the rest of C]
    """Return `convolve_segments` with SiLU taken apart, q and k normalised by head.

    That is x * rsqrt(sum(x^2) + eps) of what the convolution gives in ring's dtype, in which it is
    rounded once more.
    """
    out = convolve_segments(inputs, ring, indices, weight, None, activation="silu")
    size = num_heads * key_dim
    q, k, v = out.split([size, size, out.shape[1] - 2 * size], dim=1)
    return _normalised(q, key_dim, l2norm_eps), _normalised(k, key_dim, l2norm_eps), v


def _normalised(x: Tensor, key_dim: int, eps: float) -> Tensor:
    heads = x.reshape(len(x), -1, key_dim).to(torch.promote_types(x.dtype, torch.float32))
    heads = heads * (heads * heads).sum(-1, keepdim=True).add_(eps).rsqrt_()
    return heads.flatten(1).to(x.dtype)


def convolve_window(
    inputs: Tensor,  # [B * W, C]
    ring: Tensor,  # [entries, C], written
    write: Tensor,  # [B * W] int64 entries
    taps: Tensor,  # [width, B * W] int64 entries, the token's own last
    weight: Tensor,  # [C, width]
    bias: Tensor | None,  # [C]
    *,
    num_rows: int,  # B
    activation: Literal["silu", "none"],
) -> Tensor:  # [B * W, C] in ring's dtype
    """Put the inputs of B windows into the ring, and return `causal_conv` over the ring.

    Rows are independent: the taps of a row's tokens name no entry that another row writes, save
    those of padded rows, whose outputs are anything.
    """
    assert len(write) % num_rows == 0, "every row has a window of the same length"
    ring.index_copy_(0, write, inputs)
    return causal_conv(ring, taps, weight, bias, activation=activation)
