"""Windows of one token of many rows on Hopper GPUs, in one launch of resident programs.

What is computed is what `token_kernel.py` and `token_stream_kernel.py` compute. A program stays on
its multiprocessor for the whole launch and serves a list of *items*, an item being a row and value
head. Its warps have parts of their own, which hand each other buffers in shared memory:

    fetch   asks for states with the tensor memory accelerator, and for what the ring holds of d,
            two or three items ahead of those that read them
    weigh   works out what keys, decays and beta say, for four items at once, a warp for each: with
            one decay per head the ring's weights and six factors of an item, with one per channel
            what its state is read with for d and for the output, too
    read    eight warps: sums each state against key and query, adds the ring, and folds what is to
            be folded

So neither the weights of one item nor the fold of another keeps the next states from being on their
way, which is all that the launch's time depends on. A buffer has two barriers: `full`, which its
writers arrive at, and `empty`, which its readers do. Reads that the kernels before this one cannot
have written, states and rings, begin before the wait for them.

Rows that fold come first in `order`, so that each program has as many of them as any other; a
program visits these items in turn with others, as they take it longer.

It is written in Gluon, in which a Triton kernel says itself where its values lie, and needs the
shared memory of an H100 or H200; elsewhere the other kernels serve. Triton's interpreter knows no
Gluon: tests without a GPU run it on a machine of their own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gapless.ops.linear_replay.resident.fetch import CHUNK, _fetch
from gapless.ops.linear_replay.resident.items import GROUP, WORDS
from gapless.ops.linear_replay.resident.read import _read
from gapless.ops.linear_replay.resident.weigh import _weigh
from gapless.ops.linear_replay.resident.weigh_channels import _weigh_channels

# of a thread of the part that weighs and of the one that fetches; what remains of 128 for each is
# for the part that reads
REGISTERS = gl.constexpr((192, 40))
# with a decay per channel
CHANNEL_REGISTERS = gl.constexpr((216, 40))


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
    IS_PER_CHANNEL: gl.constexpr,
    HAS_NORM: gl.constexpr,
    CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Serve every `num_programs`-th item from the program's number on."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    KEYS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    short: gl.constexpr = k_ring.dtype.element_ty
    smem_states = gl.allocate_shared_memory(gl.float32, [STAGES, V, K], states.layout)
    smem_d = gl.allocate_shared_memory(gl.float32, [STAGES, NP, V], PLAIN)
    smem_v = gl.allocate_shared_memory(short, [STAGES, V], FLAT)
    weights = gl.allocate_shared_memory(gl.float32, [2, GROUP, WORDS], PLAIN)
    keys = gl.allocate_shared_memory(short, [NP, K], KEYS)
    places = gl.allocate_shared_memory(gl.int32, [8 * CHUNK], FLAT)
    entries = gl.allocate_shared_memory(gl.int32, [2, CHUNK, NP], PLAIN)
    if IS_PER_CHANNEL:
        # of a group, decayed: what states are read with for d and for the output
        smem_x = gl.allocate_shared_memory(gl.float32, [2, GROUP, 2 * K], PLAIN)
        newer = gl.allocate_shared_memory(gl.int32, [2, CHUNK, NP], PLAIN)
        fold_g = gl.allocate_shared_memory(gl.float32, [NP, K], PLAIN)
        DECAYED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
        decayed = gl.allocate_shared_memory(gl.float32, [NP, K], DECAYED)
        decays = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    else:
        # of each item, as they are: its key and query
        smem_x = gl.allocate_shared_memory(short, [STAGES, 2 * K], FLAT)
        newer, fold_g, decayed, decays = entries, keys, keys, keys  # not used
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    w_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    asked = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(STAGES):
        # the bytes of a state, and each thread's copies
        mbarrier.init(full.index(i), count=1 + 128)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(w_empty.index(i), count=1)
    mbarrier.init(k_full, count=128)
    mbarrier.init(k_empty, count=1)
    mbarrier.init(asked, count=1)
    first, step = gl.program_id(0), gl.num_programs(0)
    visits = (first, step, (num_items - first + step - 1) // step)
    fetched = (smem_states, smem_d, smem_x, smem_v, full, empty)
    weighed = (weights, smem_x, w_full, w_empty)
    folded = (keys, fold_g, k_full, k_empty)
    gl.warp_specialize(
        [
            (_read, (
                out, checkpoint, d_ring, fetched, weighed, folded, (decayed, decays), visits,
                NP, HV, K, V, STAGES, IS_PER_CHANNEL, CHAINED, num_warps,
            )),
            (_weigh_channels if IS_PER_CHANNEL else _weigh, (
                q, k, beta, log_decay, k_ring, g_ring, order, ring_read, ring_write, fold_mask,
                fold_rows, weighed, asked, visits,
                q_stride, k_stride, beta_stride, g_stride, zero_entry, scale, eps,
                N, NP, H, HV, K, HAS_NORM, CHAINED,
            )),
            (_fetch, (
                q, k, v, states, d_ring, k_ring, g_ring, order, ring_read, read_rows, fold_mask,
                fetched, folded, (places, entries, newer), asked, visits,
                q_stride, k_stride, v_stride, zero_entry,
                N, NP, H, HV, K, V, STAGES, IS_PER_CHANNEL, CHAINED,
            )),
        ],
        [4, 4],
        CHANNEL_REGISTERS if IS_PER_CHANNEL else REGISTERS,
    )  # fmt: skip
