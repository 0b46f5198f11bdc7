"""Launch settings of the replay kernels, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.linear_replay --sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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


@dataclass(frozen=True)
class WindowLaunch:
    """How the two kernels of `window_kernels.py` are launched."""

    block_v: int
    """BV: value channels of a program of the stream kernel."""
    num_warps: int = 1
    """Warps of such a program; with one no state passes through shared memory."""
    weights_warps: int = 1
    """Warps of a program of the weights kernel."""
    weights_registers: int | None = None
    """Most registers of a thread of the weights kernel, None for the compiler's choice."""
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


@dataclass(frozen=True)
class ChainLaunch:
    """How the kernel of chains is launched."""

    block_v: int
    """BV: value channels read at a time."""
    run_v: int
    """Value channels of a program, a multiple of block_v."""
    num_warps: int = 1
    """With one no state passes through shared memory."""
    max_registers: int | None = None
    """Most registers of a thread, None for the compiler's choice."""
    num_stages: int = 1
    """Blocks of a run in flight through shared memory; 1 for a run of one block."""

    def clipped(self, value_dim: int) -> ChainLaunch:
        """Return the same for heads of at most `value_dim` channels."""
        block_v, run_v = min(self.block_v, value_dim), min(self.run_v, value_dim)
        return replace(self, block_v=block_v, run_v=run_v)


# (whether windows are narrow, is_per_channel) -> a launch per row bucket
CHAINS: dict[tuple[bool, bool], tuple[ChainLaunch, ChainLaunch, ChainLaunch]] = {
    (True, False): (ChainLaunch(16, 16), ChainLaunch(32, 32), ChainLaunch(32, 64, 1, 168)),
    (True, True): (ChainLaunch(16, 16), ChainLaunch(32, 32), ChainLaunch(32, 128)),
    (False, False): (
        ChainLaunch(32, 32, 4), ChainLaunch(32, 64, 2, None, 2), ChainLaunch(32, 128, 2, None, 3),
    ),
    (False, True): (
        ChainLaunch(32, 32, 4), ChainLaunch(64, 128, 4, None, 2), ChainLaunch(64, 128, 4, None, 2),
    ),
}  # fmt: skip
# most tokens of a window whose columns are summed one by one
MAX_NARROW = 4


# (most tokens of a window, is_per_channel) -> a launch per row bucket
WINDOWS: dict[tuple[int, bool], tuple[WindowLaunch, WindowLaunch, WindowLaunch]] = {
    (4, False): (
        WindowLaunch(16, 1, 4),
        WindowLaunch(16, max_registers=128),
        WindowLaunch(16, max_registers=128),
    ),
    (4, True): (WindowLaunch(16, 1, 4), WindowLaunch(16, 1, 2), WindowLaunch(16)),
    (8, False): (WindowLaunch(16), WindowLaunch(16), WindowLaunch(16)),
    (8, True): (WindowLaunch(16, 1, 4), WindowLaunch(16, 1, 2), WindowLaunch(16, 1, 2)),
    (16, False): (WindowLaunch(32, 2, 4), WindowLaunch(32, 2, 2), WindowLaunch(32, 2, 2)),
    (16, True): (WindowLaunch(32, 2, 8), WindowLaunch(32, 2, 4), WindowLaunch(32, 2, 4)),
}


def window_launch_of(width: int, *, rows: int, is_per_channel: bool) -> WindowLaunch:
    """Return the settings for windows of `width` tokens, 2 to 16, of `rows` rows."""
    most = min(most for most, _ in WINDOWS if width <= most)
    return WINDOWS[most, is_per_channel][sum(rows > most for most in MAX_ROWS)]


def kernel_of(width: int, num_replayed: int) -> str:
    """Return which settings serve windows of `width` with N = `num_replayed`."""
    if width > 1:
        return "window" if width <= MAX_NARROW else "wide"
    return "packed" if num_replayed == 1 else "token"


def launch_of(kernel: str, *, rows: int, is_per_channel: bool, state_bytes: int) -> Launch:
    """Return the settings of a kernel for a batch of `rows` rows."""
    bucket = sum(rows > most for most in MAX_ROWS)
    return TABLE[kernel, is_per_channel, state_bytes][bucket]


def chain_launch_of(width: int, *, rows: int, is_per_channel: bool) -> ChainLaunch:
    """Return the settings of the kernel of chains for windows of `width` tokens of `rows` rows."""
    return CHAINS[width <= MAX_NARROW, is_per_channel][sum(rows > most for most in MAX_ROWS)]
