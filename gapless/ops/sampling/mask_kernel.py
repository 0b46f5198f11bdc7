"""The kernel behind `triton.mask_logits`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.sampling.arithmetic import NEG_INF


@triton.jit
def _mask_kernel(
    logits,
    mask_of,
    masks,
    out,
    stride_row,
    stride_mask,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    await_inputs(CHAINED)
    i_row = tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < V
    b_x = tl.load(logits + i_row * stride_row + o_v, mask=m_v)
    i_mask = tl.load(mask_of + i_row).to(tl.int64)
    # rows without a grammar, nearly all of them, are spared the reading of a mask
    if i_mask > 0:
        b_words = tl.load(masks + i_mask * stride_mask + o_v // 32, mask=m_v, other=0)
        b_x = tl.where((b_words >> (o_v % 32)) & 1 == 1, b_x, NEG_INF)
    tl.store(out + i_row * V + o_v, b_x, mask=m_v)
