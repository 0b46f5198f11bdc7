"""What kernels share that read trees, and the kernel behind `triton.py`."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs


@triton.jit
def _depths(b_bits, o_node):
    """Return each node's distance from node 0 [W], from its bits [W] among nodes `o_node` [N]."""
    return tl.sum((b_bits[:, None] >> o_node[None, :]) & 1, axis=1) - 1


@triton.jit
def _highest(b_bits, o_node):
    """Return the highest bit set [W] among those of `o_node` [N], -1 where none is."""
    b_set = (b_bits[:, None] >> o_node[None, :]) & 1
    return tl.max(tl.where(b_set != 0, o_node[None, :], -1), axis=1)


@triton.jit
def _compact_kernel(
    pool,
    read,
    write,
    stride_layer,
    stride_entry,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A program owns some channels of one layer of one row, and loads all that it will store."""
    await_inputs(CHAINED)
    i_layer = tl.program_id(1).to(tl.int64)
    i_row = tl.program_id(2)
    o_w = tl.arange(0, BLOCK_W)
    b_read = tl.load(read + i_row * W + o_w, mask=o_w < W, other=0)
    b_write = tl.load(write + i_row * W + o_w, mask=o_w < W, other=0)
    m_move = b_read != b_write
    if tl.max(m_move.to(tl.int32), axis=0) == 0:
        return
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = m_move[:, None] & (o_c < C)[None, :]
    p_layer = pool + i_layer * stride_layer + o_c[None, :]
    b_moved = tl.load(p_layer + b_read[:, None] * stride_entry, mask=mask)
    # other threads may still read what this one overwrites
    tl.debug_barrier()
    tl.store(p_layer + b_write[:, None] * stride_entry, b_moved, mask=mask)
