"""What leaves the prefix cache first.

GreedyDual (Young 1994) with sizes and frequencies (Cherkasova 1998): an entry is worth the clock at
its last use, plus its uses times the prefill tokens that it saves per byte that it takes. The least
worthy goes first and sets the clock, so that what is not used ages.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.cache.limits import CacheLimits
    from gapless.cache.radix import Node


class EvictionOrder:
    """The nodes that may go, least worthy first; logarithmic in their number."""

    def __init__(self, worth: Callable[[Node], float]) -> None:
        """Args: worth: what a node is worth now, above the clock."""
        self._worth = worth
        self._clock = 0.0
        self._num_pushed = 0
        # (worth with clock, push, clock at the node's last use, node); stale once pushed anew
        self._heap: list[tuple[float, int, float, Node]] = []
        self._latest: dict[Node, int] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, node: Node) -> bool:
        return node in self._latest

    def add(self, node: Node) -> None:
        """Let a node go from now on, used now."""
        self._push(node, self._clock)
        if len(self._heap) > 64 + 2 * len(self._latest):
            self._heap = [entry for entry in self._heap if self._latest.get(entry[3]) == entry[1]]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Keep a node, or forget it."""
        self._latest.pop(node, None)

    def pop(self) -> Node | None:
        """Take out the least worthy node, None if none may go."""
        while self._heap:
            worth, push, used_at, node = heappop(self._heap)
            if self._latest.get(node) != push:
                continue
            # it grows when a shallower snapshot goes
            if used_at + self._worth(node) > worth:
                self._push(node, used_at)
                continue
            del self._latest[node]
            self._clock = max(self._clock, worth)
            return node
        return None

    def _push(self, node: Node, used_at: float) -> None:
        self._num_pushed += 1
        self._latest[node] = self._num_pushed
        entry = (used_at + self._worth(node), self._num_pushed, used_at, node)
        heappush(self._heap, entry)


def worth_of_row(node: Node) -> float:
    """What a snapshot is worth: rows are of one size."""
    return node.num_uses * _tokens_saved(node)


def worth_of_leaf(node: Node, limits: CacheLimits) -> float:
    """What a node's pages, and the snapshot without which nobody resumes them, are worth."""
    if not limits.needs_snapshots:
        return node.num_uses
    num_bytes = len(node.pages) * limits.page_bytes + limits.row_bytes
    return node.num_uses * _tokens_saved(node) / max(1, num_bytes)


def worth_of_copy(node: Node) -> float:
    """What a node's copy on the host is worth."""
    return node.num_uses * len(node.edge) / len(node.host_pages)


def _tokens_saved(node: Node) -> int:
    """Prefill that the loss of a node's snapshot would cost its next reader."""
    shallower = (part.end for part in node.path() if part is not node and part.has_row)
    return node.end - next(shallower, 0)
