"""Windows of one token of many rows on Hopper GPUs, in one launch of resident programs.

What is computed is what `token_kernel.py` computes, with one decay per head. How: a program stays on
its multiprocessor for the whole launch and serves a list of *items*, an item being a row and value
head. Its warps have parts of their own, which hand each other buffers in shared memory:

    fetch   asks for states, a tile of half an item at a time, with the tensor memory accelerator,
            and for what the ring holds of d, three items ahead of those that read them
    weigh   works out what keys, decays and beta say: the ring's weights and six factors of an item,
            for four items at once, a warp for each
    read    twice, for the two halves of a head's value channels: sums each tile against key and
            query, adds the ring, and folds what is to be folded

So neither the weights of one item nor the fold of another keeps the next states from being on their
way, which is all that the launch's time depends on. A buffer has two barriers: `full`, which its
writers arrive at, and `empty`, which its readers do. Reads that the kernels before this one cannot
have written, states and rings, begin before the wait for them.

Rows that fold come first in `order`, so that each program has as many of them as any other; a
program visits these items in turn with others, as they take it longer.

It is written in Gluon, in which a Triton kernel says itself where its values lie, and needs the
shared memory of an H100 or H200. Triton's interpreter knows no Gluon: elsewhere, and in tests
without a GPU, the other kernels serve.
"""

# ruff: noqa: RUF005
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# renamed in Triton 3.7
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# items that are weighed at once
GROUP = gl.constexpr(4)
# items whose places are looked up at once, by the part that fetches
CHUNK = gl.constexpr(8)
# registers of a thread that reads (the second time), weighs and fetches: with the first part that
# reads, 128 a thread in all
REGISTERS = gl.constexpr((144, 184, 40))
# words of an item's weights: the ring's for d and for the output, the fold's, and these
_OF_VALUE, _OUT_OF_VALUE, _OF_KEY, _OUT_OF_KEY, _OUT_OF_QUERY, _FOLD_DECAY = (
    gl.constexpr(i) for i in range(6)
)
_ROW, _WRITTEN, _NUM_FOLDED, _FOLD_ROW = (gl.constexpr(i) for i in range(6, 10))
_WORDS = gl.constexpr(64)


