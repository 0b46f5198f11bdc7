"""What keys, decays and beta say of a group of items, with a decay per channel, by the parts that
read: `kernel.py`.

Formulas are those of `channel_weights_kernels.py`; here a warp has half of an item's channels, a
*part*: part h * GROUP + i is half h of item i. Ring entries are decayed by threads that have all of
an entry block's values of two channels, and multiplied with columns on matrix units. What is summed
over channels is a sum of the two parts' sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gapless.ops.linear_replay.arithmetic import _decay, _exact_decay, _head
from gapless.ops.linear_replay.resident.fetch import _place
from gapless.ops.linear_replay.resident.items import _pairs, _unpacked, barrier
from gapless.ops.linear_replay.resident.window.groups import (
    CHANNEL_GROUP,
    FOLDS,
    _before,
    _group_list,
    _group_word,
)
from gapless.ops.linear_replay.resident.window.weigh import (
    _key_scale,
    _of_column,
    _stacked,
    _store_solved,
    _unstacked,
)
from gapless.ops.linear_replay.window_scores_kernel import _is_above

GROUP = CHANNEL_GROUP
PARTS = gl.constexpr(4)
# channels of a part
KB = gl.constexpr(64)
# rows of a group's facts: a head and how many entries it folds, a row, and the entries written
HEAD = gl.constexpr(0)
ROW = gl.constexpr(1)
WRITTEN = gl.constexpr(4)


@gluon.jit
def _store_facts(facts, places, group, XP: gl.constexpr):
    """Store for each part what its item is."""
    WORDS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LISTS: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    halves = facts._reinterpret(gl.int32, [16, GROUP], FLAT)
    head = _group_word(places, group, 0, GROUP, WORDS)
    row = _group_word(places, group, 2, GROUP, WORDS)
    written = _group_list(places[2], group, GROUP, XP).slice(0, 4, dim=1).load(LISTS)
    for half in gl.static_range(2):
        halves.index(2 * HEAD + half).store(head)
        halves.index(2 * ROW + half).store(row)
        of_half = facts.slice(WRITTEN, 4).slice(half * GROUP, GROUP, dim=1)
        of_half.permute([1, 0]).store(written)
    barrier()


@gluon.jit
def _fact(facts, n: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the n-th fact of each part, [PARTS]."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return facts._reinterpret(gl.int32, [8, PARTS], FLAT).index(n).load(LAYOUT)


@gluon.jit
def _floats(pairs, VECTOR: gl.constexpr):
    """Return [PARTS, KB] of pairs of bfloat16."""
    first, second = _unpacked(pairs)
    return gl.convert_layout(
        gl.reshape(gl.join(first, second), [PARTS, KB]), VECTOR, assert_trivial=True
    )


@gluon.jit
def _rows_of(vectors, WALK: gl.constexpr):
    """Return eight [PARTS, KB] as [PARTS, 8, KB]."""
    a = gl.join(gl.join(vectors[0], vectors[1]), gl.join(vectors[2], vectors[3]))
    b = gl.join(gl.join(vectors[4], vectors[5]), gl.join(vectors[6], vectors[7]))
    rows = gl.permute(gl.join(a, b), [0, 4, 3, 2, 1])
    return gl.convert_layout(gl.reshape(rows, [PARTS, 8, KB]), WALK, assert_trivial=True)


@gluon.jit
def _take_tokens(
    tokens, k_ring, g_ring, facts,
    W: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, WALK: gl.constexpr,
):  # fmt: skip
    """Return a window's columns [PARTS, 8, KB], and of each node its key and decay [PARTS, KB]; and
    put keys and decays into the rings."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [PARTS, 1], [1, 0])
    OF_VECTOR: gl.constexpr = gl.SliceLayout(1, VECTOR)
    OF_PAIRS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    q, q_stride, q_token_stride = tokens[0]
    k, k_stride, k_token_stride = tokens[1]
    log_decay, g_stride, g_token_stride = tokens[3]
    # all is asked for before the first is needed
    o_pair = gl.arange(0, KB // 2, gl.SliceLayout(0, PAIRS))[None, :]
    head, row = _fact(facts, HEAD, OF_PAIRS) // FOLDS, _fact(facts, ROW, OF_PAIRS).to(gl.int64)
    first = gl.arange(0, PARTS, OF_PAIRS) // GROUP * KB
    channel = head // (HV // H) * K + first
    key_pairs, query_pairs, decays = (), (), ()
    for n in gl.static_range(W):
        p_key = k + (row * k_stride + n * k_token_stride + channel)
        key_pairs = key_pairs + (gl.load(_pairs(p_key)[:, None] + o_pair),)
        p_query = q + (row * q_stride + n * q_token_stride + channel)
        query_pairs = query_pairs + (gl.load(_pairs(p_query)[:, None] + o_pair),)
    o_k = gl.arange(0, KB, gl.SliceLayout(0, VECTOR))[None, :]
    g_head, g_row = _fact(facts, HEAD, OF_VECTOR) // FOLDS, _fact(facts, ROW, OF_VECTOR)
    g_channel = g_head * K + gl.arange(0, PARTS, OF_VECTOR) // GROUP * KB
    for n in gl.static_range(W):
        p_g = log_decay + (g_row.to(gl.int64) * g_stride + n * g_token_stride + g_channel)
        decays = decays + (gl.load(p_g[:, None] + o_k).to(gl.float32),)
    m_key = (head % (HV // H) == 0)[:, None] & (o_pair >= 0)
    for n in gl.static_range(W):
        written = _fact(facts, WRITTEN + n, OF_PAIRS).to(gl.int64)
        p_key = k_ring + (written * (H * K) + channel)
        gl.store(_pairs(p_key)[:, None] + o_pair, key_pairs[n], mask=m_key)
        written = _fact(facts, WRITTEN + n, OF_VECTOR).to(gl.int64)
        gl.store((g_ring + (written * (HV * K) + g_channel))[:, None] + o_k, decays[n])
    keys, queries, rest = (), (), ()
    for n in gl.static_range(W):
        keys = keys + (_floats(key_pairs[n], VECTOR),)
        queries = queries + (_floats(query_pairs[n], VECTOR),)
    for _ in gl.static_range(4 - W):
        rest = rest + (gl.zeros([PARTS, KB], gl.float32, VECTOR),)
    return _rows_of(keys + rest + queries + rest, WALK), keys, decays


@gluon.jit
def _halved(x, LANES: gl.constexpr):
    """Return sums [PARTS, 8, KB / 2] of each thread's own channels."""
    pairs = gl.sum(gl.reshape(x, [PARTS, 8, KB // 2, 2]), 3)
    return gl.convert_layout(pairs, LANES, assert_trivial=True)


@gluon.jit
def _summed(sums, n: gl.constexpr, COLUMNS: gl.constexpr):
    """Return sums over all channels [GROUP, 8] of what parts' threads have stored."""
    # a thread has 4 lanes' sums of 2 columns, and has in the end what COLUMNS says
    LANES: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 4, 8], [2, 2, 1], [1, 2, 0])
    x = sums.index(2 * n).load(LANES) + sums.index(2 * n + 1).load(LANES)
    return gl.convert_layout(gl.sum(x, 2), COLUMNS, assert_trivial=True)


@gluon.jit
def _store_decayed(
    smem_keys, smem_g, folds, facts, is_folding, NB: gl.constexpr, K: gl.constexpr,
    WALK: gl.constexpr,
):  # fmt: skip
    """Put ring keys, decayed to where the ring ends, in the place of decays, and store for items
    that fold what `fetch.py` asks for: in the first place, which is none's, the state's decay, and
    keys that decay up to the newest that is folded; return what the state decays by."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    ENTRIES: gl.constexpr = gl.SliceLayout(2, WALK)
    o_k = gl.arange(0, KB, gl.SliceLayout(0, VECTOR))[None, :]
    since = gl.zeros([PARTS, KB], gl.float32, VECTOR)
    fold_since = since
    num_folded = (_fact(facts, HEAD, gl.SliceLayout(1, ENTRIES)) % FOLDS)[:, None]
    for b in gl.static_range(NB):
        g = smem_g.index(b).load(WALK)
        key = smem_keys.index(b).load(WALK).to(gl.float32)
        smem_g.index(b).store(key * _decay(_before(g, 1) + since[:, None, :]))
        since += gl.sum(g, 1)
        if is_folding:
            o_place = 8 * b + gl.arange(0, 8, gl.SliceLayout(0, ENTRIES))[None, :]
            m_fold = (8 * NB - 1 - o_place < num_folded)[:, :, None] & (o_k >= 0)[:, None, :]
            g = gl.where(m_fold, g, 0.0)
            key *= _decay(_before(g, 1) + fold_since[:, None, :])
            p_key = folds + (_fold_channel(NB, K, gl.SliceLayout(1, ENTRIES))[:, None] + o_place * K)
            gl.store(p_key[:, :, None] + o_k[:, None, :], key, mask=m_fold)
            fold_since += gl.sum(g, 1)
    if is_folding:
        p_state = folds + _fold_channel(NB, K, gl.SliceLayout(1, VECTOR))
        gl.store(p_state[:, None] + o_k, _exact_decay(fold_since))
    return _decay(since)


@gluon.jit
def _fold_channel(NB: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where each part's channels of a group's folds begin, [PARTS]."""
    part = gl.arange(0, PARTS, LAYOUT)
    return part % GROUP * (8 * NB * K) + part // GROUP * KB


@gluon.jit
def _scores(smem_keys, smem_g, smem_x, NB: gl.constexpr, HAS_NORM: gl.constexpr, SQUARE: gl.constexpr):
    """Return of each block of entries what parts count for in each column [PARTS, 8, 8], and what
    their keys' squares sum up to [PARTS, 8]."""
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    SHORT_LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 2)
    SHORT_RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    zeros = gl.zeros([PARTS, 16, 8], gl.float32, UNITS)
    o_row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, SQUARE)))[None, :, None]
    o_column = gl.arange(0, 8, gl.SliceLayout(0, COLUMNS))[None, None, :]
    x = gl.permute(smem_x.permute([0, 2, 1]).load(RIGHT), [0, 2, 1])
    # heads and rests of the columns, 23 bits in all, are each other's neighbours
    head = _head(x)
    left = _stacked(head, x - head, LEFT)
    found, squares = (), ()
    for b in gl.static_range(NB):
        right = smem_g.index(b).permute([0, 2, 1]).load(RIGHT)
        head = _head(right)
        sums = mma_v2(left, right - head, zeros, input_precision="tf32")
        sums = mma_v2(left, head, sums, input_precision="tf32")
        of_heads, of_rests = _unstacked(sums, SQUARE)
        found = found + (of_heads + of_rests,)
        square = gl.zeros([PARTS, 8], gl.float32, COLUMNS)
        if HAS_NORM:
            right = smem_keys.index(b).permute([0, 2, 1]).load(SHORT_RIGHT)
            key = gl.permute(right, [0, 2, 1])
            sums, _ = _unstacked(mma_v2(_stacked(key, key, SHORT_LEFT), right, zeros), SQUARE)
            square = gl.sum(gl.where(o_row == o_column, sums, 0.0), 1)
        squares = squares + (square,)
    return found, squares


