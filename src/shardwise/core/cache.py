"""A dict with a limited number of entries: when it is full, the oldest are removed."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TypeVar

__all__ = ["BoundedCache"]

RECENT = 512

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict of at most `limit` entries, if they are added by `keep`.

    A look-up is that of a plain dict: no lock, no count of uses. If several threads add the same key at once, the
    last value remains.

    Args:
        limit: the largest number of entries.

    Example:
        >>> squares: BoundedCache[int, int] = BoundedCache(4)
        >>> [squares.keep(n, n * n) for n in range(5)]
        [0, 1, 4, 9, 16]
        >>> squares
        {1: 1, 2: 4, 3: 9, 4: 16}
    """

    __slots__ = ("_passing", "limit")

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._passing: deque[K] = deque()

    def keep(self, key: K, value: V) -> V:
        """Add an entry and return its value. A full cache first removes its oldest quarter."""
        if len(self) >= self.limit and key not in self:
            for old in list(islice(self, max(self.limit // 4, len(self) - self.limit + 1))):  # dicts keep their order
                self.pop(old, None)
        self[key] = value
        return value

    def clear(self) -> None:
        """Remove all entries."""
        super().clear()
        self._passing.clear()

    def keep_recent(self, key: K, value: V) -> V:
        """Add an entry that may never be looked up again, and return its value: only the latest remain."""
        passing = self._passing
        passing.append(key)
        if len(passing) > min(RECENT, self.limit):
            self.pop(passing.popleft(), None)
        self[key] = value
        return value
