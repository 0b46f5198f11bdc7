"""Pages of KV: how many a request needs at a step, and which ones are free.

Pages change owner in compute-stream order: a page released here may be handed out again at
once, since the step that still writes it was launched before the step of its next owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.draft_shape import draft_reach, most_emitted, step_reach

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gapless.core.draft_shape import TreeShape


def num_pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold the positions `0 .. tokens - 1`."""
    return -(-tokens // page_size)


def reserved_len(
    committed_len: int, max_window: int, limit_len: int, tree: TreeShape | None = None
) -> int:
    """Tokens whose pages must exist before a decode step is launched.

    With c the committed length that the host has read, W the window, E the most tokens that a step
    emits, F how far the draft passes reach past the newest token, q the device's committed length
    when the step starts and q' when it has accepted:

    - one step may be unread: `q <= c + E`, and `q' <= q + E`
    - verify writes positions up to `q + W - 1`, extend up to `q'`, and the draft passes, the
      first of which is extend's, up to `q' + F`

    so `c + max(E + W, 2E + F + 1)` tokens: for a chain, where E is W and F is W - 2, `c + 3W - 1`.
    Near the limit a row that runs has at most `limit_len - 1` tokens, so `q <= limit_len - 2`:
    verify ends at `limit_len + W - 3`; accept emits nothing past the limit, so extend ends at
    `limit_len - 1` (W > 1 only); a row that drafts is not done, so its drafts end at
    `limit_len - 2 + F`. No request touches more than `limit_len + max(W - 2, F - 1)` tokens: for
    W = 1 that is `limit_len - 1`, its last committed length.

    `committed_len` is below `limit_len`. All counts are tokens.
    """
    emitted = most_emitted(max_window, tree)
    reach = emitted + step_reach(max_window, tree)
    return min(committed_len + reach, largest_reserved_len(max_window, limit_len, tree))


def largest_reserved_len(max_window: int, limit_len: int, tree: TreeShape | None = None) -> int:
    """The value that `reserved_len` reaches at the end of a request; derivation there."""
    return limit_len + max(max_window - 2, draft_reach(max_window, tree) - 1)


class PagePool:
    """The pages `0 .. num_pages - 1`; the null page, id `num_pages`, is never handed out.

    A page may be held several times: by requests and by nodes of the prefix cache. It is free when
    nobody holds it.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def num_holders(self, page: int) -> int:
        """How often a page is held."""
        return self._num_holders[page]

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` free pages, held once each, or none of them if fewer are free."""
        assert count >= 0, f"cannot allocate {count} pages"
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more that somebody holds already."""
        for page in pages:
            assert self._num_holders[page] > 0, f"page {page} is shared and held by nobody"
            self._num_holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Hold pages once less."""
        for page in pages:
            assert 0 <= page < self.num_pages, f"page {page} is not one of {self.num_pages}"
            assert self._num_holders[page] > 0, f"page {page} is released twice"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                self._free.append(page)
