"""The radix tree of cached prefixes: keys in tokens, pages of KV along the edges, snapshot rows.

A node's key is the path from the root; a snapshot stands on a node of exactly its length. Host
integers only, and no policy: who takes pages and rows from a node, and when, is the tiers'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Node:
    """Tokens `[start, end)` of every key that passes through."""

    __slots__ = (
        "children", "edge", "end", "host_pages", "host_row", "num_host_children", "num_locks",
        "num_row_locks", "num_uses", "num_warm_children", "pages", "parent", "row", "start",
        "stored_at",
    )  # fmt: skip

    def __init__(self, parent: Node | None, start: int, edge: list[int], pages: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.end = start + len(edge)
        self.edge = edge
        self.children: dict[int, Node] = {}
        self.pages = pages
        """Pages that the tokens lie in; the first and the last may be filled in part, and the first
        then holds the parent's last tokens as well. A *cold* node has none: it is on the host only,
        as are its children."""
        self.row = -1
        """Row of the snapshot at `end`; -1 without one."""
        self.stored_at = -1
        """Step whose forward writes the newest of pages and row."""
        self.num_locks = 0
        """Holders of this key and of longer ones: its pages stay."""
        self.num_row_locks = 0
        """Readers of the row."""
        self.num_uses = 1
        self.num_warm_children = 0
        self.host_pages: list[int] = []
        """Pages of the host tier that hold a copy, all or none; where there are some, the parent
        has some too."""
        self.host_row = -1
        self.num_host_children = 0
        """Children with a copy, or with one under way."""

    @property
    def is_warm(self) -> bool:
        """Whether its KV is on the device; the parent's then is too."""
        return bool(self.pages)

    @property
    def has_row(self) -> bool:
        """Whether a snapshot stands here."""
        return self.row >= 0

    def path(self) -> Iterator[Node]:
        """The node and its ancestors, the root left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Inserted(NamedTuple):
    """A node, and what the tree holds once more than before."""

    node: Node
    warmed: list[Node]
    """Nodes that took up pages of theirs."""
    pages: list[int]
    """Pages that a cut has given to two nodes."""
    host_pages: list[int]
    """The same on the host."""


@dataclass(frozen=True)
class Walk:
    """How far a sequence follows the tree."""

    nodes: list[Node]
    """Nodes whose keys are prefixes of it, root first."""
    partial: Node | None
    """The child that it leaves midway, if it does."""
    length: int
    """Tokens in common, the partial node's included."""


class RadixTree:
    """Keys and what is stored along them."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.root = Node(None, 0, [], [])
        self.num_nodes = 0

    def walk(self, tokens: Sequence[int]) -> Walk:
        """Follow `tokens` from the root."""
        node, nodes = self.root, [self.root]
        while node.end < len(tokens):
            child = node.children.get(tokens[node.end])
            if child is None:
                break
            common = _common_len(child.edge, tokens[child.start : child.end])
            if common < len(child.edge):
                return Walk(nodes, child, child.start + common)
            nodes.append(child)
            node = child
        return Walk(nodes, None, node.end)

    def pages_of(self, node: Node) -> list[int]:
        """The pages of a warm node's key, `ceil(end / page_size)` of them.

        A page that two nodes share in part is the deeper one's: it holds both parts.
        """
        return self._joined((part.start, part.pages) for part in node.path())

    def host_pages_of(self, node: Node) -> list[int]:
        """The same of a key that has a copy on the host."""
        return self._joined((part.start, part.host_pages) for part in node.path())

    def own_pages(self, node: Node, pages: Sequence[int], first: int = 0) -> list[int]:
        """Return those that a node's tokens lie in, `pages` beginning at page `first` of a key."""
        return list(pages[node.start // self._page_size - first : self.num_pages(node) - first])

    def first_page(self, position: int) -> int:
        """Place in a key's pages of the one that a position lies in."""
        return position // self._page_size

    def num_pages(self, node: Node) -> int:
        """Pages of a node's whole key."""
        return -(-node.end // self._page_size)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> Inserted:
        """Return the node of a key, made if it was missing.

        Args: pages: where the tokens' KV lies; what the tree has on the device already is not
        taken up.
        """
        walk = self.walk(tokens)
        node, cut, host_cut = walk.nodes[-1], list[int](), list[int]()
        if walk.partial is not None:
            node, cut, host_cut = self._split(walk.partial, walk.length)
        if node.end < len(tokens):
            start = node.end
            leaf = Node(node, start, list(tokens[start:]), [])
            node.children[tokens[start]] = leaf
            self.num_nodes += 1
            node = leaf
        cold = [part for part in node.path() if not part.is_warm]
        for part in cold:
            self.warm_up(part, self.own_pages(part, pages))
        return Inserted(node, cold, cut, host_cut)

    def warm_up(self, node: Node, pages: list[int]) -> None:
        """Give a cold node pages on the device."""
        assert not node.pages, "the node is warm"
        assert node.parent is not None, "the root has no pages"
        node.pages = pages
        node.parent.num_warm_children += 1

    def cool_down(self, node: Node) -> list[int]:
        """Take a node's pages on the device, which no child of it has any more, and return them."""
        assert not node.num_warm_children, "a child of the node is warm"
        assert node.parent is not None, "the root has no pages"
        pages, node.pages = node.pages, []
        node.parent.num_warm_children -= 1
        return pages

    def remove(self, leaf: Node) -> None:
        """Take out a cold node without children."""
        assert not leaf.children, "only leaves can go"
        assert not leaf.pages, "the leaf holds pages"
        assert leaf.parent is not None, "the root stays"
        del leaf.parent.children[leaf.edge[0]]
        self.num_nodes -= 1

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _joined(self, parts: Iterable[tuple[int, list[int]]]) -> list[int]:
        pages: list[int] = []
        for start, own in reversed(list(parts)):
            del pages[start // self._page_size :]
            pages += own
        return pages

    def _split(self, node: Node, position: int) -> tuple[Node, list[int], list[int]]:
        """Cut a node in two at a position within it; the lower part stays the same object.

        Returns the upper part, and the pages that both then hold, where the cut is within one.
        """
        parent, size = node.parent, self._page_size
        assert parent is not None, "the root has no edge"
        first, middle, end = node.start // size, position // size, -(-position // size)
        upper = Node(
            parent, node.start, node.edge[: position - node.start], node.pages[: end - first]
        )
        upper.host_pages = node.host_pages[: end - first]
        upper.num_locks, upper.num_uses = node.num_locks, node.num_uses
        upper.num_warm_children, upper.num_host_children = bool(node.pages), bool(node.host_pages)
        upper.stored_at = node.stored_at
        parent.children[node.edge[0]] = upper
        node.edge = node.edge[position - node.start :]
        node.pages = node.pages[middle - first :]
        node.host_pages = node.host_pages[middle - first :]
        node.parent, node.start = upper, position
        upper.children[node.edge[0]] = node
        self.num_nodes += 1
        if position % size == 0:
            return upper, [], []
        return upper, upper.pages[-1:], upper.host_pages[-1:]


def _common_len(edge: list[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix; comparisons of whole slices, so that few of them are slow."""
    low, high = 0, min(len(edge), len(tokens))
    if edge[:high] == list(tokens[:high]):
        return high
    # edge[:low] is common, edge[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == list(tokens[low:middle]):
            low = middle
        else:
            high = middle
    return low