@gluon.jit
def _weigh_channels(
    tokens, k_ring, g_ring, folds, inputs, of_weights, smem_x, facts, places, group, scale, eps,
    NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, HAS_TREE: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Work out a group's weights, and put its keys and decays into the rings."""
    # threads have all of an entry block's, or a window's, values of two channels
    WALK: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [PARTS, 1, 1], [2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 1, 32], [PARTS, 1, 1], [2, 1, 0])
    PART_SQUARE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [PARTS, 1, 1], [2, 1, 0])
    # both warps of an item have all of it
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [2, 2, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, SQUARE)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    smem_keys, smem_g, full, empty = inputs
    columns, scores, mixed, factors, _, weighed = of_weights
    beta, beta_stride, beta_token_stride = tokens[2]
    ancestors = tokens[4]
    i = group % 2
    _store_facts(facts, places, group, XP)
    x, keys, decays = _take_tokens(tokens, k_ring, g_ring, facts, W, H, HV, K, WALK)
    o_row = gl.arange(0, XP, gl.SliceLayout(0, ROWS))[None, :]
    o_column = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, COLUMNS)) // FOLDS
    row = _group_word(places, group, 2, GROUP, gl.SliceLayout(1, COLUMNS)).to(gl.int64)
    p_beta = beta + ((row * beta_stride + head)[:, None] + o_column * beta_token_stride)
    b_beta = gl.load(p_beta, mask=(o_column < W) & (row >= 0)[:, None], other=0).to(gl.float32)

    o_x = gl.arange(0, XP, gl.SliceLayout(0, gl.SliceLayout(2, WALK)))[None, :]
    bits, column_bits = o_x, o_column
    node, column_node = o_x % (XP // 2), o_column % (XP // 2)
    if HAS_TREE:
        p_bits = _pairs(ancestors) + (row[:, None] * W + column_node) * 2
        column_bits = gl.load(p_bits, mask=(column_node < W) & (row >= 0)[:, None], other=0)
        part_row = _fact(facts, ROW, gl.SliceLayout(1, gl.SliceLayout(2, WALK))).to(gl.int64)
        p_bits = _pairs(ancestors) + (part_row[:, None] * W + node) * 2
        bits = gl.load(p_bits, mask=(node < W) & (part_row >= 0)[:, None], other=0)
    exponents = gl.zeros([PARTS, XP, KB], gl.float32, WALK)
    for n in gl.static_range(W):
        is_above = _is_above(bits, node, n, HAS_TREE)[:, :, None]
        exponents += gl.where(is_above, decays[n][:, None, :], 0.0)
    decayed = x * _decay(exponents)
    smem_x.index(i).store(decayed)
    mbarrier.wait(full, group & 1)
    is_folding = _folds(places, group, 0) + _folds(places, group, 1) != 0
    state_decay = _store_decayed(
        smem_keys, smem_g, folds + i * (GROUP * 8 * NB * K), facts, is_folding, NB, K, WALK
    )
    barrier()
    found, squares = _scores(smem_keys, smem_g, smem_x.index(i), NB, HAS_NORM, PART_SQUARE)
    barrier()
    # all of the inputs has been read, and sums take their place
    smem_x.index(i).store(decayed * state_decay[:, None, :])
    part_scores = smem_keys._reinterpret(gl.float32, [4 * NB, PARTS, 8, 8], CUBE)
    part_squares = smem_keys._reinterpret(gl.float32, [32 * NB, PARTS, 8], PLAIN)
    for b in gl.static_range(NB):
        part_scores.index(b).store(found[b])
        if HAS_NORM:
            part_squares.index(8 * NB + b).store(squares[b])
    sums = smem_g._reinterpret(gl.float32, [6, PARTS, 8, KB // 2], SUMS)
    sums.index(4).store(_halved(x * x, LANES))
    # node by node from the last: x decays from there on
    for n in gl.static_range(W - 1, -1, -1):
        sums.index(n).store(_halved(x * keys[n][:, None, :], LANES))
        is_above = _is_above(bits, node, n, HAS_TREE)[:, :, None]
        x *= gl.where(is_above, _decay(decays[n])[:, None, :], 1.0)
    barrier()

    sums = smem_g._reinterpret(gl.float32, [12, GROUP, 8, KB // 2], SUMS)
    square = _summed(sums, 4, COLUMNS)
    is_diagonal = o_row[:, :, None] == o_column[:, None, :]
    row_square = gl.sum(gl.where(is_diagonal, square[:, None, :], 0.0), 2)
    row_beta = gl.sum(gl.where(is_diagonal, b_beta[:, None, :], 0.0), 2)
    of_row, row_sign = _of_column(row_square, row_beta, o_row, scale, eps, W, HAS_NORM)
    of_column, column_sign = _of_column(square, b_beta, o_column, scale, eps, W, HAS_NORM)
    pairs = gl.zeros([GROUP, XP, XP], gl.float32, SQUARE)
    for n in gl.static_range(W):
        pairs = gl.where((o_row == n)[:, :, None], _summed(sums, n, COLUMNS)[:, None, :], pairs)
    m_pairs = _is_above(
        column_bits[:, None, :], column_node[:, None, :], o_row[:, :, None], HAS_TREE
    )
    _store_solved(
        mixed.index(i), pairs, m_pairs, of_row, of_column, row_sign, column_sign, o_row, o_column,
        W,
    )  # fmt: skip
    columns.index(i).store(of_row)
    part_scores = smem_keys._reinterpret(gl.float32, [8 * NB, GROUP, 8, 8], CUBE)
    part_squares = smem_keys._reinterpret(gl.float32, [64 * NB, GROUP, 8], PLAIN)
    num_folded = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, COLUMNS)) % FOLDS
    for b in gl.static_range(NB):
        score = part_scores.index(2 * b).load(SQUARE) + part_scores.index(2 * b + 1).load(SQUARE)
        key_scale = gl.full_like(square, 1.0)
        if HAS_NORM:
            of_parts = part_squares.index(2 * (8 * NB + b)).load(COLUMNS)
            of_parts += part_squares.index(2 * (8 * NB + b) + 1).load(COLUMNS)
            key_scale = _key_scale(of_parts, eps)
        scores.index(i * NB + b).store(score * key_scale[:, None, :] * of_row[:, :, None])
        m_fold = 8 * NB - 1 - (8 * b + o_column) < num_folded[:, None]
        factors.index(i).slice(8 * b, 8, dim=1).store(gl.where(m_fold, key_scale, 0.0))
    barrier()
    mbarrier.arrive(empty, count=1)
    mbarrier.arrive(weighed.index(i), count=1)


@gluon.jit
def _folds(places, group, item: gl.constexpr):
    """Return how many entries an item of a group folds."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(_place(places, group * GROUP + item, 0, LAYOUT), 0) % FOLDS
