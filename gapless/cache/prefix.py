"""The prefix cache: which keys are kept, what of them can be resumed, and what moves between tiers.

Host integers only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.cache.host import HostTier
from gapless.core.plan import Transfer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Sequence

    from gapless.cache.device import DeviceTier
    from gapless.cache.limits import CacheLimits
    from gapless.cache.radix import Node, RadixTree, Walk
    from gapless.core.counters import CacheCounters


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
    """Keys with their pages and snapshots, on the device and, with a second tier, on the host."""

    def __init__(
        self, tree: RadixTree, device: DeviceTier, limits: CacheLimits, counters: CacheCounters
    ) -> None:
        self._limits = limits
        self._size = limits.page_size
        self._counters = counters
        self._tree = tree
        self._device = device
        self._host: HostTier | None = None
        if limits.num_host_pages:
            self._host = HostTier(
                tree, num_pages=limits.num_host_pages, num_rows=limits.num_host_rows
            )
        self._unstored: list[Node] = []
        self._loads: list[Transfer] = []
        self._step = 0

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
        self._device.unlock_rows()

    def match(self, tokens: Sequence[int]) -> Match:
        """Find the deepest prefix of `tokens` that can be resumed, bringing it from the host."""
        self._load(tokens)
        walk = self._tree.walk(tokens)
        soon = self._resumable(walk, of_host=False)
        ready = [node for node in soon if node.stored_at < self._step]
        usable, planned = (self._usable(nodes, walk.length) for nodes in (ready, soon))
        return Match(ready[-1] if usable else self._tree.root, usable, walk.length, planned)

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
        self._device.pages.share(inserted.pages)
        if self._host is not None:
            self._host.share(inserted.host_pages)
        for part in inserted.warmed:
            self._device.pages.share(part.pages)
            part.stored_at = step
        # a branch is a key that others have passed before
        node.num_uses += len(node.children)
        self._device.lock(node)
        self._device.unlock(held)
        takes_row = row is not None and not node.has_row
        if takes_row and row is not None:
            node.row, node.stored_at = row, step
            self._counters.num_snapshots += 1
            if not is_written:
                self._device.lock_row(node)
            self._device.settle(node)
        if takes_row or row is None:
            self._unstored.append(node)
        return node, takes_row

    def flush(self) -> int:
        """Drop what no request builds on and no planned step reads; returns the tokens dropped."""
        before = self._num_tokens()
        if self._host is not None:
            self._host.drop_all(self._forget_copy)
        self._device.drop_all()
        return before - self._num_tokens()

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
            self._device.lock(node)
            node.num_row_locks += 1
            self._device.settle(node)
            transfers.append(transfer)
            self._counters.num_stores += 1
        return tuple(transfers)

    def end_stores(self, num_stored: int) -> None:
        """Take note of the copies that have arrived, `num_stored` since the start."""
        if self._host is None:
            return
        for node in self._host.arrived(num_stored):
            node.num_row_locks -= 1
            self._device.unlock(node)

    def take_loads(self) -> tuple[Transfer, ...]:
        """Return the copies from the host that the matches of this step need."""
        loads, self._loads = tuple(self._loads), []
        return loads

    def check_conserved(self, held: Iterable[Node]) -> tuple[Counter[int], list[int]]:
        """Assert that locks and filing add up, `held` being what requests build on. For tests.

        Returns the pages and the rows that the tree holds.
        """
        storing = self._host.storing if self._host is not None else []
        if self._host is not None:
            self._host.check_conserved(list(self._tree.nodes()))
        return self._device.check_conserved(held, storing)

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
        self._device.lock(base)
        row = self._device.take_row() if self._limits.needs_snapshots and not node.has_row else None
        is_rowless = self._limits.needs_snapshots and row is None
        num_pages = self._tree.num_pages(node) - first
        if is_rowless or not self._device.make_room(num_pages):
            if row is not None:
                self._device.rows.free(row)
            self._device.unlock(base)
            return
        pages = self._device.pages.allocate(num_pages)
        assert pages is not None, "there is room for them"
        host_pages = self._tree.host_pages_of(node)[first:]
        for part in reversed(cold):
            self._tree.warm_up(part, self._tree.own_pages(part, pages, first))
            self._device.pages.share(part.pages)
            part.stored_at = self._step - 1
        self._device.pages.release(pages)
        if row is not None:
            node.row, node.stored_at = row, self._step - 1
        host_row = None if row is None else node.host_row
        self._loads.append(Transfer(tuple(pages), tuple(host_pages), row, host_row))
        for part in [*cold, node]:
            self._device.settle(part)
        self._device.unlock(base)
        self._counters.num_loads += 1

    def _forget_copy(self, node: Node) -> None:
        """Give up a node's copy on the host; a cold node is then gone."""
        assert self._host is not None, "only the host tier asks for it"
        self._host.drop(node)
        if not node.is_warm:
            self._tree.remove(node)

    def _num_tokens(self) -> int:
        return sum(len(node.edge) for node in self._tree.nodes())
