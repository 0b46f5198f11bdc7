"""Ids that are handed out one at a time: request slots and state rows."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class IdPool:
    """The ids `0 .. size - 1`, lowest first; the null id, `size`, is never handed out."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        heapify(self._free)
        self._is_free = [True] * size

    @property
    def num_free(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    def allocate(self) -> int | None:
        """Hand out the lowest free id, or None if there is none."""
        if not self._free:
            return None
        index = heappop(self._free)
        self._is_free[index] = False
        return index

    def free(self, index: int) -> None:
        """Take an id back from its owner."""
        assert 0 <= index < self.size, f"id {index} is not one of {self.size}"
        assert not self._is_free[index], f"id {index} is freed twice"
        self._is_free[index] = True
        heappush(self._free, index)
