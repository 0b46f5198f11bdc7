"""Windows of 2 to 16 tokens in two launches, the first of them; formulas in `reference.py`.

A column of a window is what a node's key or its query reads. Keys stand at columns 0 to W - 1 and
queries at HALF to HALF + W - 1 of XP = 2 HALF. Three products make up all of a head's results:

    y   = S_0 x^T + sum_ring d_j r_j        what every column reads out of the past
    all = (y - [v, 0]) M                    each node's d, and its output

x are the window's vectors. M [XP, XP] does the forward substitution of the delta rule, beta and the
products of the window's own keys with its columns; r are the ring entries' scores. Both depend on
keys, decays and beta alone, so a weights kernel, a program per row and value head, leaves them in a
*record*: as they are small, it takes little, and the stream kernel, many programs of one warp, has
little to read besides its state. With one decay per head x are the keys and queries themselves, and
the stream kernel is through with the state before it needs a record: it is launched as a
programmatic dependent of the weights kernel, and waits for that one only then.

A record is the columns' factors [XP]; with a decay per channel x [XP, K], decayed to where the ring
ends, and the decays of the state's channels up to there [K]; then r^T [XP, NP], M^T [XP, XP] and
the fold's weights, of `fold_kernels.py`. Mamba-2 is a delta rule whose keys read nothing and whose
beta is 1.

Decays are built up from the newest on, as in `token_kernel.py`. The weights kernel with a decay
per channel is in `channel_weights_kernels.py`.
"""

# ruff: noqa: PLR0912, RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from gapless.ops.chaining import await_inputs_only, let_next_start
from gapless.ops.linear_replay.arithmetic import _decay, _dot
from gapless.ops.linear_replay.fold_kernels import _fold_factors


@triton.jit
def _products(a, b, sums, IS_SHORT: tl.constexpr):
    """Add a @ b^T of vectors as they were read: products of 16 bits are exact."""
    if IS_SHORT:
        sums = tl.dot(a, tl.trans(b), acc=sums)
    else:
        right = tl.trans(b.to(tl.float32))
        sums = _dot(a.to(tl.float32), right, sums, SPLIT_A=True, SPLIT_B=True)
    return sums


@triton.jit
def _diagonal(x):
    """Return the diagonal of a square."""
    o_x = tl.arange(0, x.shape[0])
    return tl.sum(tl.where(o_x[:, None] == o_x[None, :], x, 0.0), 1)


@triton.jit
def _is_above(bits, node, i_node, HAS_TREE: tl.constexpr):
    """Return for each column whether a node is its own or an ancestor of it."""
    return ((bits >> i_node) & 1) != 0 if HAS_TREE else node >= i_node


