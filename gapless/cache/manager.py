"""What requests hold of pages and state rows, what the prefix cache keeps, and who yields to whom.

The only writer of `Request.pages` and `Request.state_row`. Host integers only.

A request holds every page of its table itself, shared ones too. The tree holds pages and rows of
its own, with two kinds of locks: one on every node of a key that a request builds on, so that
nothing is evicted there in vain, and one on the row that a planned step reads or writes, until
the next step is planned: from then on the stream's order protects it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.cache.eviction import EvictionOrder
from gapless.cache.host import HostTier
from gapless.cache.pages import PagePool, largest_reserved_len, num_pages_for, reserved_len
from gapless.cache.radix import Node, RadixTree, Walk
from gapless.cache.rows import IdPool
from gapless.core.counters import CacheCounters, WaitReason
from gapless.core.plan import PageCopy, PageEntry, SlotSave, Snapshot, Transfer

if TYPE_CHECKING:
    from collections.abc import Collection

    from gapless.core.request import Request


@dataclass(frozen=True, kw_only=True)
class CacheLimits:
    """Sizes of the pools, and what the prefix cache may do with them."""

    num_pages: int
    page_size: int
    num_state_rows: int
    max_window: int
    uses_prefix_cache: bool = True
    needs_snapshots: bool = True
    """Whether a prefix can be resumed at snapshots only, and not wherever its KV lies."""
    page_bytes: int = 1
    row_bytes: int = 1
    num_host_pages: int = 0
    num_host_rows: int = 0
    """The host tier; without pages there is none."""


@dataclass(frozen=True)
class Admission:
    """What an admitted request found cached."""

    cached_len: int
    """Tokens that need no prefill."""
    resumed_row: int | None = None
    """The snapshot of that length."""
    page_copy: PageCopy | None = None
    """The cached prefix's last page, if it fills that in part."""


@dataclass(frozen=True)
class _Match:
    """The deepest usable prefix of a request."""

    node: Node
    usable_len: int
    matched_len: int
    """Tokens in common with the tree, usable or not."""
    soon_len: int
    """What will be usable once the step being planned has been launched."""


