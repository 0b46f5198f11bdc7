"""Windows of 2 to 4 tokens of many rows on Hopper GPUs, in one launch of resident programs.

What is computed: `window_scores_kernel.py` and `window_stream_kernel.py`; what resident programs,
items and visits are: `resident/kernel.py`. The parts of a program are

    fetch   asks for states with the tensor memory accelerator, two items ahead, and for what rings
            hold of keys and decays, a group of visits ahead
    weigh   works out a group at a time what `window_scores_kernel.py` puts into records, and puts
            the windows' keys and decays into the rings
    read    eight warps: everything that `window_stream_kernel.py` does, on matrix units, out of
            shared memory

A buffer has two barriers: `full`, which its writers arrive at, and `empty`, which its readers do.
What is weighed has two places, of groups with even and odd numbers, and the barriers `weighed` and
`taken`. Few items fold, so what folds need besides has one buffer. With a decay per channel it is
left in global memory by weighing, as shared memory is full, and `folded` says when.

What all parts do at once has to stay in the instruction cache: with two parts that read, one for
each half of the value channels, and folds unrolled, windows with a decay per channel took a quarter
longer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from gapless.ops.linear_replay.resident.window.fetch import STAGES, _fetch
from gapless.ops.linear_replay.resident.window.groups import CHANNEL_GROUP, HEAD_GROUP, SPAN
from gapless.ops.linear_replay.resident.window.read import _read
from gapless.ops.linear_replay.resident.window.weigh import _weigh_heads
from gapless.ops.linear_replay.resident.window.weigh_channels import _weigh_channels

# of a thread of the part that weighs and of the one that fetches; what remains of 128 for each is
# for the part that reads
REGISTERS = gl.constexpr((184, 88))


@gluon.jit
def _weigh(
    tokens, k_ring, g_ring, folds, inputs, of_weights, smem_x, facts, places, placed, folded,
    visits, scale, eps,
    GROUP: gl.constexpr, NB: gl.constexpr, W: gl.constexpr, XP: gl.constexpr, H: gl.constexpr,
    HV: gl.constexpr, K: gl.constexpr, IS_PER_CHANNEL: gl.constexpr, HAS_TREE: gl.constexpr,
    HAS_NORM: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """Weigh all of a program's groups."""
    if CHAINED:
        gdc_wait()
    count = (visits[2] + GROUP - 1) // GROUP
    if IS_PER_CHANNEL:
        _weigh_channels(
            tokens, k_ring, g_ring, folds, inputs, of_weights, smem_x, facts, places, placed,
            folded, count, scale, eps, NB, W, XP, H, HV, K, HAS_TREE, HAS_NORM,
        )  # fmt: skip
    else:
        _weigh_heads(
            k_ring, g_ring, inputs, of_weights, places, count, scale, eps,
            NB, W, XP, H, HV, K, HAS_TREE, HAS_NORM,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["zero_entry", "num_items", "num_programs"])
