"""Windows of one token of many rows, the second of two launches; launches in `triton.py`.

All that a delta rule makes of its state is linear in it. A head has two *columns*: d of the token,
and its output. Each is

    y = S_0 x + sum_ring r_j d_j + u v

The *weights* x [K], r [N] and u depend on keys, decays and beta alone. A weights kernel, of
`token_weights_kernel.py` or with a decay per channel of `channel_weights_kernels.py`, works them
out and leaves them in a buffer, one *record* per row and value head. The stream kernel, many small
programs, reads the state. It has all of its reads in flight before it needs a weight: it is
launched as a programmatic dependent of the weights kernel, and first waits for that one when its
own loads are under way. A row that folds does so there, too.

A record is x [2, K], r [2, NP], u [2], and with a decay per channel the fold's weights, of
`fold_kernels.py`. Decays are built up as in `token_kernel.py`.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.linear_replay.fold_kernels import _store_few, _store_fold
from gapless.ops.linear_replay.token_kernel import _against, _tiles, _vector


@triton.jit(do_not_specialize=["zero_entry"])
def _token_stream_kernel(
    records,
    v,
    out,
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    order,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    v_stride,
    zero_entry,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,  # key channels of a tile, of 128 bytes
    SIZE: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Both columns of BV value channels, out of one pass over their state; and the fold."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.load(order + tl.program_id(1))
    i_part = tl.program_id(0) % (V // BV)
    o_v, o_n = i_part * BV + tl.arange(0, BV), tl.arange(0, NP)
    entries, p_mask = ring_read + i_row * N, fold_mask + i_row * N
    row = tl.load(read_rows + i_row)
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    is_folding = tl.load(p_mask) != 0
    p_state = checkpoint + (row * HV + i_head) * (V * K)
    tiles = _tiles(p_state, o_v, K, KB)
    p_d = d_ring + ((entry * HV + i_head) * V)[:, None] + o_v[None, :]
    ring_d = tl.load(p_d, mask=(entry != zero_entry)[:, None], other=0)
    value = tl.load(v + i_row * v_stride + i_head * V + o_v)
    fold_row = tl.load(fold_rows + i_row)
    written = tl.load(ring_write + i_row)
    await_inputs(CHAINED)

    record = records + (i_row * HV + i_head) * SIZE
    p_ring, p_u = record + 2 * K, record + 2 * (K + NP)
    p_fold = checkpoint + (fold_row * HV + i_head) * (V * K)
    fold = record + 2 * (K + NP + 1)
    d_weights, out_weights = _vector(record, K, KB), _vector(record + K, K, KB)
    d_ring_weights, out_ring_weights = tl.load(p_ring + o_n), tl.load(p_ring + NP + o_n)
    IS_FEW: tl.constexpr = NP < 16
    # one is known when compiling, the other is not
    if IS_FEW:  # noqa: SIM102
        if is_folding:
            # half of what is moved: it should be under way while results are summed
            _store_few(
                tiles, (), ring_d, p_fold, fold, 1.0, 1.0, p_mask, o_v,
                N, NP, K, KB, IS_PER_CHANNEL=True,
            )  # fmt: skip
    value = value.to(tl.float32)
    d = _against(tiles, d_weights) + tl.sum(ring_d * d_ring_weights[:, None], 0)
    y = _against(tiles, out_weights) + tl.sum(ring_d * out_ring_weights[:, None], 0)
    d += value * tl.load(p_u)
    y += value * tl.load(p_u + 1)
    tl.store(d_ring + (written * HV + i_head) * V + o_v, d)
    tl.store(out + i_row * (HV * V) + i_head * V + o_v, y.to(out.dtype.element_ty))
    if not IS_FEW:  # noqa: SIM102
        if is_folding:
            _store_fold(
                p_state, p_fold, fold, d_ring, k_ring, g_ring, entries, p_mask, i_head, i_part, eps,
                N, NP, H, HV, K, V, BV, KB, IS_PER_CHANNEL, IS_PER_CHANNEL, HAS_NORM,
            )  # fmt: skip
