"""Weights with a decay per channel, of one token and of windows: the first of two launches.

What records hold, and what for: `token_stream_kernel.py` and `window_scores_kernel.py`. Here every
ring entry meets decays of its own in each channel. So a program walks the ring from the newest
entry on, one vector of channels at a time, spread over a warp: what lies between is a running sum
of each thread, and what an entry counts for in each column is a sum over the warp.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs_only, let_next_start
from gapless.ops.linear_replay.arithmetic import _decay
from gapless.ops.linear_replay.fold_kernels import _fold_channels, _group
from gapless.ops.linear_replay.window_scores_kernel import _is_above, _store_solved


@triton.jit
def _store_scores(
    p_ring,  # pointer to a record's scores
    keys,
    g,
    since,  # sums of the decays that came before [K]
    x,  # [columns, K]
    column,  # factors of the columns
    first,
    count,
    eps,
    NP: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Store what a group of entries counts for in each column; return the decays' sums by then."""
    o_x = tl.arange(0, x.shape[0])
    for j in tl.static_range(len(keys)):
        key = keys[j].to(tl.float32)
        factor = column
        if HAS_NORM:
            factor *= tl.rsqrt(tl.sum(key * key) + eps)
        scores = tl.sum(x * (key * _decay(since))[None, :], 1) * factor
        n = count - 1 - first - j
        tl.store(p_ring + n + o_x * NP, scores, mask=(n >= 0) & (o_x >= 0))
        since += g[j]
    return since


