"""Launch settings of the replay kernels, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.linear_replay --sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.core.specs.linear import Recurrence


@dataclass(frozen=True)
class Launch:
    """How a window is launched: a weights kernel and the stream kernel after it, or one kernel."""

    block_v: int
    """BV: value channels of a program of the kernel that reads the state."""
    num_warps: int = 1
    """Warps of such a program; in a window's, with one no state passes through shared memory."""
    weights_warps: int = 1
    """Warps of a program of the weights kernel; 0 where one launch does without."""
    max_registers: int | None = None
    """Most registers of a thread of the former kernel, None for the compiler's choice."""
    heads: int = 1
    """Value heads, of one key head, of a program of a weights kernel with one decay per head."""
    group: int = 4
    """Ring entries that a weights kernel with a decay per channel has under way at once."""


# upper ends of the row buckets; the last bucket is open
MAX_ROWS = (2, 16)
Buckets = tuple[Launch, Launch, Launch]

# one token, with a single ring entry and with several
PACKED: Buckets = (Launch(32, 2, 0), Launch(16, 1, 0), Launch(16, 1, 0))
CHANNEL_PACKED: Buckets = (Launch(16, 2), Launch(16), Launch(16, 2))
TOKENS: dict[Recurrence, Buckets] = {
    Recurrence.GATED_DELTA: (
        Launch(64, 4, 0), Launch(64, 4, 0), Launch(32, max_registers=184, heads=2),
    ),
    # with a decay per channel sums run over the threads of a program: in one warp without barriers
    Recurrence.KIMI_DELTA: (
        Launch(16, 2, group=8), Launch(32, group=8), Launch(32, max_registers=184),
    ),
    Recurrence.MAMBA2: (Launch(64, 4, 0), Launch(16, 1, 0), Launch(64, 4, 0, 128)),
}  # fmt: skip
# (most tokens of a window, is_per_channel) -> a launch per row bucket
WINDOWS: dict[tuple[int, bool], Buckets] = {
    (4, False): (
        Launch(16, 1, 4, 128), Launch(16, 1, 2, 128), Launch(16, max_registers=128, heads=2),
    ),
    (4, True): (Launch(16), Launch(16), Launch(16)),
    (8, False): (Launch(16), Launch(16), Launch(16)),
    (8, True): (Launch(16, 1, 4), Launch(16), Launch(16)),
    (16, False): (Launch(32, 2, 4), Launch(32, 2, 2), Launch(32, 2, 2)),
    (16, True): (Launch(32, 2, 4), Launch(32, 2, 2), Launch(32, 2)),
}  # fmt: skip
MATERIALIZE = Launch(32, 4, 4)


def launch_of(width: int, num_replayed: int, *, rows: int, recurrence: Recurrence) -> Launch:
    """Return the settings for windows of `width` tokens, 1 to 16, and N = `num_replayed`."""
    is_per_channel = recurrence is Recurrence.KIMI_DELTA
    if width > 1:
        most = min(most for most, _ in WINDOWS if width <= most)
        launches = WINDOWS[most, is_per_channel]
    elif num_replayed == 1:
        launches = CHANNEL_PACKED if is_per_channel else PACKED
    else:
        launches = TOKENS[recurrence]
    return launches[sum(rows > most for most in MAX_ROWS)]
