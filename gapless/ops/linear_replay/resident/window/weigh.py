"""What keys, decays and beta say of groups of items, by a part of a program: `kernel.py`.

Formulas are those of `window_scores_kernel.py`; here a warp has an item, and its products are on
matrix units.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gapless.ops.linear_replay.arithmetic import _decay, _exact_decay
from gapless.ops.linear_replay.resident.items import barrier
from gapless.ops.linear_replay.resident.window.groups import (
    FOLDS,
    HEAD_GROUP,
    HEADS,
    SPAN,
    _before,
    _group_list,
    _group_word,
)
from gapless.ops.linear_replay.window_scores_kernel import _is_above

GROUP = HEAD_GROUP


@gluon.jit
def _stacked(a, b, LEFT: gl.constexpr):
    """Return [GROUP, 16, K] of two [GROUP, 8, K] in the layout of a right operand."""
    both = gl.permute(gl.join(a, b), [0, 3, 1, 2])
    both = gl.reshape(both, [a.shape[0], 2 * a.shape[1], a.shape[2]])
    return gl.convert_layout(both, LEFT, assert_trivial=True)


@gluon.jit
def _unstacked(x, SQUARE: gl.constexpr):
    """Return two [GROUP, 8, 8] of [GROUP, 16, 8]."""
    parts = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2, x.shape[2]])
    a, b = gl.split(gl.permute(parts, [0, 2, 3, 1]))
    a = gl.convert_layout(a, SQUARE, assert_trivial=True)
    return a, gl.convert_layout(b, SQUARE, assert_trivial=True)


@gluon.jit
def _store_decays(smem_g, places, group, decays, NB: gl.constexpr):
    """Store what a group's ring entries [SPAN] decay by up to where the ring ends, and among those
    that are folded; and in the first place the state."""
    LISTS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    o_place = gl.arange(0, SPAN, gl.SliceLayout(0, LISTS))[None, :]
    o_n = 8 * NB - 1 - o_place
    num_folded = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, LISTS)) % FOLDS
    g = smem_g.load(LISTS)
    past = gl.where(o_place == 0, gl.sum(g, 1)[:, None], _before(g, 1))
    decays.index(0).store(_decay(past))
    m_fold = (o_n >= 0) & (o_n < num_folded[:, None])
    of_folds = gl.where(m_fold, g, 0.0)
    fold = gl.where(m_fold, _decay(_before(of_folds, 1)), 0.0)
    of_state = _exact_decay(gl.sum(of_folds, 1))
    decays.index(1).store(gl.where(o_place == 0, of_state[:, None], fold))


@gluon.jit
def _of_column(
    squares, b_beta, o_x, scale, eps, W: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Return what windows' columns [GROUP, XP] are multiplied by, and their signs."""
    XP: gl.constexpr = o_x.shape[1]
    node = o_x % (XP // 2)
    is_key, is_query = o_x < W, (o_x >= XP // 2) & (node < W)
    x_scale = gl.where(is_query, scale, gl.full_like(squares, 1.0))
    if HAS_NORM:
        x_scale *= gl.rsqrt(gl.where(is_key | is_query, squares + eps, 1.0))
    return x_scale, gl.where(is_key, -b_beta, gl.where(is_query, 1.0, 0.0))


@gluon.jit
def _key_scale(squares, eps):
    """Return what normalises ring keys; those of no entry are zeros."""
    return gl.rsqrt(gl.where(squares > 0.0, squares + eps, 1.0))


@gluon.jit
def _store_solved(
    mixed, pairs, are_above, of_row, of_column, row_sign, column_sign, o_row, o_column,
    W: gl.constexpr,
):  # fmt: skip
    """Store what the columns are in sum, once each has taken in the nodes on its path; pairs are
    those of vectors as they were read, [node, column]."""
    is_diagonal = o_row[:, :, None] == o_column[:, None, :]
    pairs *= of_row[:, :, None] * (column_sign * of_column)[:, None, :]
    # a node's own path ends before it
    m_pairs = are_above & (o_row < W)[:, :, None] & ~is_diagonal
    pairs = gl.where(m_pairs, pairs, 0.0)
    found = gl.where(is_diagonal, 1.0, gl.zeros_like(pairs))
    for j in gl.static_range(W):
        d = gl.sum(gl.where((o_column == j)[:, None, :], found, 0.0), 2)
        later = gl.sum(gl.where((o_row == j)[:, :, None], pairs, 0.0), 1)
        found += d[:, :, None] * later[:, None, :]
    mixed.permute([0, 2, 1]).store(found * row_sign[:, :, None])


@gluon.jit
def _store_tokens(
    k_ring, g_ring, smem_x, smem_g, places, group,
    W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Put a group's keys and decays into the rings."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(2, VECTORS)
    GATES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    o_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, VECTORS)))[None, None, :]
    o_x = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    head = (_group_word(places, group, 0, GROUP, gl.SliceLayout(1, COLUMNS)) // HEADS)[:, None]
    written = _group_list(places[2], group, GROUP, XP).load(COLUMNS).to(gl.int64)
    p_keys = (k_ring + (written * H + head // (HV // H)) * K)[:, :, None] + o_k
    m_key = ((o_x < W) & (head % (HV // H) == 0))[:, :, None] & (o_k >= 0)
    gl.store(p_keys, smem_x.load(VECTORS), mask=m_key)
    o_x = gl.arange(0, XP, gl.SliceLayout(0, GATES))[None, :]
    head = (_group_word(places, group, 0, GROUP, gl.SliceLayout(1, GATES)) // HEADS)[:, None]
    written = _group_list(places[2], group, GROUP, XP).load(GATES).to(gl.int64)
    gl.store(g_ring + written * HV + head, smem_g.load(GATES), mask=o_x < W)


@gluon.jit
def _weigh_group(
    k_ring, g_ring, inputs, of_weights, places, group, scale, eps,
    NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, HAS_TREE: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Work out a group's weights, and put its keys and decays into the rings."""
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [GROUP, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 2)
    # as matrix units leave the upper half of a product
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [GROUP, 1, 1], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, SQUARE)
    COLUMNS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    smem_keys, smem_g, full, empty, smem_x, gates, smem_bits = inputs
    columns, scores, mixed, factors, decays, weighed, taken = of_weights
    i = group % 2
    mbarrier.wait(full, group & 1)
    mbarrier.wait(taken.index(i), (group // 2 + 1) & 1)
    _store_decays(smem_g, places, group, decays, NB)
    zeros = gl.zeros([GROUP, 16, 8], gl.float32, UNITS)
    right = smem_x.permute([0, 2, 1]).load(RIGHT)
    x = gl.permute(right, [0, 2, 1])
    products, _ = _unstacked(mma_v2(_stacked(x, x, LEFT), right, zeros), SQUARE)
    o_row = gl.arange(0, XP, gl.SliceLayout(0, ROWS))[None, :]
    o_column = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    is_diagonal = o_row[:, :, None] == o_column[:, None, :]
    squares = gl.where(is_diagonal, products, 0.0)
    b_beta = gates.index(1)
    of_row, row_sign = _of_column(
        gl.sum(squares, 2), b_beta.load(ROWS), o_row, scale, eps, W, HAS_NORM
    )
    of_column, column_sign = _of_column(
        gl.sum(squares, 1), b_beta.load(COLUMNS), o_column, scale, eps, W, HAS_NORM
    )

    # pairs [node, column], node by node from the last: `since` is the decay from there on
    row_bits, column_bits = o_row, o_column
    if HAS_TREE:
        row_bits, column_bits = smem_bits.load(ROWS), smem_bits.load(COLUMNS)
    row_node, column_node = o_row % (XP // 2), o_column % (XP // 2)
    row_since = gl.zeros([GROUP, XP], gl.float32, ROWS)
    column_since = gl.zeros([GROUP, XP], gl.float32, COLUMNS)
    exponents = gl.zeros([GROUP, XP, XP], gl.float32, SQUARE)
    for last in gl.static_range(W - 1, -1, -1):
        exponents = gl.where(o_row[:, :, None] == last, column_since[:, None, :], exponents)
        g = gates.index(0).slice(last, 1, dim=1)
        is_above = _is_above(row_bits, row_node, last, HAS_TREE)
        row_since += gl.where(is_above, g.load(ROWS), 0.0)
        is_above = _is_above(column_bits, column_node, last, HAS_TREE)
        column_since += gl.where(is_above, g.load(COLUMNS), 0.0)
    m_pairs = _is_above(
        column_bits[:, None, :], column_node[:, None, :], o_row[:, :, None], HAS_TREE
    )
    _store_solved(
        mixed.index(i), products * _decay(exponents), m_pairs, of_row, of_column, row_sign,
        column_sign, o_row, o_column, W,
    )  # fmt: skip

    barrier()
    of_row *= _decay(row_since)
    columns.index(i).store(of_row * decays.index(0).slice(0, 1, dim=1).load(ROWS))
    for b in gl.static_range(NB):
        right = smem_keys.index(b).permute([0, 2, 1]).load(RIGHT)
        both = mma_v2(_stacked(x, gl.permute(right, [0, 2, 1]), LEFT), right, zeros)
        found, squares = _unstacked(both, SQUARE)
        past = decays.index(0).slice(8 * b, 8, dim=1).load(COLUMNS)
        fold = decays.index(1).slice(8 * b, 8, dim=1).load(COLUMNS)
        if HAS_NORM:
            key_scale = _key_scale(gl.sum(gl.where(is_diagonal, squares, 0.0), 1), eps)
            past *= key_scale
            if b == 0:
                # the first place is the state's
                fold = gl.where(o_column == 0, fold, fold * key_scale)
            else:
                fold *= key_scale
        scores.index(i * NB + b).store(found * past[:, None, :] * of_row[:, :, None])
        factors.index(i).slice(8 * b, 8, dim=1).store(fold)
    _store_tokens(k_ring, g_ring, smem_x, gates.index(0), places, group, W, XP, H, HV, K)
    barrier()
    mbarrier.arrive(empty, count=1)
    mbarrier.arrive(weighed.index(i), count=1)


@gluon.jit
def _weigh_heads(
    k_ring, g_ring, inputs, of_weights, places, count, scale, eps,
    NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, HAS_TREE: gl.constexpr, HAS_NORM: gl.constexpr,
):  # fmt: skip
    """Work out all groups' weights, and put their keys and decays into the rings."""
    for group in range(0, count):
        _weigh_group(
            k_ring, g_ring, inputs, of_weights, places, group, scale, eps,
            NB, W, XP, H, HV, K, HAS_TREE, HAS_NORM,
        )  # fmt: skip
