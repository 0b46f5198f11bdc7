"""The convolutions of `reference.py` with float32 sums: a launch each, three for segments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import triton

from gapless.ops.causal_conv.kernels import (
    _convolve_segments_kernel,
    _convolve_segments_qkv_kernel,
    _convolve_window_kernel,
    _keep_rows_kernel,
)
from gapless.ops.chaining import chained

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.causal_conv.reference import SegmentIndices

BLOCK_TOKENS = 16
BLOCK_CHANNELS = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(ring: Tensor) -> str | None:
    """Return why the kernels cannot serve these inputs, None if they can."""
    return None if ring.dtype in _DTYPES else f"inputs of {ring.dtype}"


def convolve_segments(
    inputs: Tensor,
    ring: Tensor,
    indices: SegmentIndices,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Literal["silu", "none"],
) -> Tensor:
    """See `reference.convolve_segments`."""
    past, taps = _keep(inputs, ring, indices, weight)
    width, num_tokens = taps.shape
    channels = ring.shape[1]
    out = torch.empty(num_tokens, channels, dtype=ring.dtype, device=ring.device)
    block_c = _block_channels(channels)
    grid = (triton.cdiv(channels, block_c), triton.cdiv(num_tokens, BLOCK_TOKENS))
    _convolve_segments_kernel[grid](
        inputs,
        past,
        taps,
        weight,
        weight if bias is None else bias,
        out,
        num_tokens,
        inputs.stride(0),
        C=channels,
        WIDTH=width,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_C=block_c,
        HAS_BIAS=bias is not None,
        IS_SILU=activation == "silu",
        num_warps=4,
        **chained(inputs),
    )
    return out


def convolve_segments_qkv(
    inputs: Tensor,
    ring: Tensor,
    indices: SegmentIndices,
    weight: Tensor,
    *,
    num_heads: int,
    key_dim: int,
    l2norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.convolve_segments_qkv`; each is contiguous."""
    past, taps = _keep(inputs, ring, indices, weight)
    width, num_tokens = taps.shape
    key_size = num_heads * key_dim
    value_size = ring.shape[1] - 2 * key_size
    q, k, v = (
        torch.empty(num_tokens, size, dtype=ring.dtype, device=ring.device)
        for size in (key_size, key_size, value_size)
    )
    block_c = triton.next_power_of_2(key_dim)
    block_t = max(1, BLOCK_TOKENS * BLOCK_CHANNELS // block_c)
    grid = (2 * num_heads + triton.cdiv(value_size, block_c), triton.cdiv(num_tokens, block_t))
    _convolve_segments_qkv_kernel[grid](
        inputs,
        past,
        taps,
        weight,
        q,
        k,
        v,
        l2norm_eps,
        num_tokens,
        inputs.stride(0),
        H=num_heads,
        K=key_dim,
        V_SIZE=value_size,
        WIDTH=width,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
        **chained(inputs),
    )
    return q, k, v


def _keep(
    inputs: Tensor, ring: Tensor, indices: SegmentIndices, weight: Tensor
) -> tuple[Tensor, Tensor]:  # [P, C], [width, T]
    """Put the rows that outlive the chunk into the ring; return the prefix and the taps."""
    taps = indices.taps[-weight.shape[1] :]
    _check(inputs, ring, indices.keep, indices.write, weight, taps)
    # a copy: an entry that is written is another row's source, and that of taps
    past = ring.index_select(0, indices.prefix)
    num_tokens, channels = inputs.shape
    assert num_tokens == taps.shape[1], "the prefix follows the tokens that have taps"
    block_c = _block_channels(channels)
    _keep_rows_kernel[triton.cdiv(channels, block_c), len(indices.keep)](
        inputs,
        past,
        indices.keep,
        ring,
        indices.write,
        num_tokens,
        inputs.stride(0),
        C=channels,
        BLOCK_C=block_c,
        num_warps=1,
        **chained(inputs),
    )
    return past, taps


def convolve_window(
    inputs: Tensor,
    ring: Tensor,
    write: Tensor,
    taps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    num_rows: int,
    activation: Literal["silu", "none"],
) -> Tensor:
    """See `reference.convolve_window`. Each token's last tap is the token itself."""
    _check(inputs, ring, write, weight, taps)
    width, num_tokens = taps.shape
    window, rest = divmod(num_tokens, num_rows)
    assert rest == 0, "every row has a window of the same length"
    channels = ring.shape[1]
    out = torch.empty(num_tokens, channels, dtype=ring.dtype, device=ring.device)
    block_c = _block_channels(channels)
    _convolve_window_kernel[triton.cdiv(channels, block_c), num_rows](
        inputs,
        ring,
        write,
        taps,
        weight,
        weight if bias is None else bias,
        out,
        inputs.stride(0),
        num_tokens,
        C=channels,
        W=window,
        WIDTH=width,
        BLOCK_C=block_c,
        HAS_BIAS=bias is not None,
        IS_SILU=activation == "silu",
        num_warps=1,
        **chained(inputs),
    )
    return out


def _block_channels(channels: int) -> int:
    block: int = triton.next_power_of_2(channels)
    return min(BLOCK_CHANNELS, block)


def _check(inputs: Tensor, ring: Tensor, *tensors: Tensor) -> None:
    assert inputs.stride(1) == 1, "channels are contiguous"
    assert inputs.dtype == ring.dtype, f"{inputs.dtype} into a ring of {ring.dtype}"
    assert all(tensor.is_contiguous() for tensor in (ring, *tensors)), (
        "ring, weight and indices are contiguous"
    )