class CacheManager:
    """Gives pages and state rows to requests, and takes them back into the prefix cache."""

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self._size = limits.page_size
        self._pages = PagePool(limits.num_pages)
        self._rows = IdPool(limits.num_state_rows)
        self._tree = RadixTree(limits.page_size)
        self._snapshots = EvictionOrder(self._worth_of_row)
        self._leaves = EvictionOrder(self._worth_of_leaf)
        self._held: dict[Request, Node] = {}
        self._wanted: dict[Request, list[int]] = {}
        self._locked_rows: list[Node] = []
        self._host: HostTier | None = None
        if limits.num_host_pages:
            self._host = HostTier(
                self._tree,
                num_pages=limits.num_host_pages,
                num_rows=limits.num_host_rows,
                worth=self._worth_of_copy,
            )
        self._unstored: list[Node] = []
        self._loads: list[Transfer] = []
        self._step = 0
        self.counters = CacheCounters()

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pages.num_free

    @property
    def num_free_rows(self) -> int:
        """State rows that nobody holds."""
        return self._rows.num_free

    @property
    def num_nodes(self) -> int:
        """Nodes of the prefix cache."""
        return self._tree.num_nodes

    @property
    def num_stores_under_way(self) -> int:
        """Copies to the host that have not arrived."""
        return 0 if self._host is None else len(self._host.storing)

    def num_pages_at_limit(self, limit_len: int) -> int:
        """Pages that a request of this limit holds at its end: the most it ever needs."""
        return num_pages_for(largest_reserved_len(self._limits.max_window, limit_len), self._size)

    def begin_step(self) -> None:
        """Start planning a step: what the one before reads and writes needs no lock any more."""
        self._step += 1
        for node in self._locked_rows:
            node.num_row_locks -= 1
            self._settle(node)
        self._locked_rows.clear()

    def begin_stores(self) -> tuple[Transfer, ...]:
        """Plan the copies to the host of what earlier steps, and this one's saves, have cached."""
        if self._host is None:
            return ()
        nodes, self._unstored = self._unstored, []
        transfers = []
        for node in nodes:
            if node.stored_at == self._step:
                self._unstored.append(node)  # its prefill comes later in this step
                continue
            if not node.is_warm:
                continue
            transfer = self._host.begin_store(node, self._forget_copy)
            if transfer is None:
                continue
            self._lock(node)
            node.num_row_locks += 1
            self._settle(node)
            transfers.append(transfer)
            self.counters.num_stores += 1
        return tuple(transfers)

    def end_stores(self, num_stored: int) -> None:
        """Take note of the copies that have arrived, `num_stored` since the start."""
        if self._host is None:
            return
        for node in self._host.arrived(num_stored):
            node.num_row_locks -= 1
            self._unlock(node)

    def take_loads(self) -> tuple[Transfer, ...]:
        """Return the copies from the host that the admissions of this step need."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def admit(self, request: Request, *, is_alone: bool) -> Admission | WaitReason:
        """Give a row, and pages for all its tokens and the steps after them; all or nothing.

        Args: is_alone: whether no other request holds anything; such a one is never refused.
        """
        assert not request.pages, f"{request.request_id} holds pages"
        assert request.state_row < 0, f"{request.request_id} holds a state row"
        self._load(request)
        match = self._match(request)
        if match.soon_len >= match.usable_len + self._size:
            return WaitReason.PREFIX
        found = self._admit(request, match)
        if isinstance(found, WaitReason) and is_alone and match.usable_len:
            # what it matches is locked for it, and leaves too little for the rest
            found = self._admit(request, _Match(self._tree.root, 0, match.matched_len, 0))
        return found

    def grow(
        self, request: Request, committed_len: int, *, is_alone: bool
    ) -> list[PageEntry] | None:
        """Give the pages that the next decode step needs; None, and no page, if too few are left.

        `committed_len` is what the host has read. Returns the entries to add to the page table.
        """
        first = len(request.pages)
        missing = max(0, self._num_pages(request, committed_len) - first)
        if not self._make_room(missing) and is_alone:
            # pages that it shares stay while it holds them; the rest of that key may go
            self._unlock(self._held.pop(request, self._tree.root))
            self._make_room(missing)
        pages = self._pages.allocate(missing)
        if pages is None:
            return None
        request.pages += pages
        return [PageEntry(request.slot, first + i, page) for i, page in enumerate(pages)]

    def take_snapshots(self, request: Request, start: int, end: int) -> tuple[Snapshot, ...]:
        """Decide what a prefill segment stores on its way, and cache it."""
        if not self._limits.uses_prefix_cache:
            return ()
        if not self._limits.needs_snapshots:
            self._cache_kv(request, end, self._step)
            return ()
        wanted = self._wanted.get(request, [])
        found: list[Snapshot] = []
        while wanted and wanted[0] <= end:
            position = wanted.pop(0)
            assert position > start, f"{request.request_id}: {position} is not in {start}..{end}"
            row = self._take_row()
            if row is None:
                self.counters.num_snapshots_skipped += 1
            elif self._store(request, position, row, self._step):
                self._lock_row(self._held[request])
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
            # usable at once, and for whoever needs the row: saves come first in a step
            if not self._limits.needs_snapshots:
                self._cache_kv(request, position, self._step - 1)
            elif self._store(request, position, row, self._step - 1):
                save = SlotSave(request.slot, position, row)
        if save is None:
            self._rows.free(row)
        self._unlock(self._held.pop(request, self._tree.root))
        self._wanted.pop(request, None)
        self._pages.release(request.pages)
        request.pages, request.state_row = [], -1
        return save

    def flush(self) -> int:
        """Drop what no request builds on and no planned step reads; returns the tokens dropped."""
        before = self._num_cached_tokens()
        if self._host is not None:
            self._host.drop_all(self._forget_copy)
        while (leaf := self._leaves.pop()) is not None:
            self._remove(leaf)
        return before - self._num_cached_tokens()

    def check_conserved(self, holders: Collection[Request]) -> None:
        """Assert that pages, rows and locks add up, `holders` being all who hold something."""
        held = Counter(page for request in holders for page in request.pages)
        rows = [request.state_row for request in holders]
        for request in holders:
            assert len(set(request.pages)) == len(request.pages), f"{request}: a page twice"
        num_locks: dict[Node, int] = {}
        storing = self._host.storing if self._host is not None else []
        for node in (*self._held.values(), *storing):
            for part in node.path():
                num_locks[part] = num_locks.get(part, 0) + 1
        for node in self._tree.nodes():
            self._check_node(node, num_locks.get(node, 0), storing.count(node))
            held.update(node.pages)
            if node.has_row:
                rows.append(node.row)
        for page in range(self._pages.num_pages):
            wanted, found = held[page], self._pages.num_holders(page)
            assert wanted == found, f"page {page} has {found} holders, want {wanted}"
        assert len(set(rows)) == len(rows), f"a state row has two owners: {sorted(rows)}"
        assert len(rows) + self._rows.num_free == self._rows.size, "state rows were lost"
        assert self._held.keys() <= set(holders), "a lock outlived its request"
        if self._host is not None:
            self._host.check_conserved(list(self._tree.nodes()))

    def _check_node(self, node: Node, num_locks: int, num_stores: int) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children[node.edge[0]] is node, "a child is filed wrongly"
        assert parent.end == node.start < node.end == node.start + len(node.edge), "a gap in a key"
        if node.is_warm:
            assert len(node.pages) == len(self._tree.own_pages(node, range(9**9))), "pages"
            assert parent.is_warm or parent.parent is None, "a warm node hangs from a cold one"
        else:
            assert node.host_pages, "KV that is nowhere"
            assert not node.has_row, "a snapshot of a cold node"
        assert node.num_warm_children == sum(c.is_warm for c in node.children.values()), "warm"
        assert node.num_locks == num_locks, f"{node.num_locks} locks, want {num_locks}"
        num_row_locks = num_stores + sum(locked is node for locked in self._locked_rows)
        assert node.num_row_locks == num_row_locks, f"{node.num_row_locks} row locks"
        assert (node in self._leaves) == self._may_leave(node), "a leaf is not filed as one"
        may_go = node.has_row and not node.num_row_locks
        assert (node in self._snapshots) == may_go, "a row is not up for eviction, or a locked is"
        if self._may_leave(node) and self._limits.needs_snapshots:
            assert node.has_row, "KV that nobody can resume"

    def _match(self, request: Request) -> _Match:
        root = self._tree.root
        if not self._limits.uses_prefix_cache or request.has_private_prefix:
            return _Match(root, 0, 0, 0)
        # one token at least must run, for there to be logits
        limit = len(request.token_ids) - 1
        walk = self._tree.walk(request.token_ids[:limit])
        soon = self._resumable(walk, of_host=False)
        ready = [node for node in soon if node.stored_at < self._step]
        usable, planned = (self._usable(nodes, walk.length) for nodes in (ready, soon))
        return _Match(ready[-1] if usable else root, usable, walk.length, planned)

    def _resumable(self, walk: Walk, *, of_host: bool) -> list[Node]:
        """Nodes along a walk that can be resumed from, on the device or the host."""
        if self._limits.needs_snapshots:
            if of_host:
                return [node for node in walk.nodes if node.host_row >= 0]
            return [node for node in walk.nodes if node.has_row]
        nodes = walk.nodes if walk.partial is None else [*walk.nodes, walk.partial]
        return [node for node in nodes[1:] if (node.host_pages if of_host else node.pages)]

    def _load(self, request: Request) -> None:
        """Bring a request's prefix to the device, if more of it lies on the host."""
        if self._host is None or request.has_private_prefix:
            return
        walk = self._tree.walk(request.token_ids[:-1])
        copies, warm = (self._resumable(walk, of_host=of_host) for of_host in (True, False))
        if self._usable(copies, walk.length) < self._usable(warm, walk.length) + self._size:
            return
        node = copies[-1]
        if any(part.stored_at == self._step for part in node.path()):
            return
        cold = [part for part in node.path() if not part.is_warm]
        first = self._tree.first_page(cold[-1].start) if cold else self._tree.num_pages(node)
        # neither what it hangs from nor, being warm, the row there may go for its sake
        base = cold[-1].parent if cold else node
        assert base is not None, "the root is warm"
        self._lock(base)
        row = self._take_row() if self._limits.needs_snapshots and not node.has_row else None
        is_rowless = self._limits.needs_snapshots and row is None
        num_pages = self._tree.num_pages(node) - first
        if is_rowless or not self._make_room(num_pages):
            if row is not None:
                self._rows.free(row)
            self._unlock(base)
            return
        pages = self._pages.allocate(num_pages)
        assert pages is not None, "there is room for them"
        host_pages = self._tree.host_pages_of(node)[first:]
        for part in reversed(cold):
            self._tree.warm_up(part, self._tree.own_pages(part, pages, first))
            self._pages.share(part.pages)
            part.stored_at = self._step - 1
        self._pages.release(pages)
        if row is not None:
            node.row, node.stored_at = row, self._step - 1
        self._loads.append(
            Transfer(
                tuple(pages), tuple(host_pages), row, node.host_row if row is not None else None
            )
        )
        for part in [*cold, node]:
            self._settle(part)
        self._unlock(base)
        self.counters.num_loads += 1

    def _forget_copy(self, node: Node) -> None:
        """Give up a node's copy on the host; a cold node is then gone."""
        assert self._host is not None, "only the host tier asks for it"
        self._host.drop(node)
        if not node.is_warm:
            self._tree.remove(node)

    def _usable(self, nodes: list[Node], length: int) -> int:
        end = min(nodes[-1].end, length) if nodes else 0
        return end if self._limits.needs_snapshots else end // self._size * self._size

    def _admit(self, request: Request, match: _Match) -> Admission | WaitReason:
        self._lock(match.node)
        # the row too: taking one for the request must not take that
        self._lock_row(match.node)
        row = self._take_row()
        num_shared = match.usable_len // self._size
        missing = self._num_pages(request, len(request.token_ids)) - num_shared
        fits = row is not None and self._make_room(missing)
        if row is None or not fits:
            if row is not None:
                self._rows.free(row)
            self._unlock_row(match.node)
            self._unlock(match.node)
            return WaitReason.ROWS if row is None else WaitReason.PAGES
        fresh = self._pages.allocate(missing)
        assert fresh is not None, "there is room for them"
        cached = self._tree.pages_of(match.node)
        self._pages.share(cached[:num_shared])
        request.pages, request.state_row = cached[:num_shared] + fresh, row
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

    def _count(self, request: Request, match: _Match) -> None:
        match.node.num_uses += 1
        if request.num_output == 0:
            request.cached_len = match.usable_len
        self.counters.num_tokens += len(request.token_ids)
        self.counters.num_cached_tokens += match.usable_len
        self.counters.num_admissions += 1
        self.counters.num_hits += match.usable_len > 0

    def _wanted_snapshots(self, request: Request, match: _Match) -> list[int]:
        """Positions where a prompt's state will be wanted again, ascending."""
        if not self._limits.needs_snapshots:
            return []
        prompt_len = len(request.prompt_ids)
        if len(request.token_ids) > prompt_len:
            return []  # retracted: its own state was cached
        wanted = set()
        if request.message_end is not None:
            wanted.add(request.message_end)
        if match.matched_len - match.usable_len >= self._size:
            wanted.add(match.matched_len)  # the second prompt that passes here
        last_page = (prompt_len - 1) // self._size * self._size
        if all(position < last_page for position in wanted):
            wanted.add(last_page)
        return sorted(p for p in wanted if match.usable_len < p < prompt_len)

    def _store(self, request: Request, position: int, row: int, step: int) -> bool:
        """Cache a request's first `position` tokens with a snapshot; False if there is one."""
        node = self._insert(request, position, step)
        if node.has_row:
            return False
        node.row, node.stored_at = row, step
        self._settle(node)
        self._unstored.append(node)
        self.counters.num_snapshots += 1
        return True

    def _cache_kv(self, request: Request, length: int, step: int) -> None:
        """Cache the full pages of a request's first `length` tokens."""
        if length >= self._size:
            self._unstored.append(self._insert(request, length // self._size * self._size, step))

    def _insert(self, request: Request, length: int, step: int) -> Node:
        """Return the node of a request's first tokens, locked for it in place of its last one."""
        inserted = self._tree.insert(request.token_ids[:length], request.pages)
        node = inserted.node
        self._pages.share(inserted.pages)
        if self._host is not None:
            self._host.share(inserted.host_pages)
        for part in inserted.warmed:
            self._pages.share(part.pages)
            part.stored_at = step
        # a branch is a key that others have passed before
        node.num_uses += len(node.children)
        self._lock(node)
        self._unlock(self._held.get(request, self._tree.root))
        self._held[request] = node
        return node

    def _take_row(self) -> int | None:
        row = self._rows.allocate()
        if row is None and self._evict_row():
            row = self._rows.allocate()
        return row

    def _make_room(self, num_pages: int) -> bool:
        """Evict until so many pages are free; False if they cannot be."""
        while self._pages.num_free < num_pages:
            if not self._evict_leaf():
                return False
        return True

    def _evict_row(self) -> bool:
        node = self._snapshots.pop()
        if node is None:
            return False
        self._drop_row(node)
        self.counters.num_rows_evicted += 1
        self._settle(node)
        return True

    def _evict_leaf(self) -> bool:
        node = self._leaves.pop()
        if node is None:
            return False
        self._remove(node)
        self.counters.num_leaves_evicted += 1
        return True

    def _remove(self, leaf: Node) -> None:
        """Free what a leaf holds on the device; without a copy on the host it is gone."""
        parent = leaf.parent
        assert parent is not None, "the root is no leaf"
        if leaf.has_row:
            self._drop_row(leaf)
        self._leaves.discard(leaf)
        self._pages.release(self._tree.cool_down(leaf))
        if not leaf.host_pages:
            self._tree.remove(leaf)
        self._settle(parent)

    def _drop_row(self, node: Node) -> None:
        self._snapshots.discard(node)
        self._rows.free(node.row)
        node.row = -1

    def _may_leave(self, node: Node) -> bool:
        is_free = not node.num_warm_children and not node.num_locks and not node.num_row_locks
        return node.is_warm and is_free

    def _settle(self, node: Node) -> None:
        """File a changed node under what may be evicted; free it if it has become useless."""
        if node.parent is None:
            return
        may_leave = self._may_leave(node)
        if may_leave and not node.has_row and self._limits.needs_snapshots:
            self._remove(node)
            return
        for order, may_go in (
            (self._leaves, may_leave),
            (self._snapshots, node.has_row and not node.num_row_locks),
        ):
            if not may_go:
                order.discard(node)
            elif node not in order:
                order.add(node)

    def _lock(self, node: Node) -> None:
        for part in node.path():
            part.num_locks += 1
            self._leaves.discard(part)

    def _unlock(self, node: Node) -> None:
        for part in list(node.path()):
            part.num_locks -= 1
            self._settle(part)

    def _lock_row(self, node: Node) -> None:
        """Keep a node's row until the next step is planned."""
        if node.parent is None:
            return
        node.num_row_locks += 1
        self._locked_rows.append(node)
        self._settle(node)

    def _unlock_row(self, node: Node) -> None:
        if node.parent is None:
            return
        node.num_row_locks -= 1
        self._locked_rows.remove(node)
        self._settle(node)

    def _worth_of_row(self, node: Node) -> float:
        return node.num_uses * _tokens_saved(node)

    def _worth_of_leaf(self, node: Node) -> float:
        if not self._limits.needs_snapshots:
            return node.num_uses
        num_bytes = len(node.pages) * self._limits.page_bytes + self._limits.row_bytes
        return node.num_uses * _tokens_saved(node) / max(1, num_bytes)

    def _worth_of_copy(self, node: Node) -> float:
        return node.num_uses * len(node.edge) / len(node.host_pages)

    def _num_pages(self, request: Request, committed_len: int) -> int:
        tokens = reserved_len(committed_len, self._limits.max_window, request.limit_len)
        return num_pages_for(tokens, self._size)

    def _num_cached_tokens(self) -> int:
        return sum(len(node.edge) for node in self._tree.nodes())


def _tokens_saved(node: Node) -> int:
    """Prefill that the loss of a node's snapshot would cost its next reader."""
    shallower = (part.end for part in node.path() if part is not node and part.has_row)
    return node.end - next(shallower, 0)
