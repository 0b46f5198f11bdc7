"""The prefix cache's first tier: what its nodes hold on the device, and what leaves first.

Nodes hold pages and rows beside the requests that use them, with two kinds of locks: one on every
node of a key that a request builds on, so that nothing is evicted there in vain, and one on the row
that a planned step reads or writes, until the next step is planned: from then on the stream's order
protects it. Host integers only.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from gapless.cache.eviction import EvictionOrder, worth_of_leaf, worth_of_row
from gapless.cache.pages import PagePool
from gapless.cache.rows import IdPool

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gapless.cache.limits import CacheLimits
    from gapless.cache.radix import Node, RadixTree
    from gapless.core.counters import CacheCounters


class DeviceTier:
    """Which device pages and rows hold what; requests take theirs from the same pools."""

    def __init__(self, tree: RadixTree, limits: CacheLimits, counters: CacheCounters) -> None:
        self.pages = PagePool(limits.num_pages)
        self.rows = IdPool(limits.num_state_rows)
        self._tree = tree
        self._needs_snapshots = limits.needs_snapshots
        self._counters = counters
        self._snapshots = EvictionOrder(worth_of_row)
        # nodes without warm children; they go with their snapshots
        self._leaves = EvictionOrder(partial(worth_of_leaf, limits=limits))
        self._locked_rows: list[Node] = []

    def take_row(self) -> int | None:
        """Hand out a state row, evicting a snapshot for it; None if none may go."""
        if self.rows.num_free == 0:
            node = self._snapshots.pop()
            if node is not None:
                self._drop_row(node)
                self._counters.num_rows_evicted += 1
                self.settle(node)
        return self.rows.allocate()

    def make_room(self, num_pages: int) -> bool:
        """Evict until so many pages are free; False if they cannot be."""
        while self.pages.num_free < num_pages:
            leaf = self._leaves.pop()
            if leaf is None:
                return False
            self._remove(leaf)
            self._counters.num_leaves_evicted += 1
        return True

    def drop_all(self) -> None:
        """Evict what no request builds on and no planned step reads."""
        while (leaf := self._leaves.pop()) is not None:
            self._remove(leaf)

    def lock(self, node: Node) -> None:
        """Keep a key: a request builds on it."""
        for part in node.path():
            part.num_locks += 1
            self._leaves.discard(part)

    def unlock(self, node: Node) -> None:
        """Undo `lock`."""
        for part in list(node.path()):
            part.num_locks -= 1
            self.settle(part)

    def lock_row(self, node: Node) -> None:
        """Keep a node's row until the next step is planned."""
        if node.parent is None:
            return
        node.num_row_locks += 1
        self._locked_rows.append(node)
        self.settle(node)

    def unlock_row(self, node: Node) -> None:
        """Undo `lock_row`."""
        if node.parent is None:
            return
        node.num_row_locks -= 1
        self._locked_rows.remove(node)
        self.settle(node)

    def unlock_rows(self) -> None:
        """Undo every `lock_row`: a new step is planned."""
        for node in self._locked_rows:
            node.num_row_locks -= 1
            self.settle(node)
        self._locked_rows.clear()

    def settle(self, node: Node) -> None:
        """File a changed node under what may be evicted; free it if it has become useless."""
        if node.parent is None:
            return
        may_leave = self._may_leave(node)
        if may_leave and not node.has_row and self._needs_snapshots:
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

    def check_conserved(
        self, held: Iterable[Node], storing: list[Node]
    ) -> tuple[Counter[int], list[int]]:
        """Assert that locks and filing add up. For tests.

        Args:
            held: what requests build on.
            storing: what is being copied to the host.

        Returns:
            The pages and the rows that the tree holds.
        """
        num_locks = Counter(part for node in (*held, *storing) for part in node.path())
        pages: Counter[int] = Counter()
        rows = []
        for node in self._tree.nodes():
            self._check_node(node, num_locks[node], storing.count(node))
            pages.update(node.pages)
            if node.has_row:
                rows.append(node.row)
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
        if self._may_leave(node) and self._needs_snapshots:
            assert node.has_row, "KV that nobody can resume"

    def _remove(self, leaf: Node) -> None:
        """Free what a leaf holds on the device; without a copy on the host it is gone."""
        parent = leaf.parent
        assert parent is not None, "the root is no leaf"
        if leaf.has_row:
            self._drop_row(leaf)
        self._leaves.discard(leaf)
        self.pages.release(self._tree.cool_down(leaf))
        if not leaf.host_pages:
            self._tree.remove(leaf)
        self.settle(parent)

    def _drop_row(self, node: Node) -> None:
        self._snapshots.discard(node)
        self.rows.free(node.row)
        node.row = -1

    def _may_leave(self, node: Node) -> bool:
        is_free = not node.num_warm_children and not node.num_locks and not node.num_row_locks
        return node.is_warm and is_free
