"""Sizes that steps are padded to, so that few graphs serve all of them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFILL_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def batch_buckets(max_running: int) -> tuple[int, ...]:
    """Batch sizes to pad decode steps to: 1, 2, 4, every 8 up to 64, then every 16."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_running, 16)]
    return (*(size for size in sizes if size < max_running), max_running)


def prefill_buckets(device: str, chunked_prefill_size: int) -> tuple[int, ...]:
    """Tokens to pad prefill chunks to: on a GPU powers of two, as far as launches may take longer
    than the work; on a CPU none, where padding is work and launches are nothing."""
    if device == "cpu":
        return ()
    longest = min(chunked_prefill_size, PREFILL_BUCKETS[-1])
    return (*(size for size in PREFILL_BUCKETS if size < longest), longest)


def bucket_for(count: int, buckets: Sequence[int]) -> int:
    """Return the smallest of some ascending sizes that holds `count`."""
    return buckets[bisect_left(buckets, count)]