@triton.jit
def _store_past(
    p_ring,
    p_keys,
    p_g,
    entries,
    keys,  # the newest GROUP entries
    g,
    x,
    column,
    count,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Store what all entries count for in each column; return the state's decays [K]."""
    GROUP: tl.constexpr = len(keys)
    since = tl.zeros([x.shape[1]], tl.float32)
    if N <= GROUP:
        since = _store_scores(p_ring, keys, g, since, x, column, 0, count, eps, NP, HAS_NORM)
    else:
        for first in tl.range(0, count, GROUP, num_stages=1):
            # the next group is on its way while one is summed
            next_keys, next_g = _group(p_keys, p_g, entries, first + GROUP, count, GROUP, H, HV)
            since = _store_scores(
                p_ring, keys, g, since, x, column, first, count, eps, NP, HAS_NORM
            )
            keys, g = next_keys, next_g
    return _decay(since)


@triton.jit(do_not_specialize=["zero_entry"])
def _channel_token_kernel(
    q,
    k,
    beta,
    log_decay,
    records,
    k_ring,
    g_ring,
    ring_read,
    ring_write,
    fold_mask,
    q_stride,
    k_stride,
    beta_stride,
    g_stride,
    zero_entry,
    scale,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,  # power of two of at least N
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # entries that are under way at once
    SIZE: tl.constexpr,  # of a record
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weights of a row and value head, and the token's key and decays put into the rings."""
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_key_head = i_head // (HV // H)
    o_n, o_k = tl.arange(0, NP), tl.arange(0, K)
    entries = ring_read + i_row * N
    record = records + (i_row * HV + i_head) * SIZE
    p_keys, p_g = k_ring + i_key_head * K + o_k, g_ring + i_head * K + o_k
    if tl.program_id(2) == 1:
        await_inputs_only(CHAINED)
        # beside the others, which the stream kernel waits for as well
        if tl.load(fold_mask + i_row * N) != 0:
            _fold_channels(
                record + 2 * (K + NP + 1), p_keys, p_g, entries, fold_mask + i_row * N, eps,
                N, NP, H, HV, GROUP if GROUP < 4 else 4, HAS_NORM,
            )  # fmt: skip
        return
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    written = tl.load(ring_write + i_row)
    count = tl.sum((entry != zero_entry).to(tl.int32))
    ring_keys, ring_g = _group(p_keys, p_g, entries, 0, count, GROUP, H, HV)
    # what came before may write what follows, but nothing that the ring holds
    await_inputs_only(CHAINED)
    key = tl.load(k + i_row * k_stride + i_key_head * K + o_k)
    query = tl.load(q + i_row * q_stride + i_key_head * K + o_k).to(tl.float32)
    g = tl.load(log_decay + i_row * g_stride + i_head * K + o_k)
    b_beta = tl.load(beta + i_row * beta_stride + i_head).to(tl.float32)
    # all is read before the first is needed; the next kernel's reads of the state would be in
    # the way, and wait for this one
    let_next_start(CHAINED)
    if i_head % (HV // H) == 0:
        tl.store(p_keys + written * (H * K), key.to(k_ring.dtype.element_ty))
    tl.store(p_g + written * (HV * K), g)
    key = key.to(tl.float32)
    if HAS_NORM:
        key *= tl.rsqrt(tl.sum(key * key) + eps)
        query *= tl.rsqrt(tl.sum(query * query) + eps)
    query *= scale
    # d = beta (v - past(k)), o = past(q) + pair d
    of_key = tl.sum(key * query) * b_beta
    decay = _decay(g)
    x_key, x_query = key * decay * -b_beta, (query - of_key * key) * decay
    # the stream kernel reads weights of entries that do not exist, too
    for i in tl.static_range(2):
        tl.store(record + 2 * K + i * NP + o_n, o_n * 0.0, mask=o_n >= count)
    state_decay = _store_past(
        record + 2 * K, p_keys, p_g, entries, ring_keys, ring_g,
        tl.trans(tl.join(x_key, x_query)), 1.0, count, eps, N, NP, H, HV, HAS_NORM,
    )  # fmt: skip
    tl.store(record + o_k, x_key * state_decay)
    tl.store(record + K + o_k, x_query * state_decay)
    p_value = record + 2 * (K + NP)
    tl.store(p_value, b_beta)
    tl.store(p_value + 1, of_key)


@triton.jit(do_not_specialize=["zero_entry"])
def _channel_window_kernel(
    q,
    k,
    beta,
    log_decay,
    ancestors,
    records,
    k_ring,
    g_ring,
    ring_read,
    ring_write,
    fold_mask,
    q_stride,
    q_token_stride,
    k_stride,
    k_token_stride,
    beta_stride,
    beta_token_stride,
    g_stride,
    g_token_stride,
    zero_entry,
    scale,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,  # power of two of at least N and 16
    W: tl.constexpr,
    HALF: tl.constexpr,  # power of two of at least 4 and W
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,  # entries that are under way at once
    SIZE: tl.constexpr,
    RING: tl.constexpr,  # where in a record the scores are
    HAS_TREE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weights of a row and value head, and the window's keys and decays put into the rings.

    Three programs: what the columns read of the past, the fold, and what they read of each other.
    """
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_key_head = i_head // (HV // H)
    XP: tl.constexpr = 2 * HALF
    UNROLL: tl.constexpr = W if W <= 4 else 1
    o_x, o_n = tl.arange(0, XP), tl.arange(0, NP)
    # spread over the warp as a vector of them is, every row alike
    o_k = tl.max_contiguous(tl.arange(0, K), 4)
    node = o_x % HALF
    m_key = o_x < W
    m_query = (o_x >= HALF) & (node < W)
    entries = ring_read + i_row * N
    record = records + (i_row * HV + i_head) * SIZE
    p_keys, p_g = k_ring + i_key_head * K + o_k, g_ring + i_head * K + o_k
    if tl.program_id(2) == 1:
        await_inputs_only(CHAINED)
        # beside the others, which the stream kernel waits for as well
        if tl.load(fold_mask + i_row * N) != 0:
            _fold_channels(
                record + RING + (NP + XP) * XP, p_keys, p_g, entries, fold_mask + i_row * N, eps,
                N, NP, H, HV, 4, HAS_NORM,
            )  # fmt: skip
        return

    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    count = tl.sum((entry != zero_entry).to(tl.int32))
    if tl.program_id(2) == 0:
        ring_keys, ring_g = _group(p_keys, p_g, entries, 0, count, GROUP, H, HV)
    else:
        ring_keys, ring_g = _group(p_keys, p_g, entries, 0, 0, GROUP, H, HV)
    # what came before may write what follows, but nothing that the ring holds
    await_inputs_only(CHAINED)
    p_key = k + i_row * k_stride + i_key_head * K + o_k
    p_query = q + i_row * q_stride + i_key_head * K + o_k
    p_decay = log_decay + i_row * g_stride + i_head * K + o_k
    p_x = p_key[None, :] + (node * k_token_stride)[:, None]
    x = tl.load(p_x, mask=m_key[:, None], other=0)
    p_x = p_query[None, :] + (node * q_token_stride)[:, None]
    x = tl.load(p_x, mask=m_query[:, None], other=x).to(tl.float32)
    bits = o_x
    if HAS_TREE:
        bits = tl.load(ancestors + i_row * W + node, mask=node < W, other=0)
    if tl.program_id(2) == 0:
        # the next kernel's reads of the state would be in the way, and wait for this one
        let_next_start(CHAINED)
        column = tl.where(m_query, scale, 1.0)
        if HAS_NORM:
            column *= tl.rsqrt(tl.where(m_key | m_query, tl.sum(x * x, 1) + eps, 1.0))
        # decayed up to each column from where the ring ends
        for j in tl.range(0, W, num_stages=1, loop_unroll_factor=UNROLL):
            decay = _decay(tl.load(p_decay + j * g_token_stride))
            is_above = _is_above(bits, node, j, HAS_TREE)
            x *= tl.where(is_above[:, None], decay[None, :], 1.0)
        tl.store(record + o_x, column)
        tl.store(record + XP + (o_x * K)[:, None] + o_k[None, :], x)
        state_decay = _store_past(
            record + RING, p_keys, p_g, entries, ring_keys, ring_g, x, column, count, eps,
            N, NP, H, HV, HAS_NORM,
        )  # fmt: skip
        tl.store(record + XP * (1 + K) + o_k, state_decay)
    else:
        written = tl.load(ring_write + i_row * W + node, mask=m_key, other=0)
        p_beta = beta + i_row * beta_stride + i_head + node * beta_token_stride
        b_beta = tl.load(p_beta, mask=m_key, other=0).to(tl.float32)
        g = tl.load(p_decay[None, :] + (node * g_token_stride)[:, None], mask=m_key[:, None])
        let_next_start(CHAINED)
        # no entry that a row reads is one that it writes
        m_written = m_key & (i_head % (HV // H) == 0)
        p_written = p_keys[None, :] + (written * (H * K))[:, None]
        tl.store(p_written, x.to(k_ring.dtype.element_ty), mask=m_written[:, None])
        p_written = p_g[None, :] + (written * (HV * K))[:, None]
        tl.store(p_written, g, mask=m_key[:, None])
        x_scale = tl.where(m_query, scale, 1.0)
        if HAS_NORM:
            square = tl.sum(x * x, 1)
            x_scale *= tl.rsqrt(tl.where(m_key | m_query, square + eps, 1.0))
        # pairs [node, column], node by node from the last: x decays from there on
        pairs = tl.zeros([XP, XP], tl.float32)
        since = x
        for i in tl.range(0, W, num_stages=1, loop_unroll_factor=UNROLL):
            last = W - 1 - i
            b_key = tl.load(p_key + last * k_token_stride).to(tl.float32)
            score = tl.sum(since * b_key[None, :], 1)
            pairs += tl.where(o_x[:, None] == last, score[None, :], 0.0)
            decay = _decay(tl.load(p_decay + last * g_token_stride))
            is_above = _is_above(bits, node, last, HAS_TREE)
            since *= tl.where(is_above[:, None], decay[None, :], 1.0)
        _store_solved(
            record + RING + NP * XP, pairs, x_scale, b_beta, bits,
            W, HALF, HAS_TREE, HAS_DELTA=True,
        )  # fmt: skip
