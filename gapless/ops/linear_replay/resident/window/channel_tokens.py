"""What the windows of a group are, with a decay per channel: `weigh_channels.py`.

A *part* is half of an item's channels, which a warp has: part h * GROUP + i is half h of item i.
"""

# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gapless.ops.linear_replay.resident.fetch import _place
from gapless.ops.linear_replay.resident.items import _pairs, _unpacked, barrier
from gapless.ops.linear_replay.resident.window.groups import (
    CHANNEL_GROUP,
    HEADS,
    _group_list,
    _group_word,
    _load_bits,
)

GROUP = CHANNEL_GROUP
PARTS = gl.constexpr(4)
# channels of a part
KB = gl.constexpr(64)
# threads have all of an entry block's, or a window's, values of two channels
WALK = gl.constexpr(gl.BlockedLayout([1, 8, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
# both warps of an item have all of its columns, and pairs of them
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
def _item_word(places, group, item: gl.constexpr):
    """Return the first word of an item of a group."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(_place(places, group * GROUP + item, 0, LAYOUT), 0)
