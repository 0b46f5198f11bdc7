"""Which kernel serves a product of few rows, fixed per shape: nothing is tuned at run time.

Chosen with `python -m benchmarks.gpu.projections --sweep`, which prints the lines of `TABLE`.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Vector:
    """Settings of the vector kernel."""

    block_n: int
    """Weight rows of a program."""
    block_k: int
    """Columns of an iteration."""
    num_warps: int
    """Warps, of which each takes its own rows."""
    num_stages: int = 1
    """Iterations in flight; 1 loads each when its turn comes."""

    @property
    def step(self) -> int:
        """Columns of an iteration."""
        return self.block_k


@dataclass(frozen=True)
class Matrix:
    """Settings of the matrix kernel."""

    block_n: int
    """Weight rows of a program."""
    block_k: int
    """Columns of one slice of an iteration."""
    slices: int
    """Slices of an iteration, each a warp's."""
    num_stages: int
    """Iterations in flight."""

    @property
    def num_warps(self) -> int:
        """A warp for each slice: more would repeat products."""
        return self.slices

    @property
    def step(self) -> int:
        """Columns of an iteration."""
        return self.slices * self.block_k


@dataclass(frozen=True)
class Wide:
    """Settings of the wide kernel."""

    block_n: int
    """Weight rows of a program; from 64 on a group of four warps multiplies together."""
    block_k: int
    """Columns of an iteration."""
    num_stages: int
    """Iterations in flight."""
    num_warps: int = 4

    @property
    def step(self) -> int:
        """Columns of an iteration."""
        return self.block_k


Tile = Vector | Matrix | Wide

# upper ends of the row buckets; more rows go to the library
MAX_ROWS = (1, 4, 8, 16, 32, 64)

# (N, K) of 16-bit weights -> a tile per row bucket, None for the library
TABLE: dict[tuple[int, int], tuple[Tile | None, ...]] = {
    (12352, 2048): (
        Wide(64, 128, 4), Wide(64, 64, 6), Wide(64, 128, 4), None, Wide(64, 64, 6), None,
    ),
    (2048, 4096): (
        Vector(4, 2048, 4), Matrix(16, 128, 4, 5), Matrix(16, 128, 4, 5), Matrix(16, 128, 4, 5),
        None, None,
    ),
    (9216, 2048): (None, None, None, None, None, None),
    (1024, 2048): (
        Vector(4, 2048, 4), Vector(2, 1024, 2), Matrix(16, 128, 4, 5), Matrix(16, 64, 4, 5), None,
        None,
    ),
    (2048, 512): (
        Vector(8, 512, 8), Matrix(16, 128, 4, 5), Matrix(16, 128, 4, 5), Matrix(16, 64, 4, 5),
        Wide(64, 64, 6), None,
    ),
    (257, 2048): (
        Vector(4, 2048, 4), Vector(4, 512, 4, 4), Matrix(16, 128, 4, 5), Matrix(16, 128, 4, 5),
        Wide(64, 128, 4), None,
    ),
    (248320, 2048): (
        Wide(64, 128, 4), Wide(64, 128, 4), Wide(64, 128, 4), Wide(128, 128, 3), Wide(64, 128, 4),
        None,
    ),
}  # fmt: skip

# tiles of weights in float8 per row bucket, the fastest of (248320, 2048); half of it, a rank's
# part, is served as well within 5%
FLOAT8_TILES: tuple[Matrix | Wide, ...] = (
    Matrix(32, 128, 2, 5), Matrix(32, 128, 2, 5), Matrix(32, 128, 2, 5), Wide(64, 128, 4),
    Wide(64, 128, 4), Wide(128, 128, 4, 8),
)  # fmt: skip


def bucket_of(rows: int) -> int:
    """Return the row bucket that `rows` falls in, their number where it falls in none."""
    return bisect_left(MAX_ROWS, rows)


def tile_of(rows: int, size: int, inner: int, *, is_float8: bool = False) -> Tile | None:
    """Return how to multiply `rows` rows by a weight [size, inner], None for the library.

    There is none for more rows of a weight in float8: the one that it is a copy of is as fast.
    """
    bucket = bucket_of(rows)
    if rows == 0 or bucket == len(MAX_ROWS):
        return None
    if is_float8:
        return FLOAT8_TILES[bucket]
    found = TABLE.get((size, inner))
    return guess(rows, size, inner) if found is None else found[bucket]


def guess(rows: int, size: int, inner: int) -> Tile | None:
    """Choose for a shape that has not been measured, like the measured ones of its size."""
    if size * inner < 1 << 22:
        if rows == 1:
            return Vector(4, min(2048, 1 << (inner - 1).bit_length()), 4)
        return Matrix(16, 128, 4, 5) if rows <= 16 else None
    if size < 8192:
        return Matrix(16, 128, 4, 5) if rows <= 16 else None
    if rows > 32:
        return None
    return Wide(64, 128, 4) if rows <= 8 or size >= 1 << 16 else None
