"""Triton kernels of the replay window; formulas in `reference.py`, launches in `triton.py`.

All that a window makes of its state is linear in it. With the solve and the pairs multiplied in,
every column y of a head, d of a node or its output, is

    y = S_0 x + sum_ring r_j d_j + sum_nodes u_j v_j

The *weights* x [K], r [N] and u [W] depend on keys, decays and beta alone. So a step is two
launches. A weights kernel, a program per row and head, works them out and leaves them in a buffer,
one *record* per row and value head; what a folding row adds to its state follows them there. The
stream kernel, many small programs, reads the state. It has all of its reads in flight before it
needs a weight: it is launched as a programmatic dependent of the weights kernel, and first waits
for that one when its own loads are under way. A row that folds does so from the tile it holds.

A record is x [columns, K], r [columns, NP], u [columns, W], then the fold's weights: with one decay
per head NP factors of the entries' keys and the state's factor, with one per channel the state's
factors [K] and the decayed keys [N, K]. Columns are first the nodes' d, then their outputs; Mamba-2
has the outputs only.

Decays are sums of log decays over what lies between, built up from the newest on, so nothing is
subtracted and no exponent is above zero: each ring entry meets the decay of its newer neighbour,
and the oldest one's own is left for the state.
"""

# ruff: noqa: PLR0912, RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs, await_inputs_only, let_next_start


@triton.jit
def _decay(x):
    """Return exp of x <= 0, to about 1e-7 of the result; below 1e-38 it is 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _exact_decay(x):
    """Return exp of x <= 0 to one rounding: the hardware's exp2 is exact at integers only.

    A checkpoint is multiplied by such a factor at every fold, so a biased one would add up.
    """
    x = tl.maximum(x, -87.0)
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.428606765330187e-06
    p = 1.0 / 720 + r * (1.0 / 5040)
    p = 1.0 / 120 + r * p
    p = 1.0 / 24 + r * p
    p = 1.0 / 6 + r * p
    p = 0.5 + r * p
    p = 1.0 + r * p
    return (1.0 + r * p) * tl.exp2(n)


@triton.jit
def _head(x):
    """Return x rounded to the 11 bits that matrix units multiply (TF32)."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, acc, SPLIT_A: tl.constexpr, SPLIT_B: tl.constexpr):
    """Add a @ b; a split operand enters as head and rest, 23 bits in all.

    Values read as bf16 or fp16 are their own head, and need no split.
    """
    if SPLIT_A:
        a_head = _head(a)
        acc = tl.dot(a - a_head, b, acc=acc, input_precision="tf32")
        a = a_head
    if SPLIT_B:
        b_head = _head(b)
        acc = tl.dot(a, b - b_head, acc=acc, input_precision="tf32")
        b = b_head
    return tl.dot(a, b, acc=acc, input_precision="tf32")


@triton.jit
def _sums(g):
    """Return for each entry, along the first axis, the sum of g over it and all later ones."""
    if len(g.shape) == 2 and g.shape[0] >= 16:
        # ones times g: matrix units take fewer instructions than a scan across threads
        o_n = tl.arange(0, g.shape[0])
        later = tl.where(o_n[None, :] >= o_n[:, None], 1.0, 0.0)
        sums = _dot(later, g, tl.zeros(g.shape, tl.float32), SPLIT_A=False, SPLIT_B=True)
    else:
        sums = tl.cumsum(g, 0, reverse=True)
    return sums


@triton.jit
def _ring(entries, zero_entry, N: tl.constexpr, NP: tl.constexpr):
    """Return a row's ring entries [NP] from the oldest on, each one's newer neighbour, and which
    of both there are."""
    o_n = tl.arange(0, NP)
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    newer = tl.load(entries + o_n + 1, mask=o_n + 1 < N, other=zero_entry)
    return entry, entry != zero_entry, newer, newer != zero_entry


