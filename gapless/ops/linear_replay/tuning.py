"""Launch settings of the replay kernels, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.linear_replay --sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched."""

    block_v: int
    """BV: value channels read at a time."""
    run_v: int
    """Value channels of a program, a multiple of block_v."""
    num_stages: int
    """Blocks of a run in flight; 1 for a run of one block."""
    num_warps: int = 4
    max_registers: int | None = None
    """Most registers of a thread, None for the compiler's choice."""

    def clipped(self, value_dim: int) -> Launch:
        """Return the same for heads of at most `value_dim` channels."""
        block_v, run_v = min(self.block_v, value_dim), min(self.run_v, value_dim)
        return Launch(block_v, run_v, self.num_stages, self.num_warps, self.max_registers)


# upper ends of the row buckets; the last bucket is open
MAX_ROWS = (2, 16)

# (kernel, is_per_channel, bytes of a state element) -> a launch per row bucket
TABLE: dict[tuple[str, bool, int], tuple[Launch, Launch, Launch]] = {
    ("packed", False, 4): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(32, 32, 1)),
    ("packed", False, 2): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(64, 64, 1)),
    ("packed", True, 4): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(32, 32, 1)),
    ("packed", True, 2): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(64, 64, 1)),
    ("decode", False, 4): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(32, 128, 4)),
    ("decode", False, 2): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(32, 128, 4)),
    ("decode", True, 4): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(32, 128, 4)),
    ("decode", True, 2): (Launch(16, 16, 1), Launch(32, 32, 1), Launch(32, 128, 4)),
    ("window", False, 4): (Launch(32, 32, 1), Launch(32, 64, 2, 2), Launch(32, 128, 3, 2)),
    ("window", False, 2): (Launch(32, 32, 1), Launch(32, 64, 2, 2), Launch(32, 128, 3, 2)),
    ("window", True, 4): (Launch(32, 32, 1), Launch(64, 128, 2), Launch(64, 128, 2)),
    ("window", True, 2): (Launch(32, 32, 1), Launch(64, 128, 2), Launch(64, 128, 2)),
}
MATERIALIZE = Launch(32, 32, 1)


def kernel_of(width: int, num_replayed: int) -> str:
    """Return which kernel serves windows of `width` with N = `num_replayed`."""
    if width > 1:
        return "window"
    return "packed" if num_replayed == 1 else "decode"


def launch_of(kernel: str, *, rows: int, is_per_channel: bool, state_bytes: int) -> Launch:
    """Return the settings of a kernel for a batch of `rows` rows."""
    bucket = sum(rows > most for most in MAX_ROWS)
    return TABLE[kernel, is_per_channel, state_bytes][bucket]
