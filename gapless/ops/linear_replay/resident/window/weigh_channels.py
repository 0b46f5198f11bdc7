"""What keys, decays and beta say of a group of items, with a decay per channel, by the parts that
read: `kernel.py`.

Formulas are those of `channel_weights_kernels.py`; here a warp has half of an item's channels, a
*part*: part h * GROUP + i is half h of item i. Ring entries are decayed by threads that have all of
an entry block's values of two channels, and multiplied with columns on matrix units. What is summed
over channels is a sum of the two parts' sums.
"""

# ruff: noqa: RUF005
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
    HEADS,
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
# threads have all of an entry block's, or a window's, values of two channels
WALK = gl.constexpr(gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
# of matrix units' products of parts; and of items, which both of an item's warps have all of
PART_SQUARE = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 8, 4], [4, 1, 1], [2, 1, 0]))
SQUARE = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 8, 4], [2, 2, 1], [2, 1, 0]))
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
def _rows_of(vectors):
    """Return eight [PARTS, KB] as [PARTS, 8, KB]."""
    a = gl.join(gl.join(vectors[0], vectors[1]), gl.join(vectors[2], vectors[3]))
    b = gl.join(gl.join(vectors[4], vectors[5]), gl.join(vectors[6], vectors[7]))
    rows = gl.permute(gl.join(a, b), [0, 4, 3, 2, 1])
    return gl.convert_layout(gl.reshape(rows, [PARTS, 8, KB]), WALK, assert_trivial=True)


@gluon.jit
def _load_tokens(
    tokens, facts, places, group,
    W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Load a group's keys and queries, in pairs [PARTS, KB / 2], decays [PARTS, KB], and beta
    [GROUP, XP]."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    OF_PAIRS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    OF_VECTOR: gl.constexpr = gl.SliceLayout(1, VECTOR)
    q, q_stride, q_token_stride = tokens[0]
    k, k_stride, k_token_stride = tokens[1]
    log_decay, g_stride, g_token_stride = tokens[3]
    _store_facts(facts, places, group, XP)
    o_pair = gl.arange(0, KB // 2, gl.SliceLayout(0, PAIRS))[None, :]
    channel, row = _key_channel(facts, H, HV, K, OF_PAIRS), _fact(facts, ROW, OF_PAIRS).to(gl.int64)
    keys, queries, decays = (), (), ()
    for n in gl.static_range(W):
        p_key = k + (row * k_stride + n * k_token_stride + channel)
        keys = keys + (gl.load(_pairs(p_key)[:, None] + o_pair),)
        p_query = q + (row * q_stride + n * q_token_stride + channel)
        queries = queries + (gl.load(_pairs(p_query)[:, None] + o_pair),)
    o_k = gl.arange(0, KB, gl.SliceLayout(0, VECTOR))[None, :]
    channel, row = _key_channel(facts, HV, HV, K, OF_VECTOR), _fact(facts, ROW, OF_VECTOR)
    for n in gl.static_range(W):
        p_g = log_decay + (row.to(gl.int64) * g_stride + n * g_token_stride + channel)
        decays = decays + (gl.load(p_g[:, None] + o_k).to(gl.float32),)
    beta, beta_stride, beta_token_stride = tokens[2]
    o_x = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, COLUMNS)) // HEADS
    row = _group_word(places, group, 2, GROUP, gl.SliceLayout(1, COLUMNS)).to(gl.int64)
    p_beta = beta + ((row * beta_stride + head)[:, None] + o_x * beta_token_stride)
    b_beta = gl.load(p_beta, mask=(o_x < W) & (row >= 0)[:, None], other=0)
    return keys, queries, decays, b_beta


