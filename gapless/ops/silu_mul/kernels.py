"""The kernel behind `triton.py`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _silu_mul_kernel(
    gate_up,
    out,
    stride_token,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = o_i < INNER
    p_gate = gate_up + i_token * stride_token + o_i
    b_gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + INNER, mask=mask, other=0.0).to(tl.float32)
    b_out = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(out + i_token * INNER + o_i, b_out.to(out.dtype.element_ty), mask=mask)
