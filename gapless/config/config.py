"""The settings of a running engine, and what they depend on of its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.config.switches import Switches
    from gapless.core.draft_shape import TreeShape


@dataclass(frozen=True)
class DeviceInfo:
    """What the engine needs to know about the device of one rank, measured by the caller."""

    kind: str  # "cpu" or "cuda"
    free_bytes: int
    num_threads: int
    converts_float8: bool = False
    """Whether it is a GPU with instructions for that."""


@dataclass(frozen=True)
class Config:
    """Every setting of a running engine, decided; nothing here changes afterwards."""

    device: str
    tp: int
    """Ranks; memory and threads are those of one."""
    dtype: str
    ssm_dtype: str
    max_model_len: int
    max_running_requests: int
    chunked_prefill_size: int
    page_size: int
    num_pages: int
    num_state_rows: int
    """Rows of running requests and of snapshots."""
    uses_prefix_cache: bool
    num_host_pages: int
    num_host_rows: int
    """Sizes of the cache's host tier; 0 pages: there is none."""
    max_queued_requests: int
    page_bytes: int
    """Bytes of one page; 0 without attention layers."""
    row_bytes: int
    """Bytes of one state row; 0 where a prefix is resumed from its pages alone."""
    replay_len: int  # L
    max_window: int  # W_max
    tree: TreeShape | None
    """How the drafts of a window branch; None: in a row."""
    num_threads: int
    drafter: str  # "none", "mtp" or "ngram"
    switches: Switches
    simulated_acceptance: float | None
    buckets: tuple[int, ...]
    """Batch sizes that decode steps are padded to, ascending; the last is max_running_requests."""
    prefill_buckets: tuple[int, ...]
    """Tokens that prefill chunks are padded to, ascending; longer ones are not."""
