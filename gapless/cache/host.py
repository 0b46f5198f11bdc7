"""The cache's second tier: copies of keys in host memory, which outlive those on the device.

A key is copied when its snapshot is stored, whole: a node with a copy has ancestors with copies.
Copies run beside the steps; what they read is locked until they have arrived. Host integers only.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.cache.eviction import EvictionOrder, worth_of_copy
from gapless.cache.pages import PagePool
from gapless.cache.rows import IdPool
from gapless.core.plan import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.cache.radix import Node, RadixTree


@dataclass(frozen=True)
class _Store:
    """A copy under way: a node's snapshot, and its key from `start` on."""

    node: Node
    start: int
    pages: list[int]
    row: int | None
    anchor: Node | None
    """The node with a copy that this one will hang from."""


class HostTier:
    """Which host pages and rows hold what."""

    def __init__(self, tree: RadixTree, *, num_pages: int, num_rows: int) -> None:
        self._tree = tree
        self._pages = PagePool(num_pages)
        self._rows = IdPool(num_rows)
        # nodes with a copy and no child with one
        self._ends = EvictionOrder(worth_of_copy)
        self._stores: deque[_Store] = deque()
        self._num_arrived = 0

    @property
    def storing(self) -> list[Node]:
        """Nodes whose copies are under way."""
        return [store.node for store in self._stores]

    def begin_store(self, node: Node, forget: Callable[[Node], None]) -> Transfer | None:
        """Plan the copy of a warm key; None if there is no room.

        Args: forget: called with each node that must give up its copy.
        """
        anchor = next((part for part in node.path() if part.host_pages), None)
        start = anchor.end if anchor is not None else 0
        if node is anchor and (node.host_row >= 0 or not node.has_row):
            return None
        first = self._tree.first_page(start)
        device_pages = [] if node is anchor else self._tree.pages_of(node)[first:]
        num_rows = int(node.has_row)
        while self._pages.num_free < len(device_pages) or self._rows.num_free < num_rows:
            victim = self._ends.pop()
            if victim is None:
                return None
            if victim is anchor:
                self._ends.add(victim)
                return None
            forget(victim)
        pages = self._pages.allocate(len(device_pages))
        assert pages is not None, "there is room for them"
        row = self._rows.allocate() if num_rows else None
        if anchor is not None:
            anchor.num_host_children += 1
            self.settle(anchor)
        self._stores.append(_Store(node, start, pages, row, anchor))
        return Transfer(tuple(device_pages), tuple(pages), node.row if num_rows else None, row)

    def arrived(self, num_stored: int) -> list[Node]:
        """Take up the copies that have arrived, of `num_stored` since the start; their nodes."""
        nodes = []
        while self._num_arrived < num_stored:
            store = self._stores.popleft()
            self._num_arrived += 1
            self._attach(store)
            nodes.append(store.node)
        return nodes

    def drop(self, node: Node) -> None:
        """Forget the copy of a node, no child of which has one."""
        self._ends.discard(node)
        self._pages.release(node.host_pages)
        node.host_pages = []
        if node.host_row >= 0:
            self._rows.free(node.host_row)
            node.host_row = -1
        if node.parent is not None and node.parent.host_pages:
            node.parent.num_host_children -= 1
            self.settle(node.parent)

    def drop_all(self, forget: Callable[[Node], None]) -> None:
        """Give up all copies but those that others under way will hang from."""
        while (node := self._ends.pop()) is not None:
            forget(node)

    def share(self, pages: list[int]) -> None:
        """Hold pages once more, that a cut has given to two nodes."""
        self._pages.share(pages)

    def settle(self, node: Node) -> None:
        """File a changed node under what may be forgotten."""
        if not node.host_pages or node.num_host_children:
            self._ends.discard(node)
        elif node not in self._ends:
            self._ends.add(node)

    def check_conserved(self, nodes: list[Node]) -> None:
        """Assert that host pages and rows add up over the tree's nodes. For tests."""
        held = Counter(page for node in nodes for page in node.host_pages)
        held.update(page for store in self._stores for page in store.pages)
        for page in range(self._pages.num_pages):
            assert held[page] == self._pages.num_holders(page), f"holders of host page {page}"
        rows = [node.host_row for node in nodes if node.host_row >= 0]
        rows += [store.row for store in self._stores if store.row is not None]
        assert len(set(rows)) == len(rows), f"a host row has two owners: {sorted(rows)}"
        assert len(rows) + self._rows.num_free == self._rows.size, "host rows were lost"
        anchors = [store.anchor for store in self._stores]
        for node in nodes:
            children = sum(bool(child.host_pages) for child in node.children.values())
            children += sum(anchor is node for anchor in anchors)
            if node.host_pages:
                assert node.num_host_children == children, "children with copies"
                assert node.parent is not None
                assert node.parent.host_pages or node.parent.parent is None, "a copy in the air"
            is_end = bool(node.host_pages) and not children
            assert (node in self._ends) == is_end, "an end is not up for eviction"

    def _attach(self, store: _Store) -> None:
        first = self._tree.first_page(store.start)
        for part in reversed(list(store.node.path())):
            if part.host_pages:
                continue
            part.host_pages = self._tree.own_pages(part, store.pages, first)
            self._pages.share(part.host_pages)
            part.num_host_children = 0
            assert part.parent is not None, "the root has no pages"
            if part.parent.host_pages:
                part.parent.num_host_children += 1
                self.settle(part.parent)
            self.settle(part)
        self._pages.release(store.pages)
        if store.row is not None:
            if store.node.host_row < 0:
                store.node.host_row = store.row
            else:
                self._rows.free(store.row)
        if store.anchor is not None:
            store.anchor.num_host_children -= 1
            self.settle(store.anchor)
