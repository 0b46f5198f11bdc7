"""What running requests hold of pages and state rows, and what they leave to the prefix cache.

The only writer of `Request.pages`, `covered_len` and `state_row`. A request holds every page of
its table itself, shared ones too. Host integers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.cache.device import DeviceTier
from gapless.cache.pages import largest_reserved_len, num_pages_for, reserved_len
from gapless.cache.prefix import Match, PrefixCache
from gapless.cache.radix import RadixTree
from gapless.core.counters import CacheCounters, WaitReason
from gapless.core.plan import PageCopy, PageEntry, SlotSave, Snapshot

if TYPE_CHECKING:
    from collections.abc import Collection

    from gapless.cache.limits import CacheLimits
    from gapless.cache.radix import Node
    from gapless.core.request import Request


@dataclass(frozen=True)
class Admission:
    """What an admitted request found cached."""

    cached_len: int
    """Tokens that need no prefill."""
    resumed_row: int | None = None
    """The snapshot of that length."""
    page_copy: PageCopy | None = None
    """The cached prefix's last page, if it fills that in part."""


class CacheManager:
    """Gives pages and state rows to requests, and takes them back."""

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self._size = limits.page_size
        self.counters = CacheCounters()
        self._tree = RadixTree(limits.page_size)
        self.device = DeviceTier(self._tree, limits, self.counters)
        self.prefix = PrefixCache(self._tree, self.device, limits, self.counters)
        self._pages, self._rows = self.device.pages, self.device.rows
        # the deepest node that each request builds on, locked for it
        self._held: dict[Request, Node] = {}
        self._wanted: dict[Request, list[int]] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pages.num_free

    @property
    def num_free_rows(self) -> int:
        """State rows that nobody holds."""
        return self._rows.num_free

    def num_pages_at_limit(self, limit_len: int) -> int:
        """Pages that a request of this limit holds at its end: the most it ever needs."""
        return num_pages_for(self._largest_len(limit_len), self._size)

    def admit(self, request: Request, *, is_alone: bool) -> Admission | WaitReason:
        """Give a row, and pages for all its tokens and the steps after them; all or nothing.

        Args: is_alone: whether no other request holds anything; such a one is never refused for
        the sake of what is cached.
        """
        assert not request.pages, f"{request.request_id} holds pages"
        assert request.state_row < 0, f"{request.request_id} holds a state row"
        cold = Match(self._tree.root, 0, 0, 0)
        match = cold
        if self._limits.uses_prefix_cache and not request.has_private_prefix:
            # one token at least must run, for there to be logits
            match = self.prefix.match(request.token_ids[:-1])
        if match.soon_len >= match.usable_len + self._size:
            return WaitReason.PREFIX
        found = self._admit(request, match)
        if isinstance(found, WaitReason) and is_alone and match.usable_len:
            # what it matches is locked for it, and leaves too little for the rest
            found = self._admit(request, cold)
        return found

    def grow(self, request: Request, *, is_alone: bool) -> list[PageEntry] | None:
        """Give the pages that the next decode step needs; None, and no page, if too few are left.

        Up to `Request.covered_len` committed tokens nothing is missing. Returns the entries to add
        to the page table.
        """
        first, committed_len = len(request.pages), request.committed_len
        wanted = self._reserved_len(request, committed_len)
        missing = num_pages_for(wanted, self._size) - first
        if missing > 0 and not self.device.make_room(missing) and is_alone:
            # pages that it shares stay while it holds them; the rest of that key may go
            self.device.unlock(self._held.pop(request, self._tree.root))
            self.device.make_room(missing)
        pages = self._pages.allocate(max(0, missing))
        if pages is None:
            return None
        request.pages += pages
        self._cover(request, committed_len, wanted)
        return [PageEntry(request.slot, first + i, page) for i, page in enumerate(pages)]

    def take_snapshots(self, request: Request, start: int, end: int) -> tuple[Snapshot, ...]:
        """Decide what a prefill segment stores on its way, and cache it."""
        if not self._limits.uses_prefix_cache:
            return ()
        if not self._limits.needs_snapshots:
            self._cache_kv(request, end, is_written=False)
            return ()
        wanted = self._wanted.get(request, [])
        found: list[Snapshot] = []
        while wanted and wanted[0] <= end:
            position = wanted.pop(0)
            assert position > start, f"{request.request_id}: {position} is not in {start}..{end}"
            row = self.device.take_row()
            if row is None:
                self.counters.num_snapshots_skipped += 1
            elif self._store(request, position, row, is_written=False):
                found.append(Snapshot(position, row))
            else:
                self._rows.free(row)
        return tuple(found)

    def release(self, request: Request, position: int) -> SlotSave | None:
        """Take back everything that the request holds; the cache keeps its first tokens.

        Args: position: tokens whose state the slot still can give; 0: nothing is to be kept.

        Returns what the next step must save, before the slot gets a new owner.
        """
        save: SlotSave | None = None
        row = request.state_row
        if position and self._limits.uses_prefix_cache:
            if not self._limits.needs_snapshots:
                self._cache_kv(request, position, is_written=True)
            elif self._store(request, position, row, is_written=True):
                save = SlotSave(request.slot, position, row)
        if save is None:
            self._rows.free(row)
        self.device.unlock(self._held.pop(request, self._tree.root))
        self._wanted.pop(request, None)
        self._pages.release(request.pages)
        request.pages, request.state_row = [], -1
        return save

    def check_conserved(self, holders: Collection[Request]) -> None:
        """Assert that pages, rows and locks add up, `holders` being all who hold something."""
        held, rows = self.prefix.check_conserved(self._held.values())
        held.update(page for request in holders for page in request.pages)
        rows += [request.state_row for request in holders]
        for request in holders:
            assert len(set(request.pages)) == len(request.pages), f"{request}: a page twice"
        for page in range(self._pages.num_pages):
            wanted, found = held[page], self._pages.num_holders(page)
            assert wanted == found, f"page {page} has {found} holders, want {wanted}"
        assert len(set(rows)) == len(rows), f"a state row has two owners: {sorted(rows)}"
        assert len(rows) + self._rows.num_free == self._rows.size, "state rows were lost"
        assert self._held.keys() <= set(holders), "a lock outlived its request"

    def _admit(self, request: Request, match: Match) -> Admission | WaitReason:
        self.device.lock(match.node)
        # the row too: taking one for the request must not take that
        self.device.lock_row(match.node)
        row = self.device.take_row()
        num_shared = match.usable_len // self._size
        num_tokens = len(request.token_ids)
        wanted = self._reserved_len(request, num_tokens)
        missing = num_pages_for(wanted, self._size) - num_shared
        if row is None or not self.device.make_room(missing):
            if row is not None:
                self._rows.free(row)
            self.device.unlock_row(match.node)
            self.device.unlock(match.node)
            return WaitReason.ROWS if row is None else WaitReason.PAGES
        fresh = self._pages.allocate(missing)
        assert fresh is not None, "there is room for them"
        cached = self._tree.pages_of(match.node)
        self._pages.share(cached[:num_shared])
        request.pages, request.state_row = cached[:num_shared] + fresh, row
        self._cover(request, num_tokens, wanted)
        self._held[request] = match.node
        self._wanted[request] = self._wanted_snapshots(request, match)
        self._count(request, match)
        if not match.usable_len:
            return Admission(0)
        copy = None
        if match.usable_len % self._size:
            copy = PageCopy(cached[num_shared], fresh[0])
        resumed_row = match.node.row if self._limits.needs_snapshots else None
        return Admission(match.usable_len, resumed_row, copy)

    def _count(self, request: Request, match: Match) -> None:
        match.node.num_uses += 1
        if request.num_output == 0:
            request.cached_len = match.usable_len
        self.counters.num_tokens += len(request.token_ids)
        self.counters.num_cached_tokens += match.usable_len
        self.counters.num_admissions += 1
        self.counters.num_hits += match.usable_len > 0

    def _wanted_snapshots(self, request: Request, match: Match) -> list[int]:
        """Positions where a prompt's state will be wanted again, ascending."""
        prompt_len = len(request.prompt_ids)
        if not self._limits.needs_snapshots or len(request.token_ids) > prompt_len:
            return []  # one that was retracted has its own state cached
        wanted = set()
        if request.message_end is not None:
            wanted.add(request.message_end)
        if match.matched_len - match.usable_len >= self._size:
            wanted.add(match.matched_len)  # the second prompt that passes here
        last_page = (prompt_len - 1) // self._size * self._size
        if all(position < last_page for position in wanted):
            wanted.add(last_page)
        return sorted(p for p in wanted if match.usable_len < p < prompt_len)

    def _store(self, request: Request, position: int, row: int, *, is_written: bool) -> bool:
        """Cache a request's first `position` tokens with a snapshot; False if there is one."""
        held = self._held.get(request, self._tree.root)
        tokens = request.token_ids[:position]
        self._held[request], takes_row = self.prefix.store(
            tokens, request.pages, held, row, is_written=is_written
        )
        return takes_row

    def _cache_kv(self, request: Request, length: int, *, is_written: bool) -> None:
        """Cache the full pages of a request's first `length` tokens."""
        tokens = request.token_ids[: length // self._size * self._size]
        if tokens:
            held = self._held.get(request, self._tree.root)
            self._held[request], _ = self.prefix.store(
                tokens, request.pages, held, None, is_written=is_written
            )

    def _cover(self, request: Request, committed_len: int, wanted: int) -> None:
        """Note how far pages go of which a step at `committed_len` wants `wanted` tokens."""
        # each committed token more wants one more at most
        request.covered_len = committed_len + len(request.pages) * self._size - wanted

    def _reserved_len(self, request: Request, committed_len: int) -> int:
        limits = self._limits
        return reserved_len(committed_len, limits.max_window, request.limit_len, limits.tree)

    def _largest_len(self, limit_len: int) -> int:
        return largest_reserved_len(self._limits.max_window, limit_len, self._limits.tree)
