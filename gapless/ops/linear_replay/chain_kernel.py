"""One launch for a chain of 2 to 16 tokens under a delta rule; launches in `triton.py`.

The two launches of `kernels.py` work out weights once per head, and there pay for what a window of
several tokens makes of its keys with few programs that wait long. For chains this kernel is faster:
a program owns one row, one value head and a run of value channels, works out the scores of ring and
window itself, and streams its run of the state in blocks of BV channels, each read once. In windows
of few tokens it has one warp: nothing in it waits for another, no state passes through shared
memory, and enough programs fit on a multiprocessor to keep its reads in flight.

A row that folds (most do not) first folds its run in memory, and reads its outputs out of the
folded state and the ring entries that are left: the same sum, and no entry counts twice. Ring
entries are walked from the newest back: the decay from an entry to the window is then a running
sum, at most zero, with nothing to subtract.
"""

# ruff: noqa: B007, PLR0912, RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs
from gapless.ops.linear_replay.kernels import _decay, _dot, _exact_decay


@triton.jit
def _fold(
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    entries,  # pointer to the row's ring entries, oldest first
    count,  # how many to fold
    read_row,
    out_row,
    i_head,
    i_key_head,
    i_run,
    eps,
    MOST: tl.constexpr,  # of `count`
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Fold a run of value channels.

    Products are of 23 bits and summed apart from the state, which meets one fp32 factor and one
    fp32 sum per fold. Key channels are taken 32 at a time, so that little stays live.
    """
    o_k = tl.arange(0, 32)
    p_g = g_ring + i_head * (K if IS_PER_CHANNEL else 1)
    # entries 16 at a time, the newest first
    weights = ()
    since = 0.0
    for i in tl.static_range((MOST + 15) // 16):
        r = i * 16 + tl.arange(0, 16)
        m_newer = (r < count) & (r > 0)
        entry = tl.load(entries + count - 1 - r, mask=r < count, other=0)
        newer = tl.load(entries + count - r, mask=m_newer, other=0)
        p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
        weight = tl.full([16], 1.0, tl.float32)
        if HAS_NORM:
            squares = tl.zeros([16, 32], tl.float32)
            for c in tl.static_range(K // 32):
                keys = tl.load(p_keys + c * 32, mask=(r < count)[:, None], other=0).to(tl.float32)
                squares += keys * keys
            weight = tl.rsqrt(tl.where(r < count, tl.sum(squares, 1) + eps, 1.0))
        if not IS_PER_CHANNEL:
            g_newer = tl.load(p_g + newer * HV, mask=m_newer, other=0)
            weight *= _decay(tl.cumsum(g_newer, 0) + since)
            since += tl.sum(g_newer, 0)
        weights = weights + (weight,)
    # each entry met its newer neighbour's decay; the oldest one's own is left for the state
    p_oldest = p_g + tl.load(entries) * (HV * K if IS_PER_CHANNEL else HV)
    if not IS_PER_CHANNEL:
        decay = _exact_decay(since + tl.load(p_oldest, mask=count > 0, other=0))
    p_read = checkpoint + read_row * (HV * V * K) + i_head * (V * K)
    p_out = checkpoint + out_row * (HV * V * K) + i_head * (V * K)
    for c in tl.static_range(K // 32):
        parts = ()
        later = o_k * 0.0
        for i in tl.static_range((MOST + 15) // 16):
            r = i * 16 + tl.arange(0, 16)
            entry = tl.load(entries + count - 1 - r, mask=r < count, other=0)
            p_keys = k_ring + ((entry * H + i_key_head) * K + c * 32)[:, None] + o_k[None, :]
            keys = tl.load(p_keys, mask=(r < count)[:, None], other=0).to(tl.float32)
            if IS_PER_CHANNEL:
                m_newer = (r < count) & (r > 0)
                newer = tl.load(entries + count - r, mask=m_newer, other=0)
                p_newer = p_g + (newer * (HV * K) + c * 32)[:, None] + o_k[None, :]
                g_newer = tl.load(p_newer, mask=m_newer[:, None], other=0)
                keys *= _decay(tl.cumsum(g_newer, 0) + later[None, :])
                later += tl.sum(g_newer, 0)
            parts = parts + (keys * weights[i][:, None],)
        if IS_PER_CHANNEL:
            m_oldest = (count > 0) & (o_k >= 0)
            g_oldest = tl.load(p_oldest + c * 32 + o_k, mask=m_oldest, other=0)
            decay = _exact_decay(later + g_oldest)[None, :]
        for i_block in tl.range(0, BLOCKS, num_stages=1):
            o_v = (i_run * BLOCKS + i_block) * BV + tl.arange(0, BV)
            o_state = o_v[:, None] * K + (c * 32 + o_k)[None, :]
            state = tl.load(p_read + o_state).to(tl.float32)
            added = tl.zeros([BV, 32], tl.float32)
            for i in tl.static_range((MOST + 15) // 16):
                r = i * 16 + tl.arange(0, 16)
                entry = tl.load(entries + count - 1 - r, mask=r < count, other=0)
                p_d = d_ring + ((entry * HV + i_head) * V)[None, :] + o_v[:, None]
                d = tl.load(p_d, mask=(r < count)[None, :], other=0)
                added = _dot(d, parts[i], added, SPLIT_A=True, SPLIT_B=True)
            tl.store(p_out + o_state, (state * decay + added).to(checkpoint.dtype.element_ty))


@triton.jit
def _start(
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    ring_read,
    fold_mask,
    read_rows,
    fold_rows,
    i_row,
    i_head,
    i_run,
    zero_entry,
    eps,
    N: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Fold what the step folds of a program's run of channels.

    Returns how many ring entries the row holds, how many of them it has folded, and the
    checkpoint row to read from here on.
    """
    o_n = tl.arange(0, triton.next_power_of_2(N))
    entries = ring_read + i_row * N
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    is_folded = tl.load(fold_mask + i_row * N + o_n, mask=o_n < N, other=0)
    num_ring = tl.sum((entry != zero_entry).to(tl.int32))
    num_folded = tl.sum(is_folded.to(tl.int32))
    row = tl.load(read_rows + i_row)
    if num_folded > 0:
        read_row = row
        row = tl.load(fold_rows + i_row)
        # a step of at most L tokens passes one multiple of L
        most: tl.constexpr = N - W + 1 if W <= N - W + 1 else N
        _fold(
            checkpoint, d_ring, k_ring, g_ring, entries, num_folded, read_row, row,
            i_head, i_head // (HV // H), i_run, eps,
            most, H, HV, K, V, BV, BLOCKS, IS_PER_CHANNEL, HAS_NORM,
        )  # fmt: skip
        # other threads of the program read what this one has stored
        tl.debug_barrier()
    return num_ring, num_folded, row


@triton.jit
def _store_inputs(
    p_key,
    p_g,
    entry,
    k_ring,
    g_ring,
    i_head,
    i_key_head,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """Copy a token's log decay, and its key once per key head, to a ring entry."""
    o_k = tl.arange(0, K)
    if IS_PER_CHANNEL:
        tl.store(g_ring + (entry * HV + i_head) * K + o_k, tl.load(p_g + o_k))
    else:
        tl.store(g_ring + entry * HV + i_head, tl.load(p_g))
    if i_head % (HV // H) == 0:
        key = tl.load(p_key + o_k).to(k_ring.dtype.element_ty)
        tl.store(k_ring + (entry * H + i_key_head) * K + o_k, key)


@triton.jit
def _cut(x):
    """Return x cut, not rounded, to 11 bits: the rest then has its sign, and 21 bits meet."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _aligned(x, IS_DIRECT: tl.constexpr):
    """Reorder columns so that what a thread has loaded is what it feeds to the matrix units.

    Thread t of the four that share a row has loaded 16 bytes in sequence; the compiler feeds pairs,
    (2t, 2t + 1), (2t + 8, 2t + 9), ..., where an operand comes from bf16. A product over columns
    does not mind their order, so both of its sides are reordered.
    """
    if IS_DIRECT:
        rows: tl.constexpr = x.shape[0]
        columns: tl.constexpr = x.shape[1]
        x = tl.permute(tl.reshape(x, [rows, 4, columns // 8, 2]), [0, 2, 1, 3])
        x = tl.reshape(x, [rows, columns])
    return x


@triton.jit(do_not_specialize=["zero_entry"])
def _chain_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    out,
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    q_stride,
    q_token_stride,
    k_stride,
    k_token_stride,
    v_stride,
    v_token_stride,
    beta_stride,
    beta_token_stride,
    g_stride,
    g_token_stride,
    zero_entry,
    scale,
    eps,
    N: tl.constexpr,
    W: tl.constexpr,
    HALF: tl.constexpr,  # power of two of at least 4 and W
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,  # of BV channels in a program's run
    STAGES: tl.constexpr,  # of them in flight
    KB: tl.constexpr,  # key channels of a tile
    IS_DIRECT: tl.constexpr,  # one warp, KB of four 16-byte loads of state
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLIT_X: tl.constexpr,
    SPLIT_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """A window of 2 to 16 tokens: matrix units read 2 * HALF vectors at once, keys then queries.

    Columns of `y` [BV, 2 * HALF] are first what each vector reads out of the past, and at the end
    d of each key and the output of each query: node j's d, once known, is added to every later
    key's column and every query's from j on, which is forward substitution and the output at once.
    """
    await_inputs(CHAINED)
    i_head, i_row = tl.program_id(0) // (V // BV // BLOCKS), tl.program_id(1).to(tl.int64)
    i_run, i_key_head = tl.program_id(0) % (V // BV // BLOCKS), i_head // (HV // H)
    # more channels of a fold at a time would overflow the registers of one warp
    FOLD_V: tl.constexpr = 32 if BV > 32 else BV
    num_ring, num_folded, row = _start(
        checkpoint, d_ring, k_ring, g_ring, ring_read, fold_mask, read_rows, fold_rows,
        i_row, i_head, i_run, zero_entry, eps,
        N, W, H, HV, K, V, FOLD_V, BV * BLOCKS // FOLD_V, IS_PER_CHANNEL, HAS_NORM,
    )  # fmt: skip
    entries = ring_read + i_row * N
    num_live = num_ring - num_folded
    o_k = tl.arange(0, KB)
    if IS_DIRECT:
        # all tiles spread over threads as the state's
        o_k = tl.max_contiguous(o_k, KB // 4)
    o_x = tl.arange(0, 2 * HALF)
    node = o_x % HALF
    m_key = o_x < W
    m_query = (o_x >= HALF) & (node < W)
    p_key = k + i_row * k_stride + i_key_head * K
    p_query = q + i_row * q_stride + i_key_head * K
    p_g = log_decay + i_row * g_stride + i_head * (K if IS_PER_CHANNEL else 1)
    x = ()
    squares = tl.zeros([2 * HALF, KB], tl.float32)
    for c in tl.static_range(K // KB):
        p_keys = p_key + (node * k_token_stride)[:, None] + (c * KB + o_k)[None, :]
        p_queries = p_query + (node * q_token_stride)[:, None] + (c * KB + o_k)[None, :]
        vectors = tl.load(p_keys, mask=m_key[:, None], other=0).to(tl.float32)
        vectors += tl.load(p_queries, mask=m_query[:, None], other=0).to(tl.float32)
        squares += vectors * vectors
        x = x + (vectors,)
    x_scale = tl.where(m_query, scale, 1.0)
    if HAS_NORM:
        x_scale *= tl.where(m_key | m_query, tl.rsqrt(tl.sum(squares, 1) + eps), 0.0)
    p_beta = beta + i_row * beta_stride + i_head + node * beta_token_stride
    b_beta = tl.load(p_beta, mask=m_key, other=0).to(tl.float32)

    # weights [j, i] with which node j's d enters column i
    m_from = (o_x < W)[:, None] & (m_query[None, :] & (node[None, :] >= o_x[:, None]))
    m_from |= (o_x < W)[:, None] & (m_key[None, :] & (node[None, :] > o_x[:, None]))
    weights = tl.zeros([2 * HALF, 2 * HALF], tl.float32)
    column = x_scale
    decayed_x = ()
    if IS_PER_CHANNEL:
        # node by node from the last: `decay` sums g over the nodes after it, up to the column's own
        decay = ()
        for c in tl.static_range(K // KB):
            decay = decay + (tl.zeros([2 * HALF, KB], tl.float32),)
        for i in tl.range(0, W, num_stages=1, loop_unroll_factor=W if IS_DIRECT else 1):
            last = W - 1 - i
            products = tl.zeros([2 * HALF, KB], tl.float32)
            up_to = ()
            for c in tl.static_range(K // KB):
                key = tl.load(p_key + last * k_token_stride + c * KB + o_k).to(tl.float32)
                products += x[c] * _decay(decay[c]) * key[None, :]
                g = tl.load(p_g + last * g_token_stride + c * KB + o_k)
                up_to = up_to + (decay[c] + tl.where((node >= last)[:, None], g[None, :], 0.0),)
            decay = up_to
            score = tl.sum(products, 1)[None, :]
            weights = tl.where(o_x[:, None] == last, score, weights)
        weights = tl.where(m_from, weights, 0.0)
        for c in tl.static_range(K // KB):
            decayed_x = decayed_x + (x[c] * _decay(decay[c]),)
    else:
        p_node = p_g + o_x * g_token_stride
        g = tl.load(p_node, mask=m_key, other=0)
        to_column = tl.sum(tl.where(o_x[:, None] <= node[None, :], g[:, None], 0.0), 0)
        to_row = tl.sum(tl.where(o_x[None, :] <= o_x[:, None], g[None, :], 0.0), 1)
        for c in tl.static_range(K // KB):
            aligned = _aligned(x[c], IS_DIRECT)
            weights = _dot(aligned, tl.trans(aligned), weights, SPLIT_X, SPLIT_X)
        exponent = tl.where(m_from, to_column[None, :] - to_row[:, None], float("-inf"))
        weights *= _decay(exponent)
        column *= _decay(to_column)
        decayed_x = x
    weights *= x_scale[:, None] * (tl.where(m_key, -b_beta, 1.0) * x_scale)[None, :]
    to_later = ()
    if IS_DIRECT:
        for j in tl.static_range(W):
            to_later = to_later + (tl.sum(tl.where(o_x[:, None] == j, weights, 0.0), 0),)

    # scores of the ring entries, the newest first; each meets its newer neighbour's decay, and
    # the oldest one's own is left for the state
    state_column = column
    state_x = decayed_x
    if N > W:
        r = tl.arange(0, triton.next_power_of_2(N - W) if N - W > 16 else 16)
        m_live = r < num_live
        m_newer = m_live & (r > 0)
        entry = tl.load(entries + num_ring - 1 - r, mask=m_live, other=0)
        newer = tl.load(entries + num_ring - r, mask=m_newer, other=0)
        oldest = tl.load(entries + num_folded, mask=num_live > 0, other=0)
        p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
        p_newer = g_ring + (newer * HV + i_head) * (K if IS_PER_CHANNEL else 1)
        p_oldest = g_ring + (oldest * HV + i_head) * (K if IS_PER_CHANNEL else 1)
        p_d = d_ring + ((entry * HV + i_head) * V)[None, :]
        ring_squares = tl.zeros([r.shape[0], KB], tl.float32)
        scores = tl.zeros([r.shape[0], 2 * HALF], tl.float32)
        state_x = ()
        for c in tl.static_range(K // KB):
            ring_keys = tl.load(p_keys + c * KB, mask=m_live[:, None], other=0).to(tl.float32)
            ring_squares += ring_keys * ring_keys
            if IS_PER_CHANNEL:
                o_c = c * KB + o_k
                g_newer = tl.load(p_newer[:, None] + o_c[None, :], mask=m_newer[:, None], other=0)
                ring_keys *= _decay(tl.cumsum(g_newer, 0))
                g_oldest = tl.load(p_oldest + o_c, mask=(num_live > 0) & (o_k >= 0), other=0)
                past = _decay(tl.sum(g_newer, 0) + g_oldest)
                state_x = state_x + (decayed_x[c] * past[None, :],)
            else:
                state_x = state_x + (x[c],)
            scores = _dot(
                _aligned(ring_keys, IS_DIRECT), tl.trans(_aligned(decayed_x[c], IS_DIRECT)),
                scores, SPLIT_X, SPLIT_X,
            )  # fmt: skip
        weight = tl.where(m_live, 1.0, 0.0)
        if HAS_NORM:
            weight *= tl.rsqrt(tl.where(m_live, tl.sum(ring_squares, 1) + eps, 1.0))
        if not IS_PER_CHANNEL:
            g_newer = tl.load(p_newer, mask=m_newer, other=0)
            weight *= _decay(tl.cumsum(g_newer, 0))
            g_oldest = tl.load(p_oldest, mask=num_live > 0, other=0)
            state_column *= _decay(tl.sum(g_newer, 0) + g_oldest)
        scores *= weight[:, None] * column[None, :]

    p_state = checkpoint + row * (HV * V * K) + i_head * (V * K)
    written = tl.load(ring_write + i_row * W + node, mask=m_key, other=0)
    for i_block in tl.range(0, BLOCKS, num_stages=STAGES):
        o_v = (i_run * BLOCKS + i_block) * BV + tl.arange(0, BV)
        y = tl.zeros([BV, 2 * HALF], tl.float32)
        for c in tl.static_range(K // KB):
            state = tl.load(p_state + o_v[:, None] * K + (c * KB + o_k)[None, :]).to(tl.float32)
            state = _aligned(state, IS_DIRECT)
            right = tl.trans(_aligned(state_x[c], IS_DIRECT))
            if SPLIT_STATE:
                state_head = _cut(state)
                y = _dot(state - state_head, right, y, SPLIT_A=False, SPLIT_B=False)
                state = state_head
            y = _dot(state, right, y, SPLIT_A=False, SPLIT_B=SPLIT_X)
        y *= state_column[None, :]
        if N > W:
            ring_d = tl.load(p_d + o_v[:, None], mask=m_live[None, :], other=0)
            y = _dot(ring_d, scores, y, SPLIT_A=True, SPLIT_B=True)
        p_value = v + i_row * v_stride + i_head * V + o_v[:, None]
        value = tl.load(p_value + (node * v_token_stride)[None, :], mask=m_key[None, :], other=0)
        y = tl.where(m_key[None, :], b_beta[None, :] * (value.to(tl.float32) - y), y)
        for j in tl.static_range(W):
            if IS_DIRECT:
                later = to_later[j]
            else:
                # a wide window has no registers to keep them
                later = tl.sum(tl.where(o_x[:, None] == j, weights, 0.0), 0)
            d = tl.sum(tl.where(o_x[None, :] == j, y, 0.0), 1)
            y += d[:, None] * later[None, :]
        p_out = out + ((i_row * W + node) * (HV * V) + i_head * V)[None, :] + o_v[:, None]
        tl.store(p_out, y.to(out.dtype.element_ty), mask=m_query[None, :])
        p_written = d_ring + ((written * HV + i_head) * V)[None, :] + o_v[:, None]
        tl.store(p_written, y, mask=m_key[None, :])
    if i_run == 0:
        for j in tl.static_range(W):
            _store_inputs(
                p_key + j * k_token_stride, p_g + j * g_token_stride,
                tl.load(ring_write + i_row * W + j), k_ring, g_ring, i_head, i_key_head,
                H, HV, K, IS_PER_CHANNEL,
            )  # fmt: skip
