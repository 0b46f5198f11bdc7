"""What keys, decays and beta say of groups of items, with a decay per channel, by a part of a
program: `kernel.py`.

Formulas are those of `channel_weights_kernels.py`. What is summed over channels is a sum of two
parts' sums (`channel_tokens.py`). Ring entries are decayed by threads that have all of a block's
values of two channels, and then multiplied with the columns on matrix units. Of a group first comes
what needs its ring entries: their place is for the next group's, and folds wait for their keys.
"""

# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gapless.ops.linear_replay.arithmetic import _decay, _exact_decay, _head
from gapless.ops.linear_replay.resident.items import barrier
from gapless.ops.linear_replay.resident.window.channel_tokens import (
    GROUP,
    KB,
    PARTS,
    SQUARE,
    WALK,
    _bits_of,
    _columns,
    _item_word,
    _load_tokens,
    _rows_of,
    _store_tokens,
)
from gapless.ops.linear_replay.resident.window.groups import FOLDS, _group_word
from gapless.ops.linear_replay.resident.window.weigh import (
    _key_scale,
    _of_column,
    _stacked,
    _store_solved,
    _unstacked,
)
from gapless.ops.linear_replay.window_scores_kernel import _is_above

# of matrix units' products of parts
PART_SQUARE = gl.constexpr(gl.BlockedLayout([1, 1, 2], [1, 8, 4], [4, 1, 1], [2, 1, 0]))


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
                key = gl.permute(right, [0, 2, 1])
                products = mma_v2(_stacked(key, key, SHORT_LEFT), right, zeros)
                products, _ = _unstacked(products, PART_SQUARE)
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
def _weigh_channels(
    tokens, k_ring, g_ring, folds, inputs, of_weights, smem_x, facts, places, placed, folded, count,
    scale, eps,
    NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, HAS_TREE: gl.constexpr, HAS_NORM: gl.constexpr,
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
