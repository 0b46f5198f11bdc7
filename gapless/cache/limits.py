"""Sizes of the memory that requests and the prefix cache share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gapless.core.draft_shape import TreeShape


@dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """Sizes of the pools, and what the prefix cache may do with them."""

    num_pages: int
    """Pages, the null page apart."""
    page_size: int
    """Tokens per page."""
    num_state_rows: int
    """Rows of the state pool, the null row apart."""
    max_window: int
    """Tokens that a decode step verifies per row: the newest one and its drafts."""
    tree: TreeShape | None = None
    """How the drafts of a window branch; None: in a row."""
    uses_prefix_cache: bool = True
    needs_snapshots: bool = True
    """Whether a prefix can be resumed at snapshots only, and not wherever its KV lies."""
    page_bytes: int = 1
    row_bytes: int = 1
    """Bytes of a page and of a state row: what evicting them gives back."""
    num_host_pages: int = 0
    num_host_rows: int = 0
    """Sizes of the host tier; without pages there is none."""
