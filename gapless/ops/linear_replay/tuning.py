"""Launch settings of the replay kernels, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.linear_replay --sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How a weights kernel and the stream kernel after it are launched."""

    block_v: int
    """BV: value channels of a program of the stream kernel."""
    num_warps: int = 1
    """Warps of such a program; in a window's, with one no state passes through shared memory."""
    weights_warps: int = 1
    """Warps of a program of the weights kernel."""
    max_registers: int | None = None
    """Most registers of a thread of the stream kernel, None for the compiler's choice."""
    group: int = 4
    """Ring entries that a weights kernel with a decay per channel has under way at once."""


# upper ends of the row buckets; the last bucket is open
MAX_ROWS = (2, 16)
Buckets = tuple[Launch, Launch, Launch]

# one token, with a single ring entry and with several
PACKED: Buckets = (Launch(16, 2), Launch(16), Launch(16, 2))
TOKEN: Buckets = (Launch(16, 2, 4), Launch(32, 1, 4), Launch(32))
# with a decay per channel sums run over the threads of a program: those of one warp need no barrier
CHANNEL_TOKEN: Buckets = (Launch(16, 2, group=8), Launch(32, group=8), Launch(32))
# (most tokens of a window, is_per_channel) -> a launch per row bucket
WINDOWS: dict[tuple[int, bool], Buckets] = {
    (4, False): (
        Launch(16, 1, 4), Launch(16, max_registers=128), Launch(16, max_registers=128),
    ),
    (4, True): (Launch(16), Launch(16), Launch(16)),
    (8, False): (Launch(16), Launch(16), Launch(16)),
    (8, True): (Launch(16, 1, 4), Launch(16), Launch(16)),
    (16, False): (Launch(32, 2, 4), Launch(32, 2, 2), Launch(32, 2, 2)),
    (16, True): (Launch(32, 2, 4), Launch(32, 2, 2), Launch(32, 2)),
}  # fmt: skip
MATERIALIZE = Launch(32, 4, 4)


def launch_of(width: int, num_replayed: int, *, rows: int, is_per_channel: bool) -> Launch:
    """Return the settings for windows of `width` tokens, 1 to 16, and N = `num_replayed`."""
    if width == 1:
        several = CHANNEL_TOKEN if is_per_channel else TOKEN
        launches = PACKED if num_replayed == 1 else several
    else:
        most = min(most for most, _ in WINDOWS if width <= most)
        launches = WINDOWS[most, is_per_channel]
    return launches[sum(rows > most for most in MAX_ROWS)]