def _resident_window_kernel(
    q,
    k,
    v,
    beta,
    log_decay,
    ancestors,
    out,
    states,  # descriptor of the checkpoints' value channels, in tiles [V, K]
    folds,  # with a decay per channel what programs' folds add, else not used
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
    q_token_stride,
    k_stride,
    k_token_stride,
    v_stride,
    v_token_stride,
    beta_stride,
    beta_token_stride,
    g_stride,
    g_token_stride,
    zero_entry,
    num_items,
    num_programs,  # asked of the device it would be spilled
    scale,
    eps,
    N: gl.constexpr,
    W: gl.constexpr,
    HALF: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    IS_PER_CHANNEL: gl.constexpr,
    HAS_TREE: gl.constexpr,
    HAS_NORM: gl.constexpr,
    CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Serve every `num_programs`-th item from the program's number on."""
    XP: gl.constexpr = 2 * HALF
    # lists of ring entries in eights: one place at least has none
    NB: gl.constexpr = N // 8 + 1
    GROUP: gl.constexpr = CHANNEL_GROUP if IS_PER_CHANNEL else HEAD_GROUP
    CHUNK: gl.constexpr = 2 * GROUP
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # so that the threads of a warp, as matrix units want them, read different banks
    SHORT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SHORTS: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    RING_D: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    WIDES: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    short: gl.constexpr = k_ring.dtype.element_ty
    smem_states = gl.allocate_shared_memory(gl.float32, [STAGES, V, K], states.layout)
    smem_d = gl.allocate_shared_memory(gl.float32, [STAGES * NB, 8, V], RING_D)
    values = gl.allocate_shared_memory(short, [STAGES, XP, V], SHORT)
    words = gl.allocate_shared_memory(gl.int32, [8 * CHUNK], FLAT)
    entries = gl.allocate_shared_memory(gl.int32, [2, CHUNK, SPAN], PLAIN)
    written = gl.allocate_shared_memory(gl.int32, [2, CHUNK, XP], PLAIN)
    # what is weighed, of two groups
    columns = gl.allocate_shared_memory(gl.float32, [2, GROUP, XP], PLAIN)
    scores = gl.allocate_shared_memory(gl.float32, [2 * NB, GROUP, XP, 8], CUBE)
    mixed = gl.allocate_shared_memory(gl.float32, [2, GROUP, XP, XP], CUBE)
    factors = gl.allocate_shared_memory(gl.float32, [2, GROUP, SPAN], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    placed = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    i_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    i_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    folded = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    if IS_PER_CHANNEL:
        # of two groups, decayed, by parts of the channels
        smem_x = gl.allocate_shared_memory(gl.float32, [2, 2 * GROUP, XP, K // 2], WIDES)
        keys = gl.allocate_shared_memory(gl.float32, [NB, 8, K], WIDE)
        # of the group that is weighed next; decayed keys take the place of decays
        ring_keys = gl.allocate_shared_memory(short, [NB, 2 * GROUP, 8, K // 2], SHORTS)
        ring_g = gl.allocate_shared_memory(gl.float32, [NB, 2 * GROUP, 8, K // 2], WIDES)
        facts = gl.allocate_shared_memory(gl.int32, [8, 2 * GROUP], PLAIN)
        of_entries = columns  # not used
        inputs = (ring_keys, ring_g, i_full, i_empty)
    else:
        smem_x = gl.allocate_shared_memory(short, [STAGES, XP, K], SHORT)
        keys = gl.allocate_shared_memory(short, [NB, 8, K], SHORT)
        ring_keys = gl.allocate_shared_memory(short, [NB, GROUP, 8, K], SHORTS)
        ring_g = gl.allocate_shared_memory(gl.float32, [GROUP, SPAN], PLAIN)
        vectors = gl.allocate_shared_memory(short, [GROUP, XP, K], SHORTS)
        gates = gl.allocate_shared_memory(gl.float32, [2, GROUP, XP], PLAIN)
        bits = gl.allocate_shared_memory(gl.int32, [GROUP, XP], PLAIN)
        # of the group that is being weighed
        of_entries = gl.allocate_shared_memory(gl.float32, [2, GROUP, SPAN], PLAIN)
        facts = words  # not used
        inputs = (ring_keys, ring_g, i_full, i_empty, vectors, gates, bits)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
        # each thread's copies
        mbarrier.init(w_full.index(i), count=128)
    for i in gl.static_range(2):
        mbarrier.init(weighed.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
        mbarrier.init(folded.index(i), count=1)
    mbarrier.init(k_full, count=128)
    mbarrier.init(k_empty, count=1)
    mbarrier.init(placed, count=1)
    mbarrier.init(i_full, count=128)
    mbarrier.init(i_empty, count=1)
    first, step = gl.program_id(0), num_programs
    visits = (first, step, (num_items - first + step - 1) // step)
    folds += first * (CHUNK * 8 * NB * K)
    of_states = (smem_states, full, empty)
    of_windows = (smem_d, smem_x, values, w_full)
    of_folds = (keys, k_full, k_empty)
    of_weights = (columns, scores, mixed, factors, of_entries, weighed, taken)
    places = (words, entries, written)
    tokens = (
        (q, q_stride, q_token_stride), (k, k_stride, k_token_stride),
        (beta, beta_stride, beta_token_stride), (log_decay, g_stride, g_token_stride), ancestors,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_read, (
                out, checkpoint, d_ring, of_states, of_windows, of_folds, of_weights, places,
                visits, GROUP, NB, W, XP, HV, K, V, IS_PER_CHANNEL, CHAINED, num_warps,
            )),
            (_weigh, (
                tokens, k_ring, g_ring, folds, inputs, of_weights, smem_x, facts, places, placed,
                folded, visits, scale, eps, GROUP, NB, W, XP, H, HV, K, IS_PER_CHANNEL, HAS_TREE,
                HAS_NORM, CHAINED,
            )),
            (_fetch, (
                tokens, (v, v_stride, v_token_stride), states, folds, d_ring, k_ring, g_ring, order,
                ring_read, ring_write, fold_mask, read_rows, fold_rows, of_states, of_windows,
                of_folds, inputs, folded, places, placed, visits, zero_entry, GROUP, N, NB, W, XP,
                H, HV, K, V, IS_PER_CHANNEL, HAS_TREE, CHAINED,
            )),
        ],
        [4, 4],
        REGISTERS,
    )  # fmt: skip
