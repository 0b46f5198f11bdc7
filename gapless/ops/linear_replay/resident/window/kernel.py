"""Windows of 2 to 4 tokens of many rows on Hopper GPUs: the second of two launches, resident.

What is computed, and what a record holds: `window_scores_kernel.py`; what resident programs are:
`resident/kernel.py`. What keys, decays and beta say of an item is in its record, so these parts are
enough:

    fetch   asks for states with the tensor memory accelerator, and for all else, two items ahead
    read    twice, for the two halves of a head's value channels: everything that
            `window_stream_kernel.py` does, on matrix units, out of shared memory

A buffer has two barriers: `full`, which its writers arrive at, and `empty`, which its readers do.
Few items fold, so what folds need besides has one buffer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gapless.ops.linear_replay.resident.fetch import CHUNK
from gapless.ops.linear_replay.resident.window.fetch import STAGES, _fetch
from gapless.ops.linear_replay.resident.window.read import _read

# of a thread of the second part that reads and of the one that fetches; what remains of 168 for
# each thread is the first's that reads
REGISTERS = gl.constexpr((208, 88))


@gluon.jit(do_not_specialize=["zero_entry", "num_items"])
def _resident_window_kernel(
    records,
    q,
    k,
    v,
    out,
    states,  # descriptor of the checkpoints' value channels, in tiles [BV, K]
    checkpoint,
    d_ring,
    k_ring,
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
    zero_entry,
    num_items,
    N: gl.constexpr,
    NP: gl.constexpr,
    W: gl.constexpr,
    HALF: gl.constexpr,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    SIZE: gl.constexpr,  # of a record
    RING: gl.constexpr,  # where in it the scores are
    IS_PER_CHANNEL: gl.constexpr,
    CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Serve every `num_programs`-th item from the program's number on."""
    BV: gl.constexpr = V // 2
    XP: gl.constexpr = 2 * HALF
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # so that the threads of a warp, as matrix units want them, read different banks
    SHORT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    RING_D: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    short: gl.constexpr = k_ring.dtype.element_ty
    smem_states = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BV, K], states.layout)
    smem_d = gl.allocate_shared_memory(gl.float32, [2 * STAGES, NP, BV], RING_D)
    values = gl.allocate_shared_memory(short, [STAGES, XP, V], SHORT)
    columns = gl.allocate_shared_memory(gl.float32, [STAGES, XP], FLAT)
    scores = gl.allocate_shared_memory(gl.float32, [STAGES, XP, NP], PLAIN)
    mixed = gl.allocate_shared_memory(gl.float32, [STAGES, XP, 2 * XP], PLAIN)
    if IS_PER_CHANNEL:
        smem_x = gl.allocate_shared_memory(gl.float32, [STAGES, XP, K], WIDE)
        decays = gl.allocate_shared_memory(gl.float32, [STAGES, K], FLAT)
        keys = gl.allocate_shared_memory(gl.float32, [NP, K], WIDE)
        of_fold = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    else:
        smem_x = gl.allocate_shared_memory(short, [STAGES, XP, K], SHORT)
        decays = columns  # not used
        keys = gl.allocate_shared_memory(short, [NP, K], SHORT)
        of_fold = gl.allocate_shared_memory(gl.float32, [2 * NP], FLAT)
    words = gl.allocate_shared_memory(gl.int32, [8 * CHUNK], FLAT)
    entries = gl.allocate_shared_memory(gl.int32, [2, CHUNK, NP], PLAIN)
    written = gl.allocate_shared_memory(gl.int32, [2, CHUNK, XP], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], BARRIER)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    w_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        # each thread's copies
        mbarrier.init(w_full.index(i), count=128)
        mbarrier.init(w_empty.index(i), count=2)
    mbarrier.init(k_full, count=128)
    mbarrier.init(k_empty, count=2)
    first, step = gl.program_id(0), gl.num_programs(0)
    visits = (first, step, (num_items - first + step - 1) // step)
    of_states = (smem_states, full, empty)
    of_windows = (smem_d, smem_x, decays, values, columns, scores, mixed, w_full, w_empty)
    of_folds = (keys, of_fold, k_full, k_empty)
    places = (words, entries, written)
    gl.warp_specialize(
        [
            (_read, (
                out, checkpoint, d_ring, of_states, of_windows, of_folds, places, visits,
                zero_entry, 0, NP, W, XP, HV, K, V, BV, IS_PER_CHANNEL, CHAINED, num_warps,
            )),
            (_read, (
                out, checkpoint, d_ring, of_states, of_windows, of_folds, places, visits,
                zero_entry, 1, NP, W, XP, HV, K, V, BV, IS_PER_CHANNEL, CHAINED, num_warps,
            )),
            (_fetch, (
                records, (q, q_stride, q_token_stride), (k, k_stride, k_token_stride),
                (v, v_stride, v_token_stride), states, d_ring, k_ring, order, ring_read, ring_write,
                fold_mask, read_rows, fold_rows, of_states, of_windows, of_folds, places, visits,
                zero_entry, N, NP, W, XP, H, HV, K, V, BV, SIZE, RING, IS_PER_CHANNEL, CHAINED,
            )),
        ],
        [num_warps, 4],
        REGISTERS,
    )  # fmt: skip
