"""Groups of a program's visits, which are weighed together, and what that takes: `weigh.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from gapless.ops.linear_replay.resident.items import _pairs

# visits that are weighed at once: a warp has one, or with a decay per channel half of one
HEAD_GROUP, CHANNEL_GROUP = gl.constexpr(4), gl.constexpr(2)
# places of a visit's list of ring entries, in blocks of eight, the newest first; the first place is
# none's, and where weights are listed the state's
SPAN = gl.constexpr(32)
# a value head, how many entries its row has, and how many of them it folds share a word
HEADS, FOLDS = gl.constexpr(4096), gl.constexpr(64)


@gluon.jit
def _join_newer(before, sum_of, newer, sum_of_newer):
    """Join what two runs of entries sum up to before their last one, and in all."""
    return sum_of + newer, sum_of + sum_of_newer


@gluon.jit
def _before(g, AXIS: gl.constexpr):
    """Return for each entry along an axis the sum of all those before it."""
    before, _ = gl.associative_scan((gl.zeros_like(g), g), AXIS, _join_newer)
    return before


@gluon.jit
def _group_word(places, group, n: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the n-th words of a group's visits, [GROUP]; two groups make a chunk."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = places[0]._reinterpret(gl.int32, [16, GROUP], FLAT)
    return words.index(4 * n + group % 4).load(LAYOUT)


@gluon.jit
def _group_list(lists, group, GROUP: gl.constexpr, SIZE: gl.constexpr):
    """Return the lists of a group's visits, [GROUP, SIZE]."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return lists._reinterpret(gl.int32, [4, GROUP, SIZE], PLAIN).index(group % 4)


@gluon.jit
def _fetch_group_ring(
    k_ring, g_ring, inputs, places, group, zero_entry,
    NB: gl.constexpr, GROUP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Ask for what the rings hold of a group's keys and decays."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    ENTRIES: gl.constexpr = gl.SliceLayout(2, VECTORS)
    LISTS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    smem_keys, smem_g = inputs[:2]
    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, ENTRIES)) // HEADS
    o_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, VECTORS)))[None, None, :]
    for b in gl.static_range(NB):
        entry = _group_list(places[1], group, GROUP, SPAN).slice(8 * b, 8, dim=1).load(ENTRIES)
        p_entry = (entry.to(gl.int64) * H + (head // (HV // H))[:, None]) * K
        m_keys = (entry != zero_entry)[:, :, None] & (o_k >= 0)
        p_keys = k_ring + p_entry[:, :, None] + o_k
        async_copy.async_copy_global_to_shared(smem_keys.index(b), p_keys, m_keys)
    entry = _group_list(places[1], group, GROUP, SPAN).load(LISTS)
    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, LISTS)) // HEADS
    p_g = g_ring + entry.to(gl.int64) * HV + head[:, None]
    async_copy.async_copy_global_to_shared(smem_g, p_g, entry != zero_entry)


@gluon.jit
def _fetch_group_channels(
    k_ring, g_ring, inputs, places, group, zero_entry,
    NB: gl.constexpr, GROUP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Ask for the same with a decay per channel: of each half of the channels in turn."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [2, 2, 1], [2, 1, 0])
    DECAYS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 2, 16], [2, 2, 1], [2, 1, 0])
    smem_keys, smem_g, full, _ = inputs
    for b in gl.static_range(NB):
        lists = _group_list(places[1], group, GROUP, SPAN).slice(8 * b, 8, dim=1)
        entry, head = _entries_of_heads(lists, places, group, GROUP, KEYS)
        p_entry = k_ring + ((entry.to(gl.int64) * H + head // (HV // H)) * K)
        m_live = entry != zero_entry
        for half in gl.static_range(2):
            target = smem_keys.index(b).slice(half * GROUP, GROUP)
            _copy_rows(p_entry, m_live, target, half * (K // 2), K // 2, KEYS)
        entry, head = _entries_of_heads(lists, places, group, GROUP, DECAYS)
        p_entry = g_ring + ((entry.to(gl.int64) * HV + head) * K)
        m_live = entry != zero_entry
        for half in gl.static_range(2):
            target = smem_g.index(b).slice(half * GROUP, GROUP)
            _copy_rows(p_entry, m_live, target, half * (K // 2), K // 2, DECAYS)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _entries_of_heads(lists, places, group, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a group's ring entries [GROUP, 8] and value heads [GROUP, 1]."""
    ENTRIES: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, ENTRIES)) // HEADS
    return lists.load(ENTRIES), head[:, None]


@gluon.jit
def _copy_rows(
    p_entry, m_live, target, first: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Ask for SIZE channels of each entry, from the `first` on."""
    o_k = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    p_rows = p_entry[:, :, None] + (first + o_k)
    async_copy.async_copy_global_to_shared(target, p_rows, m_live[:, :, None] & (o_k >= 0))


@gluon.jit
def _load_bits(ancestors, row, node, W: gl.constexpr):
    """Return which nodes are above each column's, of rows [N] and nodes [1, XP]; W is small:
    the lower half of each."""
    p_bits = _pairs(ancestors) + (row[:, None] * W + node) * 2
    return gl.load(p_bits, mask=(node < W) & (row >= 0)[:, None], other=0)


@gluon.jit
def _fetch_group_tokens(
    tokens, inputs, places, group,
    GROUP: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, HAS_TREE: gl.constexpr,
):  # fmt: skip
    """Ask for the keys and queries of a group's windows; load gates, and store them."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(2, VECTORS)
    GATES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    _, _, full, _, smem_x, gates, smem_bits = inputs
    q, q_stride, q_token_stride = tokens[0]
    k, k_stride, k_token_stride = tokens[1]
    beta, beta_stride, beta_token_stride = tokens[2]
    log_decay, g_stride, g_token_stride = tokens[3]
    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, COLUMNS)) // HEADS
    row = _group_word(places, group, 2, GROUP, gl.SliceLayout(1, COLUMNS)).to(gl.int64)
    o_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, VECTORS)))[None, None, :]
    o_x = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    node, channel = o_x % (XP // 2), (head // (HV // H) * K)[:, None]
    p_key = (k + ((row * k_stride)[:, None] + channel + node * k_token_stride))[:, :, None] + o_k
    p_query = (q + ((row * q_stride)[:, None] + channel + node * q_token_stride))[:, :, None] + o_k
    is_key = (o_x < XP // 2)[:, :, None] & (o_k >= 0)
    m_token = (node < W)[:, :, None] & (o_k >= 0) & (row >= 0)[:, None, None]
    async_copy.async_copy_global_to_shared(smem_x, gl.where(is_key, p_key, p_query), m_token)

    head = _group_word(places, group, 0, GROUP, gl.SliceLayout(1, GATES)) // HEADS
    row = _group_word(places, group, 2, GROUP, gl.SliceLayout(1, GATES)).to(gl.int64)
    o_x = gl.arange(0, XP, gl.SliceLayout(0, GATES))[None, :]
    m_key = (o_x < W) & (row >= 0)[:, None]
    p_g = log_decay + ((row * g_stride + head)[:, None] + o_x * g_token_stride)
    g = gl.load(p_g, mask=m_key, other=0)
    p_beta = beta + ((row * beta_stride + head)[:, None] + o_x * beta_token_stride)
    b_beta = gl.load(p_beta, mask=m_key, other=0)
    if HAS_TREE:
        node = o_x % (XP // 2)
        smem_bits.store(_load_bits(tokens[4], row, node, W))
    gates.index(0).store(g.to(gl.float32))
    gates.index(1).store(b_beta.to(gl.float32))
    async_copy.mbarrier_arrive(full, increment_count=False)