@triton.jit
def _store_solved(
    p_mixed,  # pointer to a record's M^T
    pairs,  # [node, column], decayed, of vectors as they were read
    x_scale,
    b_beta,
    bits,
    W: tl.constexpr,
    HALF: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Store what the columns are in sum, once each has taken in the nodes on its path."""
    XP: tl.constexpr = 2 * HALF
    UNROLL: tl.constexpr = W if W <= 4 else 1
    o_x = tl.arange(0, XP)
    node = o_x % HALF
    m_key = o_x < W
    m_query = (o_x >= HALF) & (node < W)
    is_from = tl.zeros([XP, XP], tl.int32)
    for j in tl.range(0, W, num_stages=1, loop_unroll_factor=UNROLL):
        is_above = _is_above(bits, node, j, HAS_TREE)
        is_from = tl.where(o_x[:, None] == j, is_above.to(tl.int32)[None, :], is_from)
    m_to = m_query[None, :]
    if HAS_DELTA:
        m_to |= m_key[None, :] & (node[None, :] != o_x[:, None])
    sign = tl.where(m_key, -b_beta, tl.where(m_query, 1.0, 0.0))
    pairs *= x_scale[:, None] * (sign * x_scale)[None, :]
    pairs = tl.where(m_to & (is_from != 0), pairs, 0.0)

    # solved on the identity: all columns gain node j's d times its pair
    mixed = tl.where(o_x[:, None] == o_x[None, :], 1.0, 0.0)
    for j in tl.range(0, W, num_stages=1, loop_unroll_factor=UNROLL):
        d = tl.sum(tl.where(o_x[None, :] == j, mixed, 0.0), 1)
        later = tl.sum(tl.where(o_x[:, None] == j, pairs, 0.0), 0)
        mixed += d[:, None] * later[None, :]
    tl.store(p_mixed + (o_x * XP)[None, :] + o_x[:, None], mixed * sign[:, None])


@triton.jit
def _ring_block(
    p_keys,  # pointer to the key head's keys in the ring
    p_g,  # and to the first value head's decays
    entries,
    first,
    num_ring,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
):
    """Load 16 ring entries from the `first` on, the newest being 0: keys in parts [16, KB], and for
    each value head the decays of each one's newer neighbour [16]."""
    r = first + tl.arange(0, 16)
    o_k = tl.max_contiguous(tl.arange(0, KB), 4)
    m_live = r < num_ring
    m_newer = m_live & (r > 0)
    entry = tl.load(entries + num_ring - 1 - r, mask=m_live, other=0)
    newer = tl.load(entries + num_ring - r, mask=m_newer, other=0)
    p_entry = p_keys + (entry * (H * K))[:, None] + o_k[None, :]
    keys = ()
    for c in tl.static_range(K // KB):
        keys = keys + (tl.load(p_entry + c * KB, mask=m_live[:, None], other=0),)
    g_newer = ()
    for h in tl.static_range(HEADS):
        g_newer = g_newer + (tl.load(p_g + newer * HV + h, mask=m_newer, other=0),)
    return keys, g_newer


@triton.jit
def _store_scores(
    p_ring,  # pointer to the first value head's scores
    keys,
    g_newer,
    since,  # sums of the decays that came before
    x,
    columns,  # factors of the columns
    first,
    num_ring,
    eps,
    NP: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_SHORT: tl.constexpr,
):
    """Store what 16 ring entries count for in each column; return the sums of decays by then.

    Decays, and what is made of them, are tuples of the value heads.
    """
    r = first + tl.arange(0, 16)
    XP: tl.constexpr = x[0].shape[0]
    scores = tl.zeros([16, XP], tl.float32)
    squares = tl.zeros([16, 16], tl.float32)
    for c in tl.static_range(len(keys)):
        if HAS_NORM:
            squares = _products(keys[c], keys[c], squares, IS_SHORT)
        scores = _products(keys[c], x[c], scores, IS_SHORT)
    if HAS_NORM:
        scores *= tl.rsqrt(tl.where(r < num_ring, _diagonal(squares) + eps, 1.0))[:, None]
    p_scores = p_ring + (num_ring - 1 - r)[:, None] + (tl.arange(0, XP) * NP)[None, :]
    sums = ()
    for h in tl.static_range(len(g_newer)):
        decayed = scores * _decay(tl.cumsum(g_newer[h], 0) + since[h])[:, None]
        tl.store(p_scores + h * SIZE, decayed * columns[h][None, :], mask=(r < num_ring)[:, None])
        sums = sums + (since[h] + tl.sum(g_newer[h], 0),)
    return sums


@triton.jit(do_not_specialize=["zero_entry"])
def _window_scores_kernel(
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
    KB: tl.constexpr,  # key channels of a part
    HEADS: tl.constexpr,  # value heads of a program, of one key head
    SIZE: tl.constexpr,
    RING: tl.constexpr,  # where in a record the scores are
    HAS_TREE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_SHORT: tl.constexpr,  # whether vectors are multiplied as 16-bit values
    CHAINED: tl.constexpr,
):
    """Weights of a row and of value heads, and the window's keys and decays put into the rings."""
    first_head, i_row = tl.program_id(0) * HEADS, tl.program_id(1).to(tl.int64)
    i_key_head = first_head // (HV // H)
    XP: tl.constexpr = 2 * HALF
    UNROLL: tl.constexpr = W if W <= 4 else 1
    o_x, o_n = tl.arange(0, XP), tl.arange(0, NP)
    # four at a time, so that keys and decays are spread over threads alike
    o_k = tl.max_contiguous(tl.arange(0, KB), 4)
    node = o_x % HALF
    m_key = o_x < W
    m_query = (o_x >= HALF) & (node < W)

    entries = ring_read + i_row * N
    record = records + (i_row * HV + first_head) * SIZE
    if tl.program_id(2) == 1:
        await_inputs_only(CHAINED)
        # beside the others, which the stream kernel waits for as well
        p_mask = fold_mask + i_row * N
        if tl.load(p_mask) != 0:
            for h in tl.static_range(HEADS):
                factor, decay = _fold_factors(
                    k_ring, g_ring, entries, p_mask, first_head + h, i_key_head, eps,
                    N, NP, H, HV, K, 32, HAS_NORM,
                )  # fmt: skip
                fold = record + h * SIZE + RING + (NP + XP) * XP
                tl.store(fold + o_n, factor)
                tl.store(fold + NP, decay)
        return

    # all reads are under way before the first is needed
    entry = tl.load(entries + o_n, mask=o_n < N, other=zero_entry)
    num_ring = tl.sum((entry != zero_entry).to(tl.int32))
    p_ring_keys = k_ring + i_key_head * K
    p_ring_g = g_ring + first_head
    ring_keys, g_newer = _ring_block(
        p_ring_keys, p_ring_g, entries, 0, num_ring, HEADS, H, HV, K, KB
    )
    p_oldest = p_ring_g + tl.load(entries) * HV
    written = tl.load(ring_write + i_row * W + node, mask=m_key, other=0)
    # what came before may write what follows, but nothing that the ring holds
    await_inputs_only(CHAINED)
    p_key = k + i_row * k_stride + i_key_head * K
    p_x = p_key + (node * k_token_stride)[:, None] + o_k[None, :]
    p_query = q + i_row * q_stride + i_key_head * K
    p_query = p_query + (node * q_token_stride)[:, None] + o_k[None, :]
    p_g = log_decay + i_row * g_stride + first_head
    x = ()
    for c in tl.static_range(K // KB):
        key = tl.load(p_x + c * KB, mask=m_key[:, None], other=0)
        x = x + (tl.load(p_query + c * KB, mask=m_query[:, None], other=key),)
    bits = o_x
    if HAS_TREE:
        bits = tl.load(ancestors + i_row * W + node, mask=node < W, other=0)
    gates = ()
    for h in tl.static_range(HEADS):
        b_beta = tl.full([XP], 1.0, tl.float32)
        if HAS_DELTA:
            p_beta = beta + i_row * beta_stride + first_head + h + node * beta_token_stride
            b_beta = tl.load(p_beta, mask=m_key, other=0).to(tl.float32)
        gates = gates + ((tl.load(p_g + h + node * g_token_stride, mask=m_key, other=0), b_beta),)
    # the next kernel's reads of the state would be in the way, and wait for this one
    let_next_start(CHAINED)

    # no entry that a row reads is one that it writes
    m_written = m_key & (first_head % (HV // H) == 0)
    for c in tl.static_range(K // KB):
        p_written = p_ring_keys + (written * (H * K))[:, None] + (c * KB + o_k)[None, :]
        tl.store(p_written, x[c].to(k_ring.dtype.element_ty), mask=m_written[:, None])

    x_scale = tl.where(m_query, scale, 1.0)
    products = tl.zeros([XP, XP], tl.float32)
    for c in tl.static_range(K // KB):
        products = _products(x[c], x[c], products, IS_SHORT)
    if HAS_NORM:
        x_scale *= tl.rsqrt(tl.where(m_key | m_query, _diagonal(products) + eps, 1.0))

    # decays up to each column from where the ring ends, and what the ring is for it
    are_above = _is_above(bits[:, None], node[:, None], o_x[None, :], HAS_TREE)
    columns = ()
    past = ()
    for h in tl.static_range(HEADS):
        g = gates[h][0]
        tl.store(p_ring_g + h + written * HV, g, mask=m_key)
        column = x_scale if HAS_DELTA else tl.where(m_key, 0.0, x_scale)
        columns = columns + (column * _decay(tl.sum(tl.where(are_above, g[None, :], 0.0), 1)),)
        past = past + (0.0,)
    past = _store_scores(
        record + RING, ring_keys, g_newer, past, x, columns, 0, num_ring, eps,
        NP, SIZE, HAS_NORM, IS_SHORT,
    )  # fmt: skip
    for first in tl.range(16, num_ring, 16, num_stages=1):
        ring_keys, g_newer = _ring_block(
            p_ring_keys, p_ring_g, entries, first, num_ring, HEADS, H, HV, K, KB
        )
        past = _store_scores(
            record + RING, ring_keys, g_newer, past, x, columns, first, num_ring, eps,
            NP, SIZE, HAS_NORM, IS_SHORT,
        )  # fmt: skip

    for h in tl.static_range(HEADS):
        tl.store(record + h * SIZE + o_x, columns[h] * _decay(past[h] + tl.load(p_oldest + h)))
        # pairs [node, column], node by node from the last: `since` is the decay from there on
        exponents = tl.zeros([XP, XP], tl.float32)
        since = tl.zeros([XP], tl.float32)
        for i in tl.range(0, W, num_stages=1, loop_unroll_factor=UNROLL):
            last = W - 1 - i
            exponents = tl.where(o_x[:, None] == last, since[None, :], exponents)
            is_above = _is_above(bits, node, last, HAS_TREE)
            since += tl.where(is_above, tl.load(p_g + h + last * g_token_stride), 0.0)
        _store_solved(
            record + h * SIZE + RING + NP * XP, products * _decay(exponents), x_scale, gates[h][1],
            bits, W, HALF, HAS_TREE, HAS_DELTA,
        )  # fmt: skip