@triton.jit
def _fold_weights(
    fold,  # pointer to the fold's part of a record
    k_ring,
    g_ring,
    entries,
    mask,  # pointer to the row's mask, a prefix of its entries
    i_head,
    i_key_head,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Store what the state and the masked entries count for in the folded state."""
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    m_n = tl.load(mask + o_n, mask=o_n < N, other=0) != 0
    m_newer = tl.load(mask + o_n + 1, mask=o_n + 1 < N, other=0) != 0
    entry = tl.load(entries + o_n, mask=m_n, other=0)
    newer = tl.load(entries + o_n + 1, mask=m_newer, other=0)
    is_any = tl.load(mask) != 0
    oldest = tl.load(entries, mask=is_any, other=0)
    p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
    factor = tl.full([NP], 1.0, tl.float32)
    if HAS_NORM:
        squares = tl.zeros([NP, KB], tl.float32)
        for c in tl.static_range(K // KB):
            keys = tl.load(p_keys + c * KB, mask=m_n[:, None], other=0).to(tl.float32)
            squares += keys * keys
        factor = tl.rsqrt(tl.where(m_n, tl.sum(squares, 1) + eps, 1.0))
    if IS_PER_CHANNEL:
        for c in tl.static_range(K // KB):
            o_c = c * KB + o_k
            p_newer = g_ring + ((newer * HV + i_head) * K)[:, None] + o_c[None, :]
            g_newer = tl.load(p_newer, mask=m_newer[:, None], other=0)
            p_oldest = g_ring + (oldest * HV + i_head) * K + o_c
            g_oldest = tl.load(p_oldest, mask=is_any & (o_k >= 0), other=0)
            keys = tl.load(p_keys + c * KB, mask=m_n[:, None], other=0).to(tl.float32)
            keys *= factor[:, None] * _decay(_sums(g_newer))
            tl.store(fold + K + (o_n * K)[:, None] + o_c[None, :], keys, mask=m_n[:, None])
            tl.store(fold + o_c, _exact_decay(tl.sum(g_newer, 0) + g_oldest))
    else:
        g_newer = tl.load(g_ring + newer * HV + i_head, mask=m_newer, other=0)
        g_oldest = tl.load(g_ring + oldest * HV + i_head, mask=is_any, other=0)
        tl.store(fold + o_n, factor * _decay(_sums(g_newer)), mask=m_n)
        tl.store(fold + NP, _exact_decay(tl.sum(g_newer, 0) + g_oldest))


@triton.jit(do_not_specialize=["zero_entry"])
def _token_weights_kernel(
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
    KB: tl.constexpr,
    HEADS: tl.constexpr,  # value heads of a program, of one key head
    SIZE: tl.constexpr,  # of a record
    HAS_DELTA: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weights of a window of one token: fp32 sums, keys in tiles of KB channels.

    KB is what 8 threads load: sums over K are taken within a thread, and at the end over 8 lanes.
    """
    await_inputs_only(CHAINED)
    first_head, i_row = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    i_key_head = first_head // (HV // H)
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    entries = ring_read + i_row * N
    COLUMNS: tl.constexpr = 2 if HAS_DELTA else 1
    if tl.program_id(2) == 1:
        # beside the others, which the stream kernel waits for as well
        if tl.load(fold_mask + i_row * N) != 0:
            for h in tl.static_range(HEADS):
                i_head = first_head + h
                _fold_weights(
                    records + (i_row * HV + i_head) * SIZE + COLUMNS * (K + NP + 1),
                    k_ring, g_ring, entries, fold_mask + i_row * N, i_head, i_key_head, eps,
                    N, NP, H, HV, K, KB, IS_PER_CHANNEL, HAS_NORM,
                )  # fmt: skip
        return
    entry, m_live, newer, m_newer = _ring(entries, zero_entry, N, NP)
    written = tl.load(ring_write + i_row)
    oldest = tl.load(entries)
    p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
    ring_keys = ()
    keys = ()
    queries = ()
    decays = ()
    key_squares = o_k * 0.0
    query_squares = o_k * 0.0
    products = o_k * 0.0
    for c in tl.static_range(K // KB):
        key = tl.load(k + i_row * k_stride + i_key_head * K + c * KB + o_k)
        query = tl.load(q + i_row * q_stride + i_key_head * K + c * KB + o_k).to(tl.float32)
        ring_keys = ring_keys + (tl.load(p_keys + c * KB, mask=m_live[:, None], other=0),)
        if IS_PER_CHANNEL:
            o_c = c * KB + o_k
            p_newer = g_ring + ((newer * HV + first_head) * K)[:, None] + o_c[None, :]
            g_newer = tl.load(p_newer, mask=m_newer[:, None], other=0)
            g_oldest = tl.load(g_ring + (oldest * HV + first_head) * K + o_c)
            g = tl.load(log_decay + i_row * g_stride + first_head * K + o_c)
            decays = decays + ((g_newer, g_oldest, g),)
        keys = keys + (key.to(tl.float32),)
        queries = queries + (query,)
    betas = ()
    for h in tl.static_range(HEADS):
        i_head = first_head + h
        if not IS_PER_CHANNEL:
            g = tl.load(log_decay + i_row * g_stride + i_head)
            g_newer = tl.load(g_ring + newer * HV + i_head, mask=m_newer, other=0)
            g_oldest = tl.load(g_ring + oldest * HV + i_head)
            decays = decays + ((g_newer, g_oldest, g),)
        if HAS_DELTA:
            betas = betas + (tl.load(beta + i_row * beta_stride + i_head).to(tl.float32),)
    # all is read before the first is needed; the next kernel's reads of the state would be in
    # the way, and wait for this one
    let_next_start(CHAINED)
    for c in tl.static_range(K // KB):
        if first_head % (HV // H) == 0:
            p_written = k_ring + (written * H + i_key_head) * K + c * KB + o_k
            tl.store(p_written, keys[c].to(k_ring.dtype.element_ty))
        if IS_PER_CHANNEL:
            tl.store(g_ring + (written * HV + first_head) * K + c * KB + o_k, decays[c][2])
        key_squares += keys[c] * keys[c]
        query_squares += queries[c] * queries[c]
        products += keys[c] * queries[c]
    key_scale, query_scale = 1.0, scale
    if HAS_NORM:
        key_scale = tl.rsqrt(tl.sum(key_squares) + eps)
        query_scale *= tl.rsqrt(tl.sum(query_squares) + eps)
    pair = tl.sum(products) * (key_scale * query_scale)

    # with one decay per channel HEADS is 1, and the decays enter here
    key_sum = tl.zeros([NP, KB], tl.float32)
    query_sum = tl.zeros([NP, KB], tl.float32)
    squares = tl.zeros([NP, KB], tl.float32)
    state_keys = ()
    state_queries = ()
    for c in tl.static_range(K // KB):
        ring_key = ring_keys[c].to(tl.float32)
        key, query = keys[c] * key_scale, queries[c] * query_scale
        squares += ring_key * ring_key
        state_decay = 1.0
        if IS_PER_CHANNEL:
            g_newer, g_oldest, g = decays[c]
            ring_key *= _decay(_sums(g_newer))
            key *= _decay(g)
            query *= _decay(g)
            state_decay = _decay(tl.sum(g_newer, 0) + g_oldest)
        key_sum += ring_key * key[None, :]
        query_sum += ring_key * query[None, :]
        state_keys = state_keys + (key * state_decay,)
        state_queries = state_queries + (query * state_decay,)
    factor = tl.where(m_live, 1.0, 0.0)
    if HAS_NORM:
        factor *= tl.rsqrt(tl.where(m_live, tl.sum(squares, 1) + eps, 1.0))
    key_score = tl.sum(key_sum, 1) * factor
    query_score = tl.sum(query_sum, 1) * factor

    for h in tl.static_range(HEADS):
        i_head = first_head + h
        record = records + (i_row * HV + i_head) * SIZE
        ring_decay = tl.full([NP], 1.0, tl.float32)
        decay = 1.0
        if not IS_PER_CHANNEL:
            g_newer, g_oldest, g = decays[h]
            tl.store(g_ring + written * HV + i_head, g)
            ring_decay = _decay(_sums(g_newer) + g)
            decay = _decay(tl.sum(g_newer, 0) + g_oldest + g)
        b_beta = 0.0
        if HAS_DELTA:
            b_beta = betas[h]
        # d = beta (v - past(k)), o = past(q) + pair d
        p_ring = record + COLUMNS * K + o_n
        p_value = record + COLUMNS * (K + NP)
        of_key = pair * b_beta
        for c in tl.static_range(K // KB):
            state_query = state_queries[c] - of_key * state_keys[c]
            if HAS_DELTA:
                tl.store(record + c * KB + o_k, -b_beta * decay * state_keys[c])
            tl.store(record + (COLUMNS - 1) * K + c * KB + o_k, decay * state_query)
        if HAS_DELTA:
            tl.store(p_ring, -b_beta * key_score * ring_decay)
            tl.store(p_ring + NP, (query_score - of_key * key_score) * ring_decay)
            tl.store(p_value, b_beta)
            tl.store(p_value + 1, of_key)
        else:
            tl.store(p_ring, query_score * ring_decay)
            tl.store(p_value, pair)


@triton.jit(do_not_specialize=["zero_entry"])
def _window_weights_kernel(
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
    XP: tl.constexpr,  # power of two of at least the columns and 16
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    SPLIT_X: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weights of a window of 2 to 16 tokens, a chain or a tree, on matrix units.

    The vectors `x` [XP, K] stand in the columns' order: keys, then queries.
    """
    await_inputs(CHAINED)
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_key_head = i_head // (HV // H)
    COLUMNS: tl.constexpr = 2 * W if HAS_DELTA else W
    o_n, o_x, o_k = tl.arange(0, NP), tl.arange(0, XP), tl.arange(0, K)
    entries = ring_read + i_row * N
    entry, m_live, newer, m_newer = _ring(entries, zero_entry, N, NP)
    oldest = tl.load(entries)
    p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_k[None, :]
    ring_keys = tl.load(p_keys, mask=m_live[:, None], other=0).to(tl.float32)
    p_g_ring = g_ring + i_head * (K if IS_PER_CHANNEL else 1)
    if IS_PER_CHANNEL:
        p_newer = p_g_ring + (newer * (HV * K))[:, None] + o_k[None, :]
        g_newer = tl.load(p_newer, mask=m_newer[:, None], other=0)
        g_oldest = tl.load(p_g_ring + oldest * (HV * K) + o_k)
    else:
        g_newer = tl.load(p_g_ring + newer * HV, mask=m_newer, other=0)
        g_oldest = tl.load(p_g_ring + oldest * HV)

    is_key = (o_x < W) & HAS_DELTA
    node = tl.where(o_x < W, o_x, o_x - W)
    m_query = (o_x < COLUMNS) & (is_key == 0)
    p_key = k + i_row * k_stride + i_key_head * K + o_k
    p_query = q + i_row * q_stride + i_key_head * K + o_k
    p_g = log_decay + i_row * g_stride + i_head * (K if IS_PER_CHANNEL else 1)
    p_x = p_key[None, :] + (node * k_token_stride)[:, None]
    x = tl.load(p_x, mask=is_key[:, None], other=0).to(tl.float32)
    p_x = p_query[None, :] + (node * q_token_stride)[:, None]
    x += tl.load(p_x, mask=m_query[:, None], other=0).to(tl.float32)
    x_scale = tl.where(m_query, scale, 1.0)
    if HAS_NORM:
        x_scale *= tl.rsqrt(tl.where(o_x < COLUMNS, tl.sum(x * x, 1) + eps, 1.0))
    if HAS_TREE:
        bits = tl.load(ancestors + i_row * W + node, mask=o_x < COLUMNS, other=0)
    else:
        bits = (2 << node.to(tl.int64)) - 1

    # node by node from the last: `since` sums g along each column's path over the nodes after it
    pairs = tl.zeros([XP, XP], tl.float32)  # [node, column]
    since = tl.zeros([XP, K] if IS_PER_CHANNEL else [XP], tl.float32)
    for i in tl.range(0, W, num_stages=1):
        last = W - 1 - i
        written = tl.load(ring_write + i_row * W + last)
        is_above = ((bits >> last) & 1) != 0
        key = tl.load(p_key + last * k_token_stride)
        if i_head % (HV // H) == 0:
            p_written = k_ring + (written * H + i_key_head) * K + o_k
            tl.store(p_written, key.to(k_ring.dtype.element_ty))
        key = key.to(tl.float32)
        if IS_PER_CHANNEL:
            score = tl.sum(x * _decay(since) * key[None, :], 1)
            g = tl.load(p_g + last * g_token_stride + o_k)
            tl.store(p_g_ring + written * (HV * K) + o_k, g)
            since += tl.where(is_above[:, None], g[None, :], 0.0)
        else:
            score = tl.sum(x * key[None, :], 1) * _decay(since)
            g = tl.load(p_g + last * g_token_stride)
            tl.store(p_g_ring + written * HV, g)
            since += tl.where(is_above, g, 0.0)
        is_paired = is_above & ((is_key == 0) | (node != last))
        score = tl.where(is_paired, score, 0.0)
        pairs = tl.where(o_x[:, None] == last, score[None, :], pairs)

    # columns are solved for on the identity: y gains node j's d times its pair's weight
    sign = tl.where(m_query, 1.0, 0.0)
    mixed = tl.where(o_x[:, None] == o_x[None, :], 1.0, 0.0)
    if HAS_DELTA:
        p_beta = beta + i_row * beta_stride + i_head + node * beta_token_stride
        sign -= tl.load(p_beta, mask=is_key, other=0).to(tl.float32)
        pairs *= x_scale[:, None]
    pairs *= (sign * x_scale)[None, :]
    if HAS_DELTA:
        for j in tl.range(0, W, num_stages=1):
            d = tl.sum(tl.where(o_x[None, :] == j, mixed, 0.0), 1)
            weight = tl.sum(tl.where(o_x[:, None] == j, pairs, 0.0), 0)
            mixed += d[:, None] * weight[None, :]
        mixed *= sign[:, None]

    record = records + (i_row * HV + i_head) * SIZE
    m_x = o_x < COLUMNS
    p_value = record + COLUMNS * (K + NP) + (o_x * W)[None, :] + o_x[:, None]
    tl.store(p_value, -mixed if HAS_DELTA else pairs, mask=(o_x < W)[:, None] & m_x[None, :])

    # the vectors as they are where the ring ends, and what the ring's entries weigh for them
    column = x_scale
    factor = tl.where(m_live, 1.0, 0.0)
    if HAS_NORM:
        squares = tl.sum(ring_keys * ring_keys, 1)
        factor *= tl.rsqrt(tl.where(m_live, squares + eps, 1.0))
    if IS_PER_CHANNEL:
        x *= _decay(since)
        ring_keys *= _decay(_sums(g_newer))
    else:
        column *= _decay(since)
        factor *= _decay(_sums(g_newer))
    ring = _dot(ring_keys, tl.trans(x), tl.zeros([NP, XP], tl.float32), SPLIT_X, SPLIT_X)
    ring *= factor[:, None] * column[None, :]
    state_decay = _decay(tl.sum(g_newer, 0) + g_oldest)
    if IS_PER_CHANNEL:
        x *= state_decay[None, :] * column[:, None]
    else:
        x *= (state_decay * column)[:, None]
    if HAS_DELTA:
        ring = _dot(ring, mixed, tl.zeros([NP, XP], tl.float32), SPLIT_A=True, SPLIT_B=True)
        zeros = tl.zeros([XP, K], tl.float32)
        x = _dot(tl.trans(mixed), x, zeros, SPLIT_A=True, SPLIT_B=True)
    tl.store(record + (o_x * K)[:, None] + o_k[None, :], x, mask=m_x[:, None])
    p_ring = record + COLUMNS * K + (o_x * NP)[None, :] + o_n[:, None]
    tl.store(p_ring, ring, mask=m_x[None, :] & (o_n >= 0)[:, None])
    if tl.load(fold_mask + i_row * N) != 0:
        _fold_weights(
            record + COLUMNS * (K + NP + W), k_ring, g_ring, entries, fold_mask + i_row * N,
            i_head, i_key_head, eps, N, NP, H, HV, K, KB, IS_PER_CHANNEL, HAS_NORM,
        )  # fmt: skip


@triton.jit
def _fold_weights_kernel(
    records,
    k_ring,
    g_ring,
    ring_read,
    mask,
    eps,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    SIZE: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Records that hold a fold alone."""
    await_inputs(CHAINED)
    i_head, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _fold_weights(
        records + (i_row * HV + i_head) * SIZE, k_ring, g_ring, ring_read + i_row * N,
        mask + i_row * N, i_head, i_head // (HV // H), eps,
        N, NP, H, HV, K, KB, IS_PER_CHANNEL, HAS_NORM,
    )  # fmt: skip


@triton.jit
def _tiles(p_state, o_v, K: tl.constexpr, KB: tl.constexpr):
    """Load state channels `o_v` [BV] as tiles [BV, KB]."""
    tiles = ()
    for c in tl.static_range(K // KB):
        tile = tl.load(p_state + o_v[:, None] * K + (c * KB + tl.arange(0, KB))[None, :])
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def _vector(p_x, K: tl.constexpr, KB: tl.constexpr):
    """Load a vector [K] in parts [KB]."""
    parts = ()
    for c in tl.static_range(K // KB):
        parts = parts + (tl.load(p_x + c * KB + tl.arange(0, KB)),)
    return parts


@triton.jit
def _held(tiles):
    """Return the tiles through an instruction of no effect that keeps its place.

    Else the compiler reorders them for the matrix units as soon as they are loaded, one by one,
    and each read waits for the one before.
    """
    held = ()
    for c in tl.static_range(len(tiles)):
        raw = tiles[c].to(tl.float32)
        held = held + (
            tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [raw], dtype=tl.float32, is_pure=False, pack=1
            ),
        )
    return held


@triton.jit
def _store_fold(
    p_state,  # pointer to the head's state
    p_out,  # pointer to where it goes
    fold,
    d_ring,
    k_ring,
    entries,
    mask,
    i_head,
    i_key_head,
    o_v,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KB: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """Store S exp(G) + sum d_j (k_j exp(G - G_j))^T.

    The state is read again, out of the L2 cache as a rule: kept for the few rows that fold, it
    would take the registers of all. Products are of 23 bits and summed apart from the state,
    which meets one fp32 factor and one fp32 sum per fold.
    """
    o_n, o_k = tl.arange(0, NP), tl.arange(0, KB)
    BV: tl.constexpr = o_v.shape[0]
    m_n = tl.load(mask + o_n, mask=o_n < N, other=0) != 0
    entry = tl.load(entries + o_n, mask=m_n, other=0)
    p_d = d_ring + ((entry * HV + i_head) * V)[None, :] + o_v[:, None]
    d = tl.load(p_d, mask=m_n[None, :], other=0)
    if not IS_PER_CHANNEL:
        factor = tl.load(fold + o_n, mask=m_n, other=0)
        decay = tl.load(fold + NP)
    for c in tl.static_range(K // KB):
        o_c = c * KB + o_k
        if IS_PER_CHANNEL:
            decay = tl.load(fold + o_c)[None, :]
            p_keys = fold + K + (o_n * K)[:, None] + o_c[None, :]
            keys = tl.load(p_keys, mask=m_n[:, None], other=0)
        else:
            p_keys = k_ring + ((entry * H + i_key_head) * K)[:, None] + o_c[None, :]
            keys = tl.load(p_keys, mask=m_n[:, None], other=0).to(tl.float32) * factor[:, None]
        o_state = o_v[:, None] * K + o_c[None, :]
        state = tl.load(p_state + o_state).to(tl.float32) * decay
        zeros = tl.zeros([BV, KB], tl.float32)
        state += _dot(d, keys, zeros, SPLIT_A=True, SPLIT_B=True)
        tl.store(p_out + o_state, state.to(p_out.dtype.element_ty))


@triton.jit
def _store_few(
    tiles,
    p_out,  # pointer to the head's state
    fold,
    d_ring,
    k_ring,
    entries,
    mask,
    i_head,
    i_key_head,
    o_v,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KB: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
):
    """Store the same from the tiles at hand, for so few entries that they are added one by one."""
    o_k = tl.arange(0, KB)
    d = ()
    p_keys = ()
    factors = ()
    for j in tl.static_range(N):
        is_folded = tl.load(mask + j) != 0
        entry = tl.load(entries + j)
        p_d = d_ring + (entry * HV + i_head) * V + o_v
        d = d + (tl.load(p_d, mask=is_folded & (o_v >= 0), other=0),)
        if IS_PER_CHANNEL:
            p_keys = p_keys + (fold + (1 + j) * K + o_k,)
            factors = factors + (1.0,)
        else:
            p_keys = p_keys + (k_ring + (entry * H + i_key_head) * K + o_k,)
            factors = factors + (tl.load(fold + j, mask=is_folded, other=0),)
    for c in tl.static_range(K // KB):
        decay = tl.load(fold + c * KB + o_k)[None, :] if IS_PER_CHANNEL else tl.load(fold + NP)
        added = tl.zeros([o_v.shape[0], KB], tl.float32)
        for j in tl.static_range(N):
            m_j = (tl.load(mask + j) != 0) & (o_k >= 0)
            key = tl.load(p_keys[j] + c * KB, mask=m_j, other=0).to(tl.float32) * factors[j]
            added += d[j][:, None] * key[None, :]
        state = tiles[c].to(tl.float32) * decay + added
        o_state = o_v[:, None] * K + (c * KB + o_k)[None, :]
        tl.store(p_out + o_state, state.to(p_out.dtype.element_ty))


@triton.jit
def _fold_stream_kernel(
    records,
    checkpoint,
    d_ring,
    k_ring,
    ring_read,
    mask,
    read_rows,
    out_rows,
    N: tl.constexpr,
    NP: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,
    SIZE: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Fold the masked prefix of the ring into another row, or the same."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    read_row, out_row = tl.load(read_rows + i_row), tl.load(out_rows + i_row)
    await_inputs(CHAINED)
    p_state = checkpoint + (read_row * HV + i_head) * (V * K)
    p_out = checkpoint + (out_row * HV + i_head) * (V * K)
    _store_fold(
        p_state, p_out, records + (i_row * HV + i_head) * SIZE, d_ring, k_ring,
        ring_read + i_row * N, mask + i_row * N, i_head, i_head // (HV // H), o_v,
        N, NP, H, HV, K, V, KB, IS_PER_CHANNEL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["zero_entry"])
def _stream_kernel(
    records,
    v,
    out,
    checkpoint,
    d_ring,
    k_ring,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    v_stride,
    v_token_stride,
    zero_entry,
    N: tl.constexpr,
    NP: tl.constexpr,
    W: tl.constexpr,
    XP: tl.constexpr,  # power of two of at least the columns and 8
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    KB: tl.constexpr,  # key channels of a tile, of 128 bytes
    SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    IS_PER_CHANNEL: tl.constexpr,
    HAS_DOTS: tl.constexpr,  # matrix units, NP at least 16; else plain fp32 sums
    SPLIT_STATE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Every column of BV value channels, out of one pass over their state; and the fold."""
    i_head, i_row = tl.program_id(0) // (V // BV), tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) % (V // BV) * BV + tl.arange(0, BV)
    o_n, o_k, o_x = tl.arange(0, NP), tl.arange(0, KB), tl.arange(0, XP)
    COLUMNS: tl.constexpr = 2 * W if HAS_DELTA else W
    entries = ring_read + i_row * N
    row = tl.load(read_rows + i_row)
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    is_folding = tl.load(fold_mask + i_row * N) != 0
    p_state = checkpoint + (row * HV + i_head) * (V * K)
    tiles = _tiles(p_state, o_v, K, KB)
    if HAS_DOTS:
        p_d = d_ring + ((entry * HV + i_head) * V)[None, :] + o_v[:, None]
        ring_d = tl.load(p_d, mask=(entry != zero_entry)[None, :], other=0)
    else:
        p_d = d_ring + ((entry * HV + i_head) * V)[:, None] + o_v[None, :]
        ring_d = tl.load(p_d, mask=(entry != zero_entry)[:, None], other=0)
    values = ()
    p_value = v + i_row * v_stride + i_head * V + o_v
    for j in tl.static_range(W):
        values = values + (tl.load(p_value + j * v_token_stride),)
    await_inputs(CHAINED)
    if CHAINED and HAS_DOTS:
        tiles = _held(tiles)

    record = records + (i_row * HV + i_head) * SIZE
    p_ring, p_u = record + COLUMNS * K, record + COLUMNS * (K + NP)
    p_out = out + i_row * (W * HV * V) + i_head * V
    p_written = d_ring + i_head * V
    if HAS_DOTS:
        m_x = o_x < COLUMNS
        p_x = record + (o_x * K)[:, None] + o_k[None, :]
        p_ring += (o_x * NP)[None, :] + o_n[:, None]
        ring = tl.load(p_ring, mask=m_x[None, :], other=0)
        y = tl.zeros([BV, XP], tl.float32)
        for c in tl.static_range(K // KB):
            x = tl.trans(tl.load(p_x + c * KB, mask=m_x[:, None], other=0))
            y = _dot(tiles[c].to(tl.float32), x, y, SPLIT_STATE, SPLIT_B=True)
        y = _dot(ring_d, ring, y, SPLIT_A=True, SPLIT_B=True)
        for j in tl.static_range(W):
            u = tl.load(p_u + o_x * W + j, mask=m_x, other=0)
            y += values[j].to(tl.float32)[:, None] * u[None, :]
        is_d = o_x < COLUMNS - W
        node = tl.where(is_d, o_x, o_x - (COLUMNS - W))
        p_column = p_out + (node * (HV * V))[None, :] + o_v[:, None]
        tl.store(p_column, y.to(out.dtype.element_ty), mask=(m_x & (is_d == 0))[None, :])
        if HAS_DELTA:
            written = tl.load(ring_write + i_row * W + node, mask=is_d, other=0)
            p_column = p_written + (written * (HV * V))[None, :] + o_v[:, None]
            tl.store(p_column, y, mask=is_d[None, :])
    else:
        # the next column's weights are on their way while one is summed
        x = _vector(record, K, KB)
        ring = tl.load(p_ring + o_n)
        for i in tl.static_range(COLUMNS):
            if i + 1 < COLUMNS:
                next_x = _vector(record + (i + 1) * K, K, KB)
                next_ring = tl.load(p_ring + (i + 1) * NP + o_n)
            y = tl.zeros([BV, KB], tl.float32)
            for c in tl.static_range(K // KB):
                y += tiles[c].to(tl.float32) * x[c][None, :]
            y = tl.sum(y, 1) + tl.sum(ring_d * ring[:, None], 0)
            for j in tl.static_range(W):
                y += values[j].to(tl.float32) * tl.load(p_u + i * W + j)
            if i < COLUMNS - W:
                tl.store(p_written + tl.load(ring_write + i_row * W + i) * (HV * V) + o_v, y)
            else:
                p_node = p_out + (i - (COLUMNS - W)) * (HV * V) + o_v
                tl.store(p_node, y.to(out.dtype.element_ty))
            if i + 1 < COLUMNS:
                x, ring = next_x, next_ring
    if not HAS_DELTA:
        for j in tl.static_range(W):
            written = tl.load(ring_write + i_row * W + j)
            tl.store(p_written + written * (HV * V) + o_v, values[j].to(tl.float32))
    if is_folding:
        p_fold = checkpoint + (tl.load(fold_rows + i_row) * HV + i_head) * (V * K)
        fold = record + COLUMNS * (K + NP + W)
        if NP < 16:
            _store_few(
                tiles, p_fold, fold, d_ring, k_ring, entries, fold_mask + i_row * N,
                i_head, i_head // (HV // H), o_v, N, NP, H, HV, K, V, KB, IS_PER_CHANNEL,
            )  # fmt: skip
        else:
            _store_fold(
                p_state, p_fold, fold, d_ring, k_ring, entries, fold_mask + i_row * N,
                i_head, i_head // (HV // H), o_v, N, NP, H, HV, K, V, KB, IS_PER_CHANNEL,
            )  # fmt: skip