@gluon.jit
def _key_channel(facts, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where the channels of each part begin among those of H heads."""
    head = _fact(facts, HEAD, LAYOUT) // HEADS
    return head // (HV // H) * K + gl.arange(0, PARTS, LAYOUT) // GROUP * KB


@gluon.jit
def _store_tokens(
    k_ring, g_ring, keys, decays, facts, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr
):
    """Put keys and decays into the rings."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    OF_PAIRS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    OF_VECTOR: gl.constexpr = gl.SliceLayout(1, VECTOR)
    o_pair = gl.arange(0, KB // 2, gl.SliceLayout(0, PAIRS))[None, :]
    o_k = gl.arange(0, KB, gl.SliceLayout(0, VECTOR))[None, :]
    m_key = (_fact(facts, HEAD, OF_PAIRS) // HEADS % (HV // H) == 0)[:, None] & (o_pair >= 0)
    for n in gl.static_range(len(keys)):
        written = _fact(facts, WRITTEN + n, OF_PAIRS).to(gl.int64)
        p_key = k_ring + (written * (H * K) + _key_channel(facts, H, HV, K, OF_PAIRS))
        gl.store(_pairs(p_key)[:, None] + o_pair, keys[n], mask=m_key)
        written = _fact(facts, WRITTEN + n, OF_VECTOR).to(gl.int64)
        p_g = g_ring + (written * (HV * K) + _key_channel(facts, HV, HV, K, OF_VECTOR))
        gl.store(p_g[:, None] + o_k, decays[n])


@gluon.jit
def _columns(keys, queries):
    """Return a window's columns [PARTS, 8, KB], and its nodes' keys [PARTS, KB], as they were
    read."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    b_keys, b_queries, rest = (), (), ()
    for n in gl.static_range(len(keys)):
        b_keys = b_keys + (_floats(keys[n], VECTOR),)
        b_queries = b_queries + (_floats(queries[n], VECTOR),)
    for _ in gl.static_range(4 - len(keys)):
        rest = rest + (gl.zeros([PARTS, KB], gl.float32, VECTOR),)
    return _rows_of(b_keys + rest + b_queries + rest), b_keys


@gluon.jit
def _halved(x, LANES: gl.constexpr):
    """Return sums [PARTS, 8, KB / 2] of each thread's own channels."""
    pairs = gl.sum(gl.reshape(x, [PARTS, 8, KB // 2, 2]), 3)
    return gl.convert_layout(pairs, LANES, assert_trivial=True)


@gluon.jit
def _summed(smem_sums, tile, COLUMNS: gl.constexpr):
    """Return sums over all channels [GROUP, 8] of a tile of what parts' threads have stored."""
    # a thread has 4 lanes' sums of 2 columns, and has in the end what COLUMNS says
    LANES: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 4, 8], [2, 2, 1], [1, 2, 0])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    sums = smem_sums._reinterpret(gl.float32, [8, GROUP, 8, KB // 2], SUMS)
    x = sums.index(2 * tile).load(LANES) + sums.index(2 * tile + 1).load(LANES)
    return gl.convert_layout(gl.sum(x, 2), COLUMNS, assert_trivial=True)


@gluon.jit
def _sums(x, keys, decays, bits, node, smem_x, i, COLUMNS: gl.constexpr, HAS_TREE: gl.constexpr):
    """Return the columns' squares [GROUP, 8], what columns read of each node's key, node by node
    from the last, and the columns decayed from where the ring ends [PARTS, 8, KB]."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 1, 32], [PARTS, 1, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    # threads' sums go where the columns will be, two tiles at a time
    smem_sums = smem_x._reinterpret(gl.float32, [4, PARTS, 8, KB // 2], SUMS)
    smem_sums.index(2 * i).store(_halved(x * x, LANES))
    sums = ()
    for n in gl.static_range(len(keys) - 1, -1, -1):
        tile = 2 * i + (len(keys) - n) % 2
        smem_sums.index(tile).store(_halved(x * keys[n][:, None, :], LANES))
        is_above = _is_above(bits, node, n, HAS_TREE)[:, :, None]
        x *= gl.where(is_above, _decay(decays[n])[:, None, :], 1.0)
        if (len(keys) - n) % 2 == 1:
            barrier()
            sums = sums + (_summed(smem_x, 2 * i, COLUMNS), _summed(smem_x, 2 * i + 1, COLUMNS))
            barrier()
    if len(keys) % 2 == 0:
        barrier()
        sums = sums + (_summed(smem_x, 2 * i, COLUMNS),)
        barrier()
    return sums, x


@gluon.jit
def _vectors_of(rows):
    """Return [PARTS, 8, KB] as eight [PARTS, KB]."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    a, b = gl.split(gl.permute(gl.reshape(rows, [PARTS, 2, 2, 2, KB]), [0, 4, 3, 2, 1]))
    vectors = ()
    for i in gl.static_range(2):
        c, d = gl.split(a if i == 0 else b)
        for n in gl.static_range(2):
            e, f = gl.split(c if n == 0 else d)
            vectors = vectors + (gl.convert_layout(e, VECTOR, assert_trivial=True),)
            vectors = vectors + (gl.convert_layout(f, VECTOR, assert_trivial=True),)
    return vectors


@gluon.jit
def _store_decayed(
    smem_keys, smem_g, folds, num_live, first_folded, second_folded,
    NB: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Put ring keys, decayed to where the ring ends, in the place of decays, and store for items
    that fold what `fetch.py` asks for: in the first place, which is none's, the state's decay, and
    keys that decay up to the newest that is folded; return what the state decays by."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, WALK)
    PART: gl.constexpr = gl.SliceLayout(1, VECTOR)
    o_k = gl.arange(0, KB, gl.SliceLayout(0, VECTOR))[None, :]
    is_second = gl.arange(0, PARTS, PART)[:, None] % GROUP == 1
    num_folded = gl.where(is_second, second_folded, first_folded)
    is_folding = first_folded + second_folded != 0
    p_fold = folds + (_fold_channel(NB, K, PART)[:, None] + o_k)
    # of all entries in powers of 2, of folded ones of e
    since = gl.zeros([PARTS, KB], gl.float32, VECTOR)
    fold_since = since
    # unrolled it would not stay in the instruction cache
    for b in range(NB - (num_live + 7) // 8, NB):
        g = _vectors_of(smem_g.index(b).load(WALK))
        keys = _vectors_of(smem_keys.index(b).load(WALK).to(gl.float32))
        decayed = ()
        for n in gl.static_range(8):
            decayed = decayed + (keys[n] * gl.exp2(since),)
            since += g[n] * 1.4426950408889634
        smem_g.index(b).store(_rows_of(decayed))
        if is_folding:
            for n in gl.static_range(8):
                m_fold = (8 * (NB - b) - 1 - n < num_folded) & (o_k >= 0)
                p_key = p_fold + (8 * b + n) * K
                gl.store(p_key, keys[n] * _decay(fold_since), mask=m_fold)
                fold_since += gl.where(m_fold, g[n], 0.0)
    if is_folding:
        gl.store(p_fold, _exact_decay(fold_since))
    return gl.exp2(since)


@gluon.jit
def _has_entries(num_live, b: gl.constexpr, NB: gl.constexpr):
    """Return whether an item of a group may have entries in a block: most have in the last two."""
    return num_live > 8 * (NB - 1 - b) if b < NB - 2 else True


@gluon.jit
def _fold_channel(NB: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """Return where each part's channels of a group's folds begin, [PARTS]."""
    part = gl.arange(0, PARTS, LAYOUT)
    return part % GROUP * (8 * NB * K) + part // GROUP * KB


@gluon.jit
def _scores(smem_keys, smem_g, smem_x, num_live, NB: gl.constexpr, HAS_NORM: gl.constexpr):
    """Return of each block of entries what parts count for in each column [PARTS, 8, 8], and what
    their keys' squares sum up to [PARTS, 8]."""
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [PARTS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 1)
    SHORT_LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 2)
    SHORT_RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, PART_SQUARE)
    zeros = gl.zeros([PARTS, 16, 8], gl.float32, UNITS)
    o_row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PART_SQUARE)))[None, :, None]
    o_column = gl.arange(0, 8, gl.SliceLayout(0, COLUMNS))[None, None, :]
    x = gl.permute(smem_x.permute([0, 2, 1]).load(RIGHT), [0, 2, 1])
    # heads and rests of the columns, 23 bits in all, are each other's neighbours
    head = _head(x)
    left = _stacked(head, x - head, LEFT)
    found, squares = (), ()
    for b in gl.static_range(NB):
        score = gl.zeros([PARTS, 8, 8], gl.float32, PART_SQUARE)
        square = gl.zeros([PARTS, 8], gl.float32, COLUMNS)
        if _has_entries(num_live, b, NB):
            decayed = smem_g.index(b).permute([0, 2, 1]).load(RIGHT)
            decayed_head = _head(decayed)
            sums = mma_v2(left, decayed - decayed_head, zeros, input_precision="tf32")
            sums += mma_v2(left, decayed_head, zeros, input_precision="tf32")
            of_heads, of_rests = _unstacked(sums, PART_SQUARE)
            score = of_heads + of_rests
            if HAS_NORM:
                right = smem_keys.index(b).permute([0, 2, 1]).load(SHORT_RIGHT)
                key = _stacked(
                    gl.permute(right, [0, 2, 1]), gl.permute(right, [0, 2, 1]), SHORT_LEFT
                )
                products, _ = _unstacked(mma_v2(key, right, zeros), PART_SQUARE)
                square = gl.sum(gl.where(o_row == o_column, products, 0.0), 1)
        found = found + (score,)
        squares = squares + (square,)
    return found, squares


@gluon.jit
def _weigh_window(
    x, keys, decays, b_beta, of_bits, of_weights, smem_x, i, scale, eps,
    W: gl.constexpr, XP: gl.constexpr, HAS_TREE: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Work out what a group's windows are in themselves; return the columns, decayed from where
    the ring ends, and their factors [GROUP, XP, 1]."""
    ROWS: gl.constexpr = gl.SliceLayout(2, SQUARE)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    columns, _, mixed = of_weights[:3]
    bits, node, column_bits, column_node = of_bits
    o_row = gl.arange(0, XP, gl.SliceLayout(0, ROWS))[None, :]
    o_column = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    sums, x = _sums(x, keys, decays, bits, node, smem_x, i, COLUMNS, HAS_TREE)
    square, is_diagonal = sums[0], o_row[:, :, None] == o_column[:, None, :]
    row_square = gl.sum(gl.where(is_diagonal, square[:, None, :], 0.0), 2)
    row_beta = gl.sum(gl.where(is_diagonal, b_beta[:, None, :], 0.0), 2)
    of_row, row_sign = _of_column(row_square, row_beta, o_row, scale, eps, W, HAS_NORM)
    of_column, column_sign = _of_column(square, b_beta, o_column, scale, eps, W, HAS_NORM)
    pairs = gl.zeros([GROUP, XP, XP], gl.float32, SQUARE)
    for n in gl.static_range(W):
        pairs = gl.where((o_row == n)[:, :, None], sums[W - n][:, None, :], pairs)
    m_pairs = _is_above(
        column_bits[:, None, :], column_node[:, None, :], o_row[:, :, None], HAS_TREE
    )
    _store_solved(
        mixed.index(i), pairs, m_pairs, of_row, of_column, row_sign, column_sign, o_row, o_column,
        W,
    )  # fmt: skip
    columns.index(i).store(of_row)
    return x, of_row[:, :, None]


@gluon.jit
def _bits_of(
    ancestors, facts, places, group, W: gl.constexpr, XP: gl.constexpr, HAS_TREE: gl.constexpr
):
    """Return which nodes are above each column's in trees, and its node: as parts have columns, and
    as items do."""
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    o_x = gl.arange(0, XP, gl.SliceLayout(0, gl.SliceLayout(2, WALK)))[None, :]
    o_column = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    bits, column_bits = o_x, o_column
    node, column_node = o_x % (XP // 2), o_column % (XP // 2)
    if HAS_TREE:
        part_row = _fact(facts, ROW, gl.SliceLayout(1, gl.SliceLayout(2, WALK))).to(gl.int64)
        bits = _load_bits(ancestors, part_row, node, W)
        row = _group_word(places, group, 2, GROUP, gl.SliceLayout(1, COLUMNS)).to(gl.int64)
        column_bits = _load_bits(ancestors, row, column_node, W)
    return bits, node, column_bits, column_node


@gluon.jit
def _store_scores(
    found, squares, of_row, num_folded, smem_x, scores, factors, i, eps,
    NB: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Store what ring entries count for in each column, and in a fold: parts' sums meet where the
    columns will be."""
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    part_scores = smem_x._reinterpret(gl.float32, [16, PARTS, 8, 8], CUBE)
    part_squares = smem_x._reinterpret(gl.float32, [128, PARTS, 8], PLAIN)
    # squares come after three blocks' scores
    for b in gl.static_range(NB):
        part_scores.index(8 * i + b).store(found[b])
        if HAS_NORM:
            part_squares.index(64 * i + 24 + b).store(squares[b])
    barrier()
    part_scores = smem_x._reinterpret(gl.float32, [32, GROUP, 8, 8], CUBE)
    part_squares = smem_x._reinterpret(gl.float32, [256, GROUP, 8], PLAIN)
    o_place = gl.arange(0, 8, gl.SliceLayout(0, COLUMNS))[None, :]
    for b in gl.static_range(NB):
        n = 2 * (8 * i + b)
        score = part_scores.index(n).load(SQUARE) + part_scores.index(n + 1).load(SQUARE)
        key_scale = gl.zeros([GROUP, 8], gl.float32, COLUMNS) + 1.0
        if HAS_NORM:
            n = 2 * (64 * i + 24 + b)
            square = part_squares.index(n).load(COLUMNS) + part_squares.index(n + 1).load(COLUMNS)
            key_scale = _key_scale(square, eps)
        scores.index(i * NB + b).store(score * key_scale[:, None, :] * of_row)
        m_fold = 8 * (NB - b) - 1 - o_place < num_folded
        factors.index(i).slice(8 * b, 8, dim=1).store(gl.where(m_fold, key_scale, 0.0))
    barrier()


@gluon.jit
def _load_bits(ancestors, row, node, W: gl.constexpr):
    """Return which nodes are above each column's, of rows [N] and nodes [1, XP]; W is small."""
    p_bits = _pairs(ancestors) + (row[:, None] * W + node) * 2
    return gl.load(p_bits, mask=(node < W) & (row >= 0)[:, None], other=0)


@gluon.jit
def _weigh_channels(
    tokens, k_ring, g_ring, folds, inputs, of_weights, smem_x, facts, places, placed, folded, count,
    scale, eps,
    NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, HAS_TREE: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Work out all groups' weights, and put their keys and decays into the rings."""
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    smem_keys, smem_g, full, empty = inputs
    _, scores, _, factors, _, weighed, taken = of_weights
    mbarrier.wait(placed, 0)
    loaded = _load_tokens(tokens, facts, places, 0, W, XP, H, HV, K)
    for group in range(0, count):
        i = group % 2
        mbarrier.wait(taken.index(i), (group // 2 + 1) & 1)
        keys, queries, decays, b_beta = loaded
        of_bits = _bits_of(tokens[4], facts, places, group, W, XP, HAS_TREE)
        x, b_keys = _columns(keys, queries)
        exponents = gl.zeros([PARTS, XP, KB], gl.float32, WALK)
        for n in gl.static_range(W):
            is_above = _is_above(of_bits[0], of_bits[1], n, HAS_TREE)[:, :, None]
            exponents += gl.where(is_above, decays[n][:, None, :], 0.0)
        smem_x.index(i).store(x * _decay(exponents))
        _store_tokens(k_ring, g_ring, keys, decays, facts, H, HV, K)
        first, second = _item_word(places, group, 0), _item_word(places, group, 1)
        num_live = gl.maximum(first // FOLDS % FOLDS, second // FOLDS % FOLDS)
        num_folded = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, COLUMNS))
        mbarrier.wait(full, group & 1)
        state_decay = _store_decayed(
            smem_keys, smem_g, folds + i * (GROUP * 8 * NB * K), num_live, first % FOLDS,
            second % FOLDS, NB, K,
        )  # fmt: skip
        barrier()
        mbarrier.arrive(folded.index(i), count=1)
        found, squares = _scores(smem_keys, smem_g, smem_x.index(i), num_live, NB, HAS_NORM)
        barrier()
        mbarrier.arrive(empty, count=1)
        following = gl.minimum(group + 1, count - 1)
        if (following % 2 == 0) & (following > group):
            mbarrier.wait(placed, following // 2 & 1)
        # on their way while this group's are summed
        loaded = _load_tokens(tokens, facts, places, following, W, XP, H, HV, K)
        x, of_row = _weigh_window(
            x, b_keys, decays, b_beta.to(gl.float32), of_bits, of_weights, smem_x, i, scale, eps,
            W, XP, HAS_TREE, HAS_NORM,
        )  # fmt: skip
        _store_scores(
            found, squares, of_row, num_folded[:, None] % FOLDS, smem_x, scores, factors, i, eps,
            NB, HAS_NORM,
        )  # fmt: skip
        smem_x.index(i).store(x * state_decay[:, None, :])
        barrier()
        mbarrier.arrive(weighed.index(i), count=1)


@gluon.jit
def _item_word(places, group, item: gl.constexpr):
    """Return the first word of an item of a group."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(_place(places, group * GROUP + item, 0, LAYOUT), 0)
