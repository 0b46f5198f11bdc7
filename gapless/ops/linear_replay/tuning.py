"""Launch settings of the replay kernels, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.linear_replay --sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """How the two kernels of a window are launched."""

    block_v: int
    """BV: value channels of a program of the stream kernel."""
    num_warps: int
    """Warps of such a program."""
    weights_warps: int
    """Warps of a program of the weights kernel."""
    has_dots: bool = False
    """Whether the stream kernel multiplies on matrix units."""
    max_registers: int | None = None
    """Most registers of a thread of the stream kernel, None for the compiler's choice."""


# upper ends of the row buckets; the last bucket is open
MAX_ROWS = (2, 16)

# (kernel, is_per_channel, bytes of a state element) -> a launch per row bucket
_TOKEN = (Launch(16, 2, 4), Launch(32, 1, 4), Launch(32, 1, 1))
_WINDOW = (
    Launch(16, 2, 4, has_dots=True),
    Launch(32, 2, 4, has_dots=True),
    Launch(32, 2, 4, has_dots=True),
)
_WIDE = (
    Launch(32, 4, 8, has_dots=True),
    Launch(32, 2, 8, has_dots=True),
    Launch(32, 2, 4, has_dots=True),
)
TABLE: dict[tuple[str, bool, int], tuple[Launch, Launch, Launch]] = {
    ("packed", False, 4): (Launch(16, 2, 1), Launch(32, 1, 1), Launch(32, 1, 1)),
    ("packed", False, 2): (Launch(16, 2, 1), Launch(32, 1, 1), Launch(32, 1, 1)),
    ("packed", True, 4): (Launch(16, 2, 1), Launch(32, 1, 1), Launch(32, 1, 1)),
    ("packed", True, 2): (Launch(16, 2, 1), Launch(32, 1, 1), Launch(32, 1, 1)),
    ("token", False, 4): _TOKEN,
    ("token", False, 2): _TOKEN,
    ("token", True, 4): _TOKEN,
    ("token", True, 2): _TOKEN,
    ("window", False, 4): _WINDOW,
    ("window", False, 2): _WINDOW,
    ("window", True, 4): _WINDOW,
    ("window", True, 2): _WINDOW,
    ("wide", False, 4): _WIDE,
    ("wide", False, 2): _WIDE,
    ("wide", True, 4): _WIDE,
    ("wide", True, 2): _WIDE,
}
MATERIALIZE = Launch(32, 4, 4)
# most tokens of a window whose columns are summed one by one
MAX_NARROW = 4


def kernel_of(width: int, num_replayed: int) -> str:
    """Return which settings serve windows of `width` with N = `num_replayed`."""
    if width > 1:
        return "window" if width <= MAX_NARROW else "wide"
    return "packed" if num_replayed == 1 else "token"


def launch_of(kernel: str, *, rows: int, is_per_channel: bool, state_bytes: int) -> Launch:
    """Return the settings of a kernel for a batch of `rows` rows."""
    bucket = sum(rows > most for most in MAX_ROWS)
    return TABLE[kernel, is_per_channel, state_bytes][bucket]