@gluon.jit
def _visited(j, count):
    """Return which of a program's items its j-th visit is to: every fourth is one of the first
    quarter, among which are those that fold."""
    return gl.where(j % 4 == 0, j // 4, (count + 3) // 4 + j - j // 4 - 1)


@gluon.jit
def _items(j0, first, step, count, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the items [SIZE] of visits from j0 on; beyond the last one, the last one's."""
    j = gl.minimum(j0 + gl.arange(0, SIZE, LAYOUT), count - 1)
    return first + _visited(j, count) * step


@gluon.jit
def _bits(x):
    """Return whole numbers below 2^31 as words that hold them, or the other way round."""
    if x.dtype == gl.float32:
        return x.to(gl.int32, bitcast=True)
    else:  # noqa: RET505 - known when compiling
        return x.to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _pairs(p):
    """Return a pointer to pairs of bfloat16: single ones would each take a register."""
    return p.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def _unpacked(x):
    """Return both values of pairs of bfloat16."""
    return (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _joined(x, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a vector [SIZE] from pairs of its values."""
    low, high = _unpacked(x)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [SIZE]), LAYOUT)


# --- weigh


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sums(g, LAYOUT: gl.constexpr):
    """Return for each of a group's entries [GROUP, NP] the sum over it and all later ones."""
    # an item's entries in one warp, along its threads
    SCAN: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    sums = gl.associative_scan(gl.convert_layout(g, SCAN), 1, _add, reverse=True)
    return gl.convert_layout(sums, LAYOUT)


@gluon.jit
def _decay(x):
    """Return exp of x <= 0, as `arithmetic._decay` does."""
    return gl.exp2(x * 1.4426950408889634)


@gluon.jit
def _exact_decay(x):
    """Return exp of x <= 0 to one rounding, as `arithmetic._exact_decay` does."""
    x = gl.maximum(x, -87.0)
    n = gl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - n * 0.693145751953125) - n * 1.428606765330187e-06
    p = 1.0 / 720 + r * (1.0 / 5040)
    p = 1.0 / 120 + r * p
    p = 1.0 / 24 + r * p
    p = 1.0 / 6 + r * p
    p = 0.5 + r * p
    p = 1.0 + r * p
    return (1.0 + r * p) * gl.exp2(n)


@gluon.jit
def _load_entries(
    ring_read, fold_mask, row, zero_entry, N: gl.constexpr, NP: gl.constexpr, PAIRS: gl.constexpr
):
    """Load of a group's rows the ring entries [GROUP, NP], each one's newer neighbour, the oldest,
    and which are folded."""
    o_n = gl.arange(0, NP, gl.SliceLayout(0, PAIRS))
    start = row * N
    m_n = (o_n < N)[None, :] & (start >= 0)[:, None]
    m_newer = (o_n + 1 < N)[None, :] & (start >= 0)[:, None]
    # entries are below 2^31: the lower half of each
    p_entry = _pairs(ring_read) + 2 * start
    entry = gl.load(p_entry[:, None] + 2 * o_n[None, :], mask=m_n, other=zero_entry)
    newer = gl.load(p_entry[:, None] + 2 * o_n[None, :] + 2, mask=m_newer, other=zero_entry)
    folded = gl.load(fold_mask + start[:, None] + o_n[None, :], mask=m_n, other=0)
    return entry, newer, gl.load(p_entry), folded


@gluon.jit
def _load_ring(
    k_ring, g_ring, entries, head, zero_entry,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's keys [GROUP, NP, K / 2] and decays out of the rings; and count entries."""
    entry, newer, oldest, folded = entries
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    live = entry != zero_entry
    p_keys = (entry.to(gl.int64) * H + (head // (HV // H))[:, None]) * (K // 2)
    p_keys = (_pairs(k_ring) + p_keys)[:, :, None] + o_k[None, :][:, None, :]
    m_keys = live[:, :, None] & (o_k >= 0)[None, :][:, None, :]
    keys = gl.load(p_keys, mask=m_keys, other=0)
    p_newer = g_ring + newer.to(gl.int64) * HV + head[:, None]
    g_newer = gl.load(p_newer, mask=newer != zero_entry, other=0.0)
    g_oldest = gl.load(g_ring + oldest.to(gl.int64) * HV + head)
    return keys, g_newer, g_oldest, gl.sum(live.to(gl.int32), 1), gl.sum(folded.to(gl.int32), 1)


@gluon.jit
def _load_token(
    q, k, v, beta, log_decay, ring_write, fold_rows, row, head,
    q_stride, k_stride, v_stride, beta_stride, g_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load a group's tokens, and where they and their folds go."""
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    v_row = gl.convert_layout(row, gl.SliceLayout(1, VECTOR))
    v_head = gl.convert_layout(head, gl.SliceLayout(1, VECTOR))
    v_key_head = v_head // (HV // H)
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    o_v = gl.arange(0, V // 2, gl.SliceLayout(0, VECTOR))
    key = gl.load(_pairs(k + v_row * k_stride + v_key_head * K)[:, None] + o_k[None, :])
    query = gl.load(_pairs(q + v_row * q_stride + v_key_head * K)[:, None] + o_k[None, :])
    value = gl.load(_pairs(v + v_row * v_stride + v_head * V)[:, None] + o_v[None, :])
    g = gl.load(log_decay + row * g_stride + head)
    b_beta = gl.load(beta + row * beta_stride + head)
    return key, query, value, g, b_beta, gl.load(ring_write + row), gl.load(fold_rows + row)


@gluon.jit
def _prefetch_token(
    q, k, v, row, head, q_stride, k_stride, v_stride,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr, ITEM: gl.constexpr,
):  # fmt: skip
    """Have a group's tokens brought to the L2 cache, from which the states drive everything out."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [GROUP, 1], [1, 0])
    row = gl.convert_layout(row, gl.SliceLayout(1, LINES))
    head = gl.convert_layout(head, gl.SliceLayout(1, LINES))
    o_k = gl.arange(0, K // 64, gl.SliceLayout(0, LINES)) * 64
    o_v = gl.arange(0, V // 64, gl.SliceLayout(0, LINES)) * 64
    key_head = head // (HV // H)
    _prefetch((k + row * k_stride + key_head * K)[:, None] + o_k[None, :])
    _prefetch((q + row * q_stride + key_head * K)[:, None] + o_k[None, :])
    _prefetch((v + row * v_stride + head * V)[:, None] + o_v[None, :])


@gluon.jit
def _prefetch(p):
    """Have the lines of these pointers brought to the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _products(
    ring, token, scale, eps, NP: gl.constexpr, LAYOUT: gl.constexpr, HAS_NORM: gl.constexpr
):
    """Return what a group's keys are in sum: the factors that normalise the ring's, what key and
    query read of each [GROUP, NP], the token's factors and their product [GROUP]."""
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ITEM: gl.constexpr = gl.SliceLayout(1, PAIRS)
    keys, num_live = ring[0], ring[3]
    o_n = gl.arange(0, NP, gl.SliceLayout(0, PAIRS))
    k_0, k_1 = _unpacked(token[0])
    q_0, q_1 = _unpacked(token[1])
    r_0, r_1 = _unpacked(keys)
    live = o_n[None, :] < num_live[:, None]
    factor = gl.where(live, 1.0, 0.0)
    pair = gl.convert_layout(gl.sum(k_0 * q_0 + k_1 * q_1, 1), ITEM)
    key_scale = gl.full_like(pair, 1.0)
    query_scale = gl.full_like(pair, 1.0) * scale
    if HAS_NORM:
        factor *= gl.rsqrt(gl.where(live, gl.sum(r_0 * r_0 + r_1 * r_1, 2) + eps, 1.0))
        key_scale *= gl.rsqrt(gl.convert_layout(gl.sum(k_0 * k_0 + k_1 * k_1, 1), ITEM) + eps)
        query_scale *= gl.rsqrt(gl.convert_layout(gl.sum(q_0 * q_0 + q_1 * q_1, 1), ITEM) + eps)
    key_scores = gl.sum(r_0 * k_0[:, None, :] + r_1 * k_1[:, None, :], 2)
    query_scores = gl.sum(r_0 * q_0[:, None, :] + r_1 * q_1[:, None, :], 2)
    key_scores *= factor * key_scale[:, None]
    query_scores *= factor * query_scale[:, None]
    return factor, key_scores, query_scores, key_scale, query_scale, pair * key_scale * query_scale


@gluon.jit
def _store_weights(
    k_ring, g_ring, ring, token, products, weights, values, row, head, m_item,
    NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store a group's weights and values where they are read, and its keys and decays in the
    rings; the formulas are those of `token_weights_kernel.py`."""
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    VECTOR: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    V_ITEM: gl.constexpr = gl.SliceLayout(1, VECTOR)
    REST: gl.constexpr = 3 * NP
    keys, g_newer, g_oldest, num_live, num_folded = ring
    key, query, value, g, b_beta, written, fold_row = token
    factor, key_scores, query_scores, key_scale, query_scale, pair = products
    b_beta = b_beta.to(gl.float32)
    o_n = gl.arange(0, NP, gl.SliceLayout(0, PAIRS))
    o_k = gl.arange(0, K // 2, gl.SliceLayout(0, VECTOR))
    v_head = gl.convert_layout(head, V_ITEM)
    p_written = (gl.convert_layout(written, V_ITEM) * H + v_head // (HV // H)) * K
    m_key = gl.convert_layout(m_item, V_ITEM) & (v_head % (HV // H) == 0)
    m_key = m_key[:, None] & (o_k >= 0)[None, :]
    gl.store(_pairs(k_ring + p_written)[:, None] + o_k[None, :], key, mask=m_key)
    gl.store(g_ring + written * HV + head, g, mask=m_item)

    ring_decay = _decay(_sums(g_newer, PAIRS) + g[:, None])
    decay = _decay(gl.sum(g_newer, 1) + g_oldest + g)
    of_key = pair * b_beta
    out_scores = query_scores - of_key[:, None] * key_scores
    weights.slice(0, NP, dim=1).store((-b_beta)[:, None] * key_scores * ring_decay)
    weights.slice(NP, NP, dim=1).store(out_scores * ring_decay)
    fold_g = gl.where(o_n[None, :] + 1 < num_folded[:, None], g_newer, 0.0)
    fold_factor = _decay(_sums(fold_g, PAIRS)) * factor
    fold_factor = gl.where(o_n[None, :] < num_folded[:, None], fold_factor, 0.0)
    fold_decay = _exact_decay(gl.sum(fold_g, 1) + g_oldest)
    weights.slice(2 * NP, NP, dim=1).store(fold_factor)
    values.store(value)
    weights.slice(REST + _OF_VALUE, 1, dim=1).store(b_beta[:, None])
    weights.slice(REST + _OUT_OF_VALUE, 1, dim=1).store(of_key[:, None])
    weights.slice(REST + _OF_KEY, 1, dim=1).store((-b_beta * decay * key_scale)[:, None])
    weights.slice(REST + _OUT_OF_KEY, 1, dim=1).store((-of_key * decay * key_scale)[:, None])
    weights.slice(REST + _OUT_OF_QUERY, 1, dim=1).store((decay * query_scale)[:, None])
    weights.slice(REST + _FOLD_DECAY, 1, dim=1).store(fold_decay[:, None])
    weights.slice(REST + _ROW, 1, dim=1).store(_bits(row)[:, None])
    weights.slice(REST + _WRITTEN, 1, dim=1).store(_bits(written)[:, None])
    weights.slice(REST + _NUM_FOLDED, 1, dim=1).store(_bits(num_folded)[:, None])
    weights.slice(REST + _FOLD_ROW, 1, dim=1).store(_bits(fold_row)[:, None])


@gluon.jit
def _weigh(
    q, k, v, beta, log_decay, k_ring, g_ring, order, ring_read, ring_write, fold_mask, fold_rows,
    weights, values, full, empty, first, step, count,
    q_stride, k_stride, v_stride, beta_stride, g_stride, zero_entry, scale, eps,
    N: gl.constexpr, NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, HAS_NORM: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Work out the weights of all of a program's items, a group at a time.

    What a group needs is asked for a group ahead, its indices two, and its rows three.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 2, 16], [GROUP, 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    ITEM: gl.constexpr = gl.SliceLayout(1, PAIRS)
    pairs = values._reinterpret(
        gl.int32, [2, GROUP, V // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    item = _items(0, first, step, count, GROUP, ITEM)
    row, head = gl.load(order + item // HV).to(gl.int32), item % HV
    entries = _load_entries(ring_read, fold_mask, row, zero_entry, N, NP, PAIRS)
    ring = _load_ring(k_ring, g_ring, entries, head, zero_entry, H, HV, K, LAYOUT)
    item = _items(GROUP, first, step, count, GROUP, ITEM)
    next_row, next_head = gl.load(order + item // HV).to(gl.int32), item % HV
    entries = _load_entries(ring_read, fold_mask, next_row, zero_entry, N, NP, PAIRS)
    item = _items(2 * GROUP, first, step, count, GROUP, ITEM)
    later_row, later_head = gl.load(order + item // HV).to(gl.int32), item % HV
    if CHAINED:
        gdc_wait()
    token = _load_token(
        q, k, v, beta, log_decay, ring_write, fold_rows, row, head,
        q_stride, k_stride, v_stride, beta_stride, g_stride, H, HV, K, V, LAYOUT,
    )  # fmt: skip
    i = 0
    phase = 1
    for j0 in range(0, count, GROUP):
        # once these are summed, the keys' registers are free for the next ones
        products = _products(ring, token, scale, eps, NP, LAYOUT, HAS_NORM)
        next_ring = _load_ring(k_ring, g_ring, entries, next_head, zero_entry, H, HV, K, LAYOUT)
        next_token = _load_token(
            q, k, v, beta, log_decay, ring_write, fold_rows, next_row, next_head,
            q_stride, k_stride, v_stride, beta_stride, g_stride, H, HV, K, V, LAYOUT,
        )  # fmt: skip
        entries = _load_entries(ring_read, fold_mask, later_row, zero_entry, N, NP, PAIRS)
        _prefetch_token(
            q, k, v, later_row, later_head, q_stride, k_stride, v_stride, H, HV, K, V, ITEM
        )
        item = _items(j0 + 3 * GROUP, first, step, count, GROUP, ITEM)
        last_row, last_head = gl.load(order + item // HV).to(gl.int32), item % HV
        mbarrier.wait(empty.index(i), phase)
        m_item = j0 + gl.arange(0, GROUP, ITEM) < count
        _store_weights(
            k_ring, g_ring, ring, token, products, weights.index(i), pairs.index(i),
            row, head, m_item, NP, H, HV, K, LAYOUT,
        )  # fmt: skip
        mbarrier.arrive(full.index(i), count=1)
        ring, token = next_ring, next_token
        row, next_row, later_row = next_row, later_row, last_row
        head, next_head, later_head = next_head, later_head, last_head
        i ^= 1
        if i == 0:
            phase ^= 1


# --- fetch


@gluon.jit
def _load_places(
    order, ring_read, read_rows, fold_mask, j0, first, step, count, zero_entry,
    N: gl.constexpr, NP: gl.constexpr, HV: gl.constexpr, PLACES: gl.constexpr,
):  # fmt: skip
    """Load where the states and ring entries of CHUNK visits from j0 on are, and which fold."""
    ITEM: gl.constexpr = gl.SliceLayout(1, PLACES)
    item = _items(j0, first, step, count, CHUNK, ITEM)
    row = gl.load(order + item // HV).to(gl.int32)
    o_n = gl.arange(0, NP, gl.SliceLayout(0, PLACES))
    p_entry = _pairs(ring_read) + (row * N)[:, None] * 2 + o_n[None, :] * 2
    m_n = (row >= 0)[:, None] & (o_n < N)[None, :]
    entries = gl.load(p_entry, mask=m_n, other=zero_entry)
    state_row = gl.load(read_rows + row).to(gl.int32)
    is_folding = gl.load(fold_mask + row * N).to(gl.int32)
    return item % HV * 2 + is_folding, state_row, entries


@gluon.jit
def _store_places(places, smem_places, smem_entries, j0):
    """Put places where all threads find them; those of the chunk before stay."""
    head, state_row, entries = places
    i = j0 // CHUNK % 2
    chunks = smem_places._reinterpret(gl.int32, [4, CHUNK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _barrier()
    chunks.index(i).store(head)
    chunks.index(2 + i).store(state_row)
    smem_entries.index(i).store(entries)
    _barrier()


@gluon.jit
def _place(smem_places, j, LAYOUT: gl.constexpr):
    """Return the state row of a visit, its value head, and whether it folds."""
    j = j % (2 * CHUNK)
    state_row = gl.sum(smem_places.index(2 * CHUNK + j).load(LAYOUT), 0)
    head = gl.sum(smem_places.index(j).load(LAYOUT), 0)
    return state_row, head // 2, head % 2 != 0


@gluon.jit
def _fetch_state(
    states, smem_states, full, state_row, head, stage,
    HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for both halves of an item's state."""
    for half in gl.static_range(2):
        i = half * STAGES + stage
        mbarrier.expect(full.index(i), states.block_type.nbytes)
        first_channel = (state_row * HV + head) * V + half * BV
        tma.async_copy_global_to_shared(
            states, [first_channel, 0], full.index(i), smem_states.index(i)
        )


@gluon.jit
def _fetch_ring(
    d_ring, smem_d, full, smem_entries, j, head, stage, zero_entry,
    NP: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for what the ring holds of an item's d; entries that there are not become zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BV, BV // 4], [4, 1], [1, 0])
    rows = smem_entries._reinterpret(
        gl.int32, [2 * CHUNK, NP], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    entry = rows.index(j % (2 * CHUNK)).load(gl.SliceLayout(1, COPY))
    o_v = gl.arange(0, BV, gl.SliceLayout(0, COPY))
    m_live = (entry != zero_entry)[:, None] & (o_v >= 0)[None, :]
    p_d = d_ring + ((entry.to(gl.int64) * HV + head) * V)[:, None] + o_v[None, :]
    for half in gl.static_range(2):
        i = half * STAGES + stage
        async_copy.async_copy_global_to_shared(smem_d.index(i), p_d + half * BV, m_live)
        async_copy.mbarrier_arrive(full.index(i), increment_count=False)


@gluon.jit
def _fetch_fold_keys(
    k_ring, smem_keys, full, smem_entries, j, head,
    NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Ask for the keys of an item that folds; those of the zero entry are zeros."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    rows = smem_entries._reinterpret(
        gl.int32, [2 * CHUNK, NP], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    entry = rows.index(j % (2 * CHUNK)).load(gl.SliceLayout(1, KEYS)).to(gl.int64)
    o_k = gl.arange(0, K, gl.SliceLayout(0, KEYS))
    p_keys = k_ring + ((entry * H + head // (HV // H)) * K)[:, None] + o_k[None, :]
    async_copy.async_copy_global_to_shared(smem_keys, p_keys)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _fetch(
    states, d_ring, k_ring, order, ring_read, read_rows, fold_mask,
    smem_states, smem_d, smem_keys, smem_places, smem_entries, full, empty, k_full, k_empty,
    first, step, count, zero_entry,
    N: gl.constexpr, NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Keep STAGES items on their way; nothing of it has been written by the kernels before."""
    PLACES: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flat = smem_places._reinterpret(
        gl.int32, [4 * CHUNK, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    places = _load_places(
        order, ring_read, read_rows, fold_mask, 0, first, step, count, zero_entry, N, NP, HV, PLACES
    )
    _store_places(places, smem_places, smem_entries, 0)
    # all states first: they take longest
    for j in gl.static_range(STAGES):
        if j < count:
            state_row, head, is_folding = _place(flat, j, LAYOUT)
            _fetch_state(states, smem_states, full, state_row, head, j, HV, V, BV, STAGES)
    places = _load_places(
        order, ring_read, read_rows, fold_mask, CHUNK, first, step, count, zero_entry,
        N, NP, HV, PLACES,
    )  # fmt: skip
    stage = 0
    phase = 1
    k_phase = 1
    for j in range(0, count):
        state_row, head, is_folding = _place(flat, j, LAYOUT)
        if is_folding:
            mbarrier.wait(k_empty, k_phase)
            _fetch_fold_keys(k_ring, smem_keys, k_full, smem_entries, j, head, NP, H, HV, K)
            k_phase ^= 1
        for half in gl.static_range(2):
            mbarrier.wait(empty.index(half * STAGES + stage), phase)
        if j >= STAGES:
            _fetch_state(states, smem_states, full, state_row, head, stage, HV, V, BV, STAGES)
        _fetch_ring(
            d_ring, smem_d, full, smem_entries, j, head, stage, zero_entry, NP, HV, V, BV, STAGES
        )
        if (j + 1) % CHUNK == 0:
            _store_places(places, smem_places, smem_entries, j + 1)
            places = _load_places(
                order, ring_read, read_rows, fold_mask, j + 1 + CHUNK, first, step, count,
                zero_entry, N, NP, HV, PLACES,
            )  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


# --- read


@gluon.jit
def _word(weights, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a word of an item's weights, [1]."""
    return weights.slice(i, 1).load(LAYOUT)


@gluon.jit
def _number(weights, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Return a whole number out of an item's weights."""
    return gl.sum(_bits(_word(weights, i, LAYOUT)), 0)


@gluon.jit
def _partial(products, PARTS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the sums of each thread's own products, [BV, 8] of [BV, PARTS * 8 * WIDTH]."""
    products = gl.reshape(products, [products.shape[0], PARTS, 8, WIDTH])
    return gl.convert_layout(gl.sum(gl.sum(products, 3), 1), LAYOUT)


@gluon.jit
def _store_fold(
    tile, p_out, ring_d, weights, smem_keys, k_full, k_empty, k_phase, first_channel,
    NP: gl.constexpr, K: gl.constexpr, BV: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Store a tile of a folded state, as `fold_kernels._store_fold` does.

    d enters the matrix units as three bfloat16 values, 24 bits.
    """
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, UNITS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, UNITS, 2)
    factor = weights.slice(2 * NP, NP).load(gl.SliceLayout(0, LEFT))
    d = ring_d.permute([1, 0]).load(LEFT) * factor[None, :]
    decay = _word(weights, 3 * NP + _FOLD_DECAY, gl.SliceLayout(1, UNITS))
    mbarrier.wait(k_full, k_phase)
    keys = smem_keys.load(RIGHT)
    mbarrier.arrive(k_empty, count=1)
    high = d.to(gl.bfloat16)
    d -= high.to(gl.float32)
    middle = d.to(gl.bfloat16)
    low = (d - middle.to(gl.float32)).to(gl.bfloat16)
    added = mma_v2(low, keys, gl.zeros([BV, K], gl.float32, UNITS))
    added = mma_v2(middle, keys, added)
    added = mma_v2(high, keys, added)
    o_v = first_channel + gl.arange(0, BV, gl.SliceLayout(1, UNITS))
    o_k = gl.arange(0, K, gl.SliceLayout(0, UNITS))
    state = tile.load(UNITS) * decay[:, None] + added
    gl.store(p_out + o_v[:, None] * K + o_k[None, :], state)


@gluon.jit
def _read(
    q, k, order, out, checkpoint, d_ring, smem_states, smem_d, weights, values, smem_keys,
    full, empty, w_full, w_empty, k_full, k_empty, first, step, count, q_stride, k_stride,
    HALF: gl.constexpr, N: gl.constexpr, NP: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr,
    CHAINED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Read all of a program's items: half of their value channels."""
    # four rows of a thread; eight threads share a row's 128 bytes
    TILE: gl.constexpr = gl.BlockedLayout([4, 4], [4, 8], [num_warps, 1], [1, 0])
    PARTIAL: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [num_warps, 1], [1, 0])
    PACKED: gl.constexpr = gl.BlockedLayout([4, 2], [4, 8], [num_warps, 1], [1, 0])
    PAIR: gl.constexpr = gl.SliceLayout(0, PACKED)
    ROWS: gl.constexpr = gl.SliceLayout(1, TILE)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, TILE)
    FACTOR: gl.constexpr = gl.SliceLayout(1, PARTIAL)
    ENTRIES: gl.constexpr = gl.SliceLayout(0, PARTIAL)
    REST: gl.constexpr = 3 * NP
    o_v = HALF * BV + gl.arange(0, BV, ROWS)
    o_k = gl.arange(0, K // 2, PAIR)
    by_item = weights._reinterpret(
        gl.float32, [2 * GROUP, _WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    first_row, key_head = gl.load(order + first // HV), first % HV // (HV // H)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    key = gl.load(_pairs(k + first_row * k_stride + key_head * K) + o_k)
    query = gl.load(_pairs(q + first_row * q_stride + key_head * K) + o_k)
    stage = 0
    phase = 0
    k_phase = 0
    for j in range(0, count):
        head = (first + _visited(j, count) * step) % HV
        i = HALF * STAGES + stage
        mbarrier.wait(full.index(i), phase)
        tile = smem_states.index(i).load(TILE)
        of_key = _partial(tile * _joined(key, K, COLUMNS)[None, :], K // 32, 4, PARTIAL)
        of_query = _partial(tile * _joined(query, K, COLUMNS)[None, :], K // 32, 4, PARTIAL)
        # asked for when their registers are free
        j_next = gl.minimum(j + 1, count - 1)
        group = j_next // GROUP
        mbarrier.wait(w_full.index(group & 1), (group >> 1) & 1)
        next_row = _word(by_item.index(j_next % (2 * GROUP)), REST + _ROW, PAIR)
        next_row = _bits(next_row).to(gl.int64)
        key_head = (first + _visited(j_next, count) * step) % HV // (HV // H)
        key = gl.load(_pairs(k + next_row * k_stride + key_head * K) + o_k)
        query = gl.load(_pairs(q + next_row * q_stride + key_head * K) + o_k)

        group = j // GROUP
        own = by_item.index(j % (2 * GROUP))
        value = values.index(j % (2 * GROUP)).slice(HALF * BV, BV).load(ROWS).to(gl.float32)
        ring_d = smem_d.index(i).permute([1, 0]).load(PARTIAL)
        d_weights, out_weights = own.slice(0, NP).load(ENTRIES), own.slice(NP, NP).load(ENTRIES)
        d = of_key * _word(own, REST + _OF_KEY, FACTOR)[:, None]
        y = of_key * _word(own, REST + _OUT_OF_KEY, FACTOR)[:, None]
        y += of_query * _word(own, REST + _OUT_OF_QUERY, FACTOR)[:, None]
        d += _partial(ring_d * d_weights[None, :], NP // 8, 1, PARTIAL)
        y += _partial(ring_d * out_weights[None, :], NP // 8, 1, PARTIAL)
        d_value = value * _word(own, REST + _OF_VALUE, ROWS)
        y_value = value * _word(own, REST + _OUT_OF_VALUE, ROWS)
        row = _bits(_word(own, REST + _ROW, ROWS)).to(gl.int64)
        written = _bits(_word(own, REST + _WRITTEN, ROWS)).to(gl.int64)
        if _number(own, REST + _NUM_FOLDED, ROWS) != 0:
            fold_row = _number(own, REST + _FOLD_ROW, ROWS).to(gl.int64)
            _store_fold(
                smem_states.index(i), checkpoint + (fold_row * HV + head) * (V * K),
                smem_d.index(i), own, smem_keys, k_full, k_empty, k_phase, HALF * BV,
                NP, K, BV, num_warps,
            )  # fmt: skip
            k_phase ^= 1
        mbarrier.arrive(empty.index(i), count=1)
        mbarrier.arrive(w_empty.index(group & 1), count=1, pred=j % GROUP == GROUP - 1)
        d = gl.convert_layout(gl.sum(d, 1), ROWS) + d_value
        y = gl.convert_layout(gl.sum(y, 1), ROWS) + y_value
        gl.store(d_ring + (written * HV + head) * V + o_v, d)
        gl.store(out + (row * HV + head) * V + o_v, y.to(out.dtype.element_ty))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit(do_not_specialize=["zero_entry", "num_items"])
def _resident_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    out,
    states,  # descriptor of the checkpoints' value channels, in tiles [BV, K]
    checkpoint,
    d_ring,
    k_ring,
    g_ring,
    order,
    ring_read,
    ring_write,
    fold_mask,
    read_rows,
    fold_rows,
    q_stride,
    k_stride,
    v_stride,
    beta_stride,
    g_stride,
    zero_entry,
    num_items,
    scale,
    eps,
    N: gl.constexpr,
    NP: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_NORM: gl.constexpr,
    CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Serve every `num_programs`-th item from the program's number on."""
    BV: gl.constexpr = V // 2
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    KEYS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    short: gl.constexpr = k_ring.dtype.element_ty
    smem_states = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BV, K], states.layout)
    smem_d = gl.allocate_shared_memory(gl.float32, [2 * STAGES, NP, BV], PLAIN)
    weights = gl.allocate_shared_memory(gl.float32, [2, GROUP, _WORDS], PLAIN)
    values = gl.allocate_shared_memory(short, [2 * GROUP, V], FLAT)
    smem_keys = gl.allocate_shared_memory(short, [NP, K], KEYS)
    smem_places = gl.allocate_shared_memory(gl.int32, [4 * CHUNK], FLAT)
    smem_entries = gl.allocate_shared_memory(gl.int32, [2, CHUNK, NP], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    w_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(2 * STAGES):
        # the bytes of a state, and each thread's copies
        mbarrier.init(full.index(i), count=1 + 128)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=2)
    mbarrier.init(k_full, count=128)
    mbarrier.init(k_empty, count=2)
    first, step = gl.program_id(0), gl.num_programs(0)
    count = (num_items - first + step - 1) // step
    gl.warp_specialize(
        [
            (_read, (
                q, k, order, out, checkpoint, d_ring, smem_states, smem_d, weights, values,
                smem_keys, full, empty, w_full, w_empty, k_full, k_empty,
                first, step, count, q_stride, k_stride,
                0, N, NP, H, HV, K, V, BV, STAGES, CHAINED, num_warps,
            )),
            (_read, (
                q, k, order, out, checkpoint, d_ring, smem_states, smem_d, weights, values,
                smem_keys, full, empty, w_full, w_empty, k_full, k_empty,
                first, step, count, q_stride, k_stride,
                1, N, NP, H, HV, K, V, BV, STAGES, CHAINED, num_warps,
            )),
            (_weigh, (
                q, k, v, beta, log_decay, k_ring, g_ring, order, ring_read, ring_write, fold_mask,
                fold_rows, weights, values, w_full, w_empty, first, step, count,
                q_stride, k_stride, v_stride, beta_stride, g_stride, zero_entry, scale, eps,
                N, NP, H, HV, K, V, HAS_NORM, CHAINED,
            )),
            (_fetch, (
                states, d_ring, k_ring, order, ring_read, read_rows, fold_mask,
                smem_states, smem_d, smem_keys, smem_places, smem_entries, full, empty,
                k_full, k_empty, first, step, count, zero_entry,
                N, NP, H, HV, K, V, BV, STAGES,
            )),
        ],
        [num_warps, 4, 4],
        REGISTERS,
    )  # fmt: skip
