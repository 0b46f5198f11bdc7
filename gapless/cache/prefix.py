"""The prefix cache: which keys are kept, where, and what leaves first.

Nodes hold pages and rows beside the requests that use them, with two kinds of locks: one on every
node of a key that a request builds on, so that nothing is evicted there in vain, and one on the row
that a planned step reads or writes, until the next step is planned: from then on the stream's order
protects it. Host integers only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.cache.eviction import EvictionOrder
from gapless.cache.host import HostTier
from gapless.cache.radix import Node, RadixTree, Walk
from gapless.core.plan import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gapless.cache.pages import PagePool
    from gapless.cache.rows import IdPool
    from gapless.core.counters import CacheCounters
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


@dataclass(frozen=True)
class Match:
    """The deepest usable prefix of a sequence."""

    node: Node
    usable_len: int
    matched_len: int
    """Tokens in common with the tree, usable or not."""
    soon_len: int
    """What will be usable once the step being planned has been launched."""


class PrefixCache:
    """Keys with their pages and snapshots, taken from the pools and given back to them."""

    def __init__(
        self, limits: CacheLimits, pages: PagePool, rows: IdPool, counters: CacheCounters
    ) -> None:
        self._limits = limits
        self._size = limits.page_size
        self._pages = pages
        self._rows = rows
        self._counters = counters
        self._tree = RadixTree(limits.page_size)
        self._snapshots = EvictionOrder(self._worth_of_row)
        self._leaves = EvictionOrder(self._worth_of_leaf)
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

    @property
    def root(self) -> Node:
        """The node of the empty key."""
        return self._tree.root

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree."""
        return self._tree.num_nodes

    @property
    def num_stores_under_way(self) -> int:
        """Copies to the host that have not arrived."""
        return 0 if self._host is None else len(self._host.storing)

    def begin_step(self) -> None:
        """Start planning a step: what the one before reads and writes needs no lock any more."""
        self._step += 1
        for node in self._locked_rows:
            node.num_row_locks -= 1
            self._settle(node)
        self._locked_rows.clear()

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the deepest prefix of `tokens` that can be resumed, bringing it from the host."""
        self._load(tokens)
        walk = self._tree.walk(tokens)
        soon = self._resumable(walk, of_host=False)
        ready = [node for node in soon if node.stored_at < self._step]
        usable, planned = (self._usable(nodes, walk.length) for nodes in (ready, soon))
        return Match(ready[-1] if usable else self.root, usable, walk.length, planned)

    def pages_of(self, node: Node) -> list[int]:
        """Pages of a node's whole key."""
        return self._tree.pages_of(node)

    def store(
        self,
        tokens: Sequence[int],
        pages: Sequence[int],
        held: Node,
        row: int | None,
        *,
        is_written: bool,
    ) -> tuple[Node, bool]:
        """Keep a key, with a snapshot if a row is given; its node is locked in place of `held`.

        Args:
            pages: where the tokens' KV lies, held by the caller; the tree holds what it takes up.
            is_written: whether that is done by earlier steps, or this one's saves; else this step's
                prefill writes it.

        Returns:
            The node, and whether the cache has taken up the row: not if it had one.
        """
        step = self._step - 1 if is_written else self._step
        inserted = self._tree.insert(tokens, pages)
        node = inserted.node
        self._pages.share(inserted.pages)
        if self._host is not None:
            self._host.share(inserted.host_pages)
        for part in inserted.warmed:
            self._pages.share(part.pages)
            part.stored_at = step
        # a branch is a key that others have passed before
        node.num_uses += len(node.children)
        self.lock(node)
        self.unlock(held)
        takes_row = row is not None and not node.has_row
        if takes_row and row is not None:
            node.row, node.stored_at = row, step
            self._counters.num_snapshots += 1
            if not is_written:
                self.lock_row(node)
            self._settle(node)
        if takes_row or row is None:
            self._unstored.append(node)
        return node, takes_row

    def take_row(self) -> int | None:
        """Hand out a state row, evicting a snapshot for it; None if none may go."""
        if self._rows.num_free == 0:
            self._evict_row()
        return self._rows.allocate()

    def make_room(self, num_pages: int) -> bool:
        """Evict until so many pages are free; False if they cannot be."""
        while self._pages.num_free < num_pages:
            leaf = self._leaves.pop()
            if leaf is None:
                return False
            self._remove(leaf)
            self._counters.num_leaves_evicted += 1
        return True

    def flush(self) -> int:
        """Drop what no request builds on and no planned step reads; returns the tokens dropped."""
        before = self._num_tokens()
        if self._host is not None:
            self._host.drop_all(self._forget_copy)
        while (leaf := self._leaves.pop()) is not None:
            self._remove(leaf)
        return before - self._num_tokens()

    def lock(self, node: Node) -> None:
        """Keep a key: a request builds on it."""
        for part in node.path():
            part.num_locks += 1
            self._leaves.discard(part)

    def unlock(self, node: Node) -> None:
        """Undo `lock`."""
        for part in list(node.path()):
            part.num_locks -= 1
            self._settle(part)

    def lock_row(self, node: Node) -> None:
        """Keep a node's row until the next step is planned."""
        if node.parent is None:
            return
        node.num_row_locks += 1
        self._locked_rows.append(node)
        self._settle(node)

    def unlock_row(self, node: Node) -> None:
        """Undo `lock_row`."""
        if node.parent is None:
            return
        node.num_row_locks -= 1
        self._locked_rows.remove(node)
        self._settle(node)

    def begin_stores(self) -> tuple[Transfer, ...]:
        """Plan the copies to the host of what earlier steps, and this one's saves, have cached."""
        nodes, self._unstored = self._unstored, []
        if self._host is None:
            return ()
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
            self.lock(node)
            node.num_row_locks += 1
            self._settle(node)
            transfers.append(transfer)
            self._counters.num_stores += 1
        return tuple(transfers)

    def end_stores(self, num_stored: int) -> None:
        """Take note of the copies that have arrived, `num_stored` since the start."""
        if self._host is None:
            return
        for node in self._host.arrived(num_stored):
            node.num_row_locks -= 1
            self.unlock(node)

    def take_loads(self) -> tuple[Transfer, ...]:
        """Return the copies from the host that the matches of this step need."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def check_conserved(self, held: Iterable[Node]) -> tuple[Counter[int], list[int]]:
        """Assert that locks and filing add up, `held` being what requests build on. For tests.

        Returns the pages and the rows that the tree holds.
        """
        storing = self._host.storing if self._host is not None else []
        num_locks = Counter(part for node in (*held, *storing) for part in node.path())
        pages: Counter[int] = Counter()
        rows = []
        for node in self._tree.nodes():
            self._check_node(node, num_locks[node], storing.count(node))
            pages.update(node.pages)
            if node.has_row:
                rows.append(node.row)
        if self._host is not None:
            self._host.check_conserved(list(self._tree.nodes()))
        return pages, rows

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

    def _resumable(self, walk: Walk, *, of_host: bool) -> list[Node]:
        """Nodes along a walk that can be resumed from, on the device or the host."""
        if self._limits.needs_snapshots:
            if of_host:
                return [node for node in walk.nodes if node.host_row >= 0]
            return [node for node in walk.nodes if node.has_row]
        nodes = walk.nodes if walk.partial is None else [*walk.nodes, walk.partial]
        return [node for node in nodes[1:] if (node.host_pages if of_host else node.pages)]

    def _usable(self, nodes: list[Node], length: int) -> int:
        end = min(nodes[-1].end, length) if nodes else 0
        return end if self._limits.needs_snapshots else end // self._size * self._size

    def _load(self, tokens: Sequence[int]) -> None:
        """Bring a prefix to the device, if more of it lies on the host."""
        if self._host is None:
            return
        walk = self._tree.walk(tokens)
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
        self.lock(base)
        row = self.take_row() if self._limits.needs_snapshots and not node.has_row else None
        is_rowless = self._limits.needs_snapshots and row is None
        num_pages = self._tree.num_pages(node) - first
        if is_rowless or not self.make_room(num_pages):
            if row is not None:
                self._rows.free(row)
            self.unlock(base)
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
        host_row = None if row is None else node.host_row
        self._loads.append(Transfer(tuple(pages), tuple(host_pages), row, host_row))
        for part in [*cold, node]:
            self._settle(part)
        self.unlock(base)
        self._counters.num_loads += 1

    def _forget_copy(self, node: Node) -> None:
        """Give up a node's copy on the host; a cold node is then gone."""
        assert self._host is not None, "only the host tier asks for it"
        self._host.drop(node)
        if not node.is_warm:
            self._tree.remove(node)

    def _evict_row(self) -> None:
        node = self._snapshots.pop()
        if node is not None:
            self._drop_row(node)
            self._counters.num_rows_evicted += 1
            self._settle(node)

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

    def _worth_of_row(self, node: Node) -> float:
        return node.num_uses * _tokens_saved(node)

    def _worth_of_leaf(self, node: Node) -> float:
        if not self._limits.needs_snapshots:
            return node.num_uses
        num_bytes = len(node.pages) * self._limits.page_bytes + self._limits.row_bytes
        return node.num_uses * _tokens_saved(node) / max(1, num_bytes)

    def _worth_of_copy(self, node: Node) -> float:
        return node.num_uses * len(node.edge) / len(node.host_pages)

    def _num_tokens(self) -> int:
        return sum(len(node.edge) for node in self._tree.nodes())


def _tokens_saved(node: Node) -> int:
    """Prefill that the loss of a node's snapshot would cost its next reader."""
    shallower = (part.end for part in node.path() if part is not node and part.has_row)
    return node.end - next(shallower, 0)
