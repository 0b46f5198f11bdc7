"""`reference.silu_mul` in one launch, in float32 until the result is rounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.silu_mul.kernels import _silu_mul_kernel

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(gate_up: Tensor) -> str | None:
    """Return why the kernel cannot serve these activations, None if it can."""
    return None if gate_up.dtype in _DTYPES else f"activations of {gate_up.dtype}"


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `reference.silu_mul`. Rows may be strided."""
    assert gate_up.stride(1) == 1, "a token's features are contiguous"
    num_tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, triton.next_power_of_2(inner))
    if num_tokens:
        _silu_mul_kernel[num_tokens, triton.cdiv(inner, block)](
            gate_up,
            out,
            gate_up.stride(0),
            INNER=inner,
            BLOCK=block,
            **chained(gate_up),
            num_warps=max(1, block // 256),
        )
    return out
