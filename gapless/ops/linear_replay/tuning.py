"""Launch settings of the replay kernels, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.linear_replay --sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched."""

    block_v: int
    """BV: value channels read at a time."""
    run_v: int
    """Value channels of a program, a multiple of block_v."""
    num_warps: int = 1
    """With one in a window of several tokens, no state passes through shared memory."""
    max_registers: int | None = None
    """Most registers of a thread, None for the compiler's choice."""
    num_stages: int = 1
    """Blocks of a run in flight through shared memory; 1 for a run of one block."""

    def clipped(self, value_dim: int) -> Launch:
        """Return the same for heads of at most `value_dim` channels."""
        block_v, run_v = min(self.block_v, value_dim), min(self.run_v, value_dim)
        return replace(self, block_v=block_v, run_v=run_v)


# upper ends of the row buckets; the last bucket is open
MAX_ROWS = (2, 16)

_WIDE_SHARED = (Launch(32, 64, 2, None, 2), Launch(32, 128, 2, None, 3))
_WIDE_OWN = (Launch(64, 128, 4, None, 2), Launch(64, 128, 4, None, 2))
# (kernel, is_per_channel, bytes of a state element) -> a launch per row bucket
TABLE: dict[tuple[str, bool, int], tuple[Launch, Launch, Launch]] = {
    ("packed", False, 4): (Launch(16, 16, 4), Launch(128, 128, 8), Launch(32, 128, 4, None, 3)),
    ("packed", False, 2): (Launch(16, 16, 4), Launch(64, 64, 4), Launch(32, 128, 4, None, 3)),
    ("packed", True, 4): (
        Launch(64, 64, 8),
        Launch(32, 128, 4, None, 3),
        Launch(32, 128, 4, None, 3),
    ),
    ("packed", True, 2): (Launch(8, 8), Launch(8, 8), Launch(16, 128, 4, None, 4)),
    ("decode", False, 4): (
        Launch(32, 32, 4),
        Launch(32, 64, 4, None, 2),
        Launch(64, 128, 4, None, 2),
    ),
    ("decode", False, 2): (Launch(32, 32, 4), Launch(32, 32, 4), Launch(32, 128, 2, None, 3)),
    ("decode", True, 4): (
        Launch(16, 16, 4),
        Launch(32, 64, 4, None, 2),
        Launch(16, 128, 4, None, 4),
    ),
    ("decode", True, 2): (
        Launch(32, 32, 4),
        Launch(64, 128, 4, None, 2),
        Launch(32, 128, 2, None, 3),
    ),
    ("window", False, 4): (Launch(16, 16), Launch(32, 32), Launch(32, 64, 1, 168)),
    ("window", False, 2): (Launch(16, 16), Launch(32, 32), Launch(32, 64, 1, 168)),
    ("window", True, 4): (Launch(16, 16), Launch(32, 32), Launch(32, 128)),
    ("window", True, 2): (Launch(16, 16), Launch(32, 32), Launch(32, 128)),
    ("wide", False, 4): (Launch(32, 32, 4), *_WIDE_SHARED),
    ("wide", False, 2): (Launch(32, 32, 4), *_WIDE_SHARED),
    ("wide", True, 4): (Launch(32, 32, 4), *_WIDE_OWN),
    ("wide", True, 2): (Launch(32, 32, 4), *_WIDE_OWN),
}
MATERIALIZE = Launch(32, 32, 4)
# most tokens of a window that one warp holds
MAX_NARROW = 4


def kernel_of(width: int, num_replayed: int) -> str:
    """Return which kernel serves windows of `width` with N = `num_replayed`."""
    if width > 1:
        return "window" if width <= MAX_NARROW else "wide"
    return "packed" if num_replayed == 1 else "decode"


def launch_of(kernel: str, *, rows: int, is_per_channel: bool, state_bytes: int) -> Launch:
    """Return the settings of a kernel for a batch of `rows` rows."""
    bucket = sum(rows > most for most in MAX_ROWS)
    return TABLE[kernel, is_per_channel, state_bytes][bucket]
