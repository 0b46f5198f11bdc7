"""How the kernels of latent attention are cut and launched: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.mla --quick` and `--sweep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.ops.paged_attention.triton import MIN_ROWS, PrefillTiling

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class LatentTiling:
    """How a window is cut into programs; splits and block_n decide the order of sums.

    A split costs a partial result of 4 * queries * R bytes, written and read. Short rows are cut
    into `few_splits`, which pays since a step of few short rows leaves most of a GPU idle; from
    `few_splits` times `full_split` positions on, more splits come instead of longer ones, up to
    `max_splits`. A row's length alone decides. Splits end at multiples of 64 positions.
    """

    min_split: int
    """Positions of the shortest split, a multiple of 64."""
    few_splits: int
    """Splits of a short row, a power of two."""
    full_split: int
    """Positions of a split, a multiple of 64, at which a row gets more of them."""
    max_splits: int
    """Most splits, a power of two."""
    block_m: int
    """Queries of a program: window tokens times heads."""
    block_n: int
    """Positions of an iteration."""
    num_warps: int
    num_stages: int
    """Iterations in flight, or 1 to load each when its turn comes."""
    max_registers: int | None = None
    """Most registers of a thread, None for the compiler's choice."""

    def most_splits(self, length: int) -> int:
        """Return the most splits that a row of up to `length` positions has."""
        longer = max(self.few_splits, min(self.max_splits, -(-length // self.full_split)))
        return max(1, min(longer, -(-length // self.min_split)))


# for windows of up to this many queries, in ascending order
WINDOWS: Mapping[int, LatentTiling] = {
    MIN_ROWS: LatentTiling(64, 16, 256, 64, 16, 32, 4, 3),
    # for more, in programs of 64
    1 << 30: LatentTiling(64, 8, 512, 32, 64, 32, 8, 3),
}
FLOAT32_WINDOW = LatentTiling(256, 32, 512, 32, 16, 16, 8, 1)
PREFILL = PrefillTiling(64, 32, 8, 3)
FLOAT32_PREFILL = PrefillTiling(16, 16, 8, 1)


def window_tiling(queries: int, dtype: torch.dtype) -> LatentTiling:
    """Choose from what is constant while an engine runs.

    Args: queries: window tokens times heads.
    """
    if dtype == torch.float32:
        return FLOAT32_WINDOW
    return next(tiling for most, tiling in WINDOWS.items() if queries <= most)


def prefill_tiling(dtype: torch.dtype) -> PrefillTiling:
    """Choose how a prefill chunk is cut; block_m counts tokens times heads."""
    return FLOAT32_PREFILL if dtype == torch.float32 else PREFILL
