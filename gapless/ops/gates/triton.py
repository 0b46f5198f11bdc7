"""The gates of `reference.py` in one launch each, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.gates.kernels import _delta_gates_kernel, _sigmoid_gate_kernel

if TYPE_CHECKING:
    from torch import Tensor

# elements of one program's tile
TILE_LEN = 1024


def delta_gates(
    b: Tensor,  # [T, HV], heads contiguous
    a: Tensor,  # [T, HV], heads contiguous
    dt_bias: Tensor,  # [HV] float32
    neg_decay_rate: Tensor,  # [HV] float32
    *,
    beta_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # [T, HV] float32 each
    """Return beta and the log decay; see the reference."""
    assert b.stride(1) == a.stride(1) == 1, "heads are contiguous"
    num_tokens, heads = b.shape
    beta = torch.empty(num_tokens, heads, dtype=torch.float32, device=b.device)
    log_decay = torch.empty_like(beta)
    block_heads = triton.next_power_of_2(heads)
    block_tokens = max(1, TILE_LEN // block_heads)
    _delta_gates_kernel[(triton.cdiv(num_tokens, block_tokens),)](
        b, a, dt_bias, neg_decay_rate, beta, log_decay,
        num_tokens, b.stride(0), a.stride(0), beta_scale,
        HEADS=heads, BLOCK_TOKENS=block_tokens, BLOCK_HEADS=block_heads, **chained(b),
    )  # fmt: skip
    return beta, log_decay


def sigmoid_gate(
    x: Tensor,  # [T, N], N contiguous
    gate: Tensor,  # [T, N], N contiguous
) -> Tensor:  # [T, N] in x's dtype
    """Return x * sigmoid(gate); see the reference."""
    assert x.stride(1) == gate.stride(1) == 1, "channels are contiguous"
    num_tokens, size = x.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    _sigmoid_gate_kernel[(num_tokens, triton.cdiv(size, TILE_LEN))](
        x, gate, out, size, x.stride(0), gate.stride(0), BLOCK=TILE_LEN, **chained(x)
    )
    return out
