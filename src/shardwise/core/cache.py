"""A dict with a bound: the oldest entries go where it is full. Knows nothing of what is kept in it."""

from __future__ import annotations

from itertools import islice
from typing import TypeVar

__all__ = ["BoundedCache"]

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that holds at most `limit` entries, if they are put in by `keep`.

    Looking one up is what it is in any dict: no lock, no count of uses. Threads may keep the same entry at once; the
    last one stays.

    Args:
        limit: how many entries there may be.

    Example:
        >>> squares: BoundedCache[int, int] = BoundedCache(4)
        >>> [squares.keep(n, n * n) for n in range(5)]
        [0, 1, 4, 9, 16]
        >>> squares
        {1: 1, 2: 4, 3: 9, 4: 16}
    """

    __slots__ = ("limit",)

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def keep(self, key: K, value: V) -> V:
        """Put an entry in and give its value back; where there is no room, a quarter of the others goes first."""
        if len(self) >= self.limit and key not in self:
            for old in list(islice(self, max(self.limit // 4, len(self) - self.limit + 1))):  # dicts keep their order
                self.pop(old, None)
        self[key] = value
        return value
