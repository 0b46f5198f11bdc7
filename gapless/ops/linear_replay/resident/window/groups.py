"""Groups of a program's visits, which are weighed together, and what that takes: `weigh.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from gapless.ops.linear_replay.resident.fetch import CHUNK
from gapless.ops.linear_replay.resident.items import _pairs

# visits that are weighed at once, a warp having one
GROUP = gl.constexpr(4)
# ring entries of a list of a visit; a decay of each, and one of all in the place of the last, is
# less than a warp has threads
SPAN = gl.constexpr(32)
# a value head and how many entries its row folds share a word
FOLDS = gl.constexpr(64)


@gluon.jit
def _entries(places, j, b: gl.constexpr):
    """Return eight of the ring entries of a visit."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    entries = places[1]._reinterpret(gl.int32, [2 * CHUNK, SPAN], FLAT)
    return entries.index(j % (2 * CHUNK)).slice(8 * b, 8)


@gluon.jit
def _group_word(places, group, n: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the n-th words of a group's visits, [GROUP]."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUM: gl.constexpr = 2 * CHUNK // GROUP
    words = places[0]._reinterpret(gl.int32, [4 * NUM, GROUP], FLAT)
    return words.index(n * NUM + group % NUM).load(LAYOUT)


@gluon.jit
def _group_list(lists, group, SIZE: gl.constexpr):
    """Return the lists of a group's visits, [GROUP, SIZE]."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    NUM: gl.constexpr = 2 * CHUNK // GROUP
    return lists._reinterpret(gl.int32, [NUM, GROUP, SIZE], PLAIN).index(group % NUM)


@gluon.jit
def _fetch_group_ring(
    k_ring, g_ring, inputs, places, group, zero_entry,
    NB: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Ask for what the rings hold of a group's keys, and of its decays: of each entry its newer
    neighbour's, and the oldest one's in the last place."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    ENTRIES: gl.constexpr = gl.SliceLayout(2, VECTORS)
    LISTS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    smem_keys, _, smem_g = inputs[:3]
    head = _group_word(places, group, 0, gl.SliceLayout(1, ENTRIES)) // FOLDS
    o_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, VECTORS)))[None, None, :]
    for b in gl.static_range(NB):
        entry = _group_list(places[1], group, SPAN).slice(8 * b, 8, dim=1).load(ENTRIES)
        p_entry = (entry.to(gl.int64) * H + (head // (HV // H))[:, None]) * K
        m_keys = (entry != zero_entry)[:, :, None] & (o_k >= 0)
        p_keys = k_ring + p_entry[:, :, None] + o_k
        async_copy.async_copy_global_to_shared(smem_keys.index(b), p_keys, m_keys)
    newer = _group_list(places[3], group, SPAN).load(LISTS)
    head = _group_word(places, group, 0, gl.SliceLayout(1, LISTS)) // FOLDS
    p_g = g_ring + newer.to(gl.int64) * HV + head[:, None]
    async_copy.async_copy_global_to_shared(smem_g, p_g, newer != zero_entry)


@gluon.jit
def _fetch_group_tokens(
    q, k, beta, log_decay, ancestors, inputs, places, group,
    W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    HAS_TREE: gl.constexpr,
):  # fmt: skip
    """Ask for the keys and queries of a group's windows; load gates, and store them."""
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    COLUMNS: gl.constexpr = gl.SliceLayout(2, VECTORS)
    GATES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    _, smem_x, _, gates, smem_bits, full, _ = inputs
    q, q_stride, q_token_stride = q
    k, k_stride, k_token_stride = k
    beta, beta_stride, beta_token_stride = beta
    log_decay, g_stride, g_token_stride = log_decay
    head = _group_word(places, group, 0, gl.SliceLayout(1, COLUMNS)) // FOLDS
    row = _group_word(places, group, 2, gl.SliceLayout(1, COLUMNS)).to(gl.int64)
    o_k = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, VECTORS)))[None, None, :]
    o_x = gl.arange(0, XP, gl.SliceLayout(0, COLUMNS))[None, :]
    node, channel = o_x % (XP // 2), (head // (HV // H) * K)[:, None]
    p_key = (k + ((row * k_stride)[:, None] + channel + node * k_token_stride))[:, :, None] + o_k
    p_query = (q + ((row * q_stride)[:, None] + channel + node * q_token_stride))[:, :, None] + o_k
    is_key = (o_x < XP // 2)[:, :, None] & (o_k >= 0)
    m_token = (node < W)[:, :, None] & (o_k >= 0) & (row >= 0)[:, None, None]
    async_copy.async_copy_global_to_shared(smem_x, gl.where(is_key, p_key, p_query), m_token)

    head = _group_word(places, group, 0, gl.SliceLayout(1, GATES)) // FOLDS
    row = _group_word(places, group, 2, gl.SliceLayout(1, GATES)).to(gl.int64)
    o_x = gl.arange(0, XP, gl.SliceLayout(0, GATES))[None, :]
    m_key = (o_x < W) & (row >= 0)[:, None]
    p_g = log_decay + ((row * g_stride + head)[:, None] + o_x * g_token_stride)
    g = gl.load(p_g, mask=m_key, other=0)
    p_beta = beta + ((row * beta_stride + head)[:, None] + o_x * beta_token_stride)
    b_beta = gl.load(p_beta, mask=m_key, other=0)
    if HAS_TREE:
        node = o_x % (XP // 2)
        p_bits = _pairs(ancestors) + ((row * W)[:, None] + node) * 2
        # W is small: the lower half of each
        bits = gl.load(p_bits, mask=(node < W) & (row >= 0)[:, None], other=0)
        smem_bits.store(bits)
    gates.index(0).store(g.to(gl.float32))
    gates.index(1).store(b_beta.to(gl.float32))
    async_copy.mbarrier_arrive(full, increment_count=False)
