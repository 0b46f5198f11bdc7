"""`reference.py` in one launch each, in float32 between its roundings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from gapless.core.specs.linear import GateOrder
from gapless.ops.chaining import chained
from gapless.ops.ssm_gates.kernels import _discretise_kernel, _skip_gate_norm_kernel

if TYPE_CHECKING:
    from torch import Tensor

MAX_SIZE = 16384  # channels of a group, which one program holds
TILE_LEN = 1024  # channels of a program
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# as the kernel numbers them
_ORDERS = {GateOrder.GATE_ALONE: 0, GateOrder.GATE_FIRST: 1, GateOrder.NORM_FIRST: 2}


def unsupported_type(x: Tensor, weight: Tensor) -> str | None:
    """Return why the kernels cannot serve these types, None if they can."""
    if x.dtype not in _DTYPES or weight.dtype is not torch.float32:
        return f"channels of {x.dtype} with weights of {weight.dtype}"
    return None


def unsupported_size(x: Tensor, num_groups: int) -> str | None:
    """Return why no program can hold a group's channels, None if one can."""
    size = x.shape[1] // num_groups
    return None if size <= MAX_SIZE else f"groups of {size} channels, want at most {MAX_SIZE}"


def discretise(
    x: Tensor,  # [T, HV * V], channels contiguous
    dt: Tensor,  # [T, HV], heads contiguous
    dt_bias: Tensor,  # [HV] float32
    neg_decay_rate: Tensor,  # [HV] float32
    *,
    limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # [T, HV * V] and [T, HV] float32
    """See the reference."""
    assert x.stride(1) == dt.stride(1) == 1, "channels and heads are contiguous"
    (num_tokens, size), heads = x.shape, dt.shape[1]
    values = torch.empty(num_tokens, size, dtype=torch.float32, device=x.device)
    decay = torch.empty(num_tokens, heads, dtype=torch.float32, device=x.device)
    if num_tokens:
        block = min(TILE_LEN, triton.next_power_of_2(size))
        _discretise_kernel[num_tokens, triton.cdiv(size, block)](
            x, dt, dt_bias, neg_decay_rate, values, decay, x.stride(0), dt.stride(0), *limit,
            HEADS=heads, V=size // heads, BLOCK=block, **chained(x),
        )  # fmt: skip
    return values, decay


def skip_gate_norm(
    out: Tensor,  # [T, HV * V], channels contiguous, as in x and z
    x: Tensor,
    z: Tensor,
    skip: Tensor,  # [HV] float32
    weight: Tensor,  # [HV * V] float32
    *,
    eps: float,
    num_groups: int,
    order: GateOrder,
) -> Tensor:  # [T, HV * V] in x's dtype
    """See the reference."""
    assert out.stride(1) == x.stride(1) == z.stride(1) == 1, "channels are contiguous"
    num_tokens, size = x.shape
    result = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens:
        block = triton.next_power_of_2(size // num_groups)
        _skip_gate_norm_kernel[num_tokens, num_groups](
            out, x, z, skip, weight, result, out.stride(0), x.stride(0), z.stride(0), eps,
            SIZE=size // num_groups, V=size // skip.shape[0], BLOCK=block, ORDER=_ORDERS[order],
            num_warps=min(16, max(1, block // 256)), **chained(x),
        )  # fmt: skip
    return result
