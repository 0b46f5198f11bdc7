"""What a running request holds of the two kinds of memory: KV pages and one state row.

The only writer of `Request.pages` and `Request.state_row`. Host integers only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.cache.pages import PagePool, largest_reserved_len, num_pages_for, reserved_len
from gapless.cache.rows import IdPool
from gapless.core.plan import PageEntry

if TYPE_CHECKING:
    from collections.abc import Collection

    from gapless.core.request import Request


class CacheManager:
    """Gives pages and state rows to requests, and takes them back."""

    def __init__(
        self, *, num_pages: int, page_size: int, num_state_rows: int, max_window: int
    ) -> None:
        self._pages = PagePool(num_pages)
        self._rows = IdPool(num_state_rows)
        self._page_size = page_size
        self._max_window = max_window

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return self._pages.num_free

    @property
    def num_free_rows(self) -> int:
        """State rows that no request holds."""
        return self._rows.num_free

    def num_pages_at_limit(self, limit_len: int) -> int:
        """Pages that a request of this limit holds at its end: the most it ever needs."""
        return num_pages_for(largest_reserved_len(self._max_window, limit_len), self._page_size)

    def admit(self, request: Request) -> bool:
        """Give a row, and pages for all its tokens and the steps after them; all or nothing."""
        assert not request.pages, f"{request.request_id} holds pages"
        assert request.state_row < 0, f"{request.request_id} holds a state row"
        if self._rows.num_free == 0:
            return False
        pages = self._pages.allocate(self._num_pages(request, len(request.token_ids)))
        if pages is None:
            return False
        row = self._rows.allocate()
        assert row is not None, "a row was free above"
        request.pages, request.state_row = pages, row
        return True

    def grow(self, request: Request, committed_len: int) -> list[PageEntry] | None:
        """Give the pages that the next decode step needs; None, and no page, if too few are free.

        `committed_len` is what the host has read. Returns the entries to add to the page table.
        """
        first = len(request.pages)
        missing = self._num_pages(request, committed_len) - first
        pages = self._pages.allocate(max(0, missing))
        if pages is None:
            return None
        request.pages += pages
        return [PageEntry(request.slot, first + i, page) for i, page in enumerate(pages)]

    def release(self, request: Request) -> None:
        """Take back everything that the request holds."""
        self._pages.release(request.pages)
        self._rows.free(request.state_row)
        request.pages, request.state_row = [], -1

    def check_conserved(self, holders: Collection[Request]) -> None:
        """Assert that each page and row is either free or held by exactly one of `holders`."""
        pages = [page for request in holders for page in request.pages]
        rows = [request.state_row for request in holders]
        assert len(set(pages)) == len(pages), f"a page has two owners: {sorted(pages)}"
        assert len(set(rows)) == len(rows), f"a state row has two owners: {sorted(rows)}"
        assert len(pages) + self._pages.num_free == self._pages.num_pages, "pages were lost"
        assert len(rows) + self._rows.num_free == self._rows.size, "state rows were lost"

    def _num_pages(self, request: Request, committed_len: int) -> int:
        tokens = reserved_len(committed_len, self._max_window, request.limit_len)
        return num_pages_for(tokens, self._page_size)
