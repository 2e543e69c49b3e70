"""The coarsest common refinement of two row-major grids of the same ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["common_factors", "groups_of"]


def common_factors(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """The fewest sizes whose neighbours multiply to both sequences, in row-major order; None if there are none.

    Sizes of 1 are omitted.

    Example:
        >>> common_factors((4, 2), (2, 1, 4)), common_factors((2, 3), (3, 2))
        ((2, 2, 2), None)
    """
    ends = sorted({math.prod(sizes[at:]) for sizes in (first, second) for at in range(len(sizes) + 1)})
    if math.prod(first) != math.prod(second) or any(large % small for small, large in itertools.pairwise(ends)):
        return None
    return tuple(large // small for small, large in itertools.pairwise(ends))[::-1]


def groups_of(sizes: Sequence[int], factors: Sequence[int]) -> list[tuple[int, ...]]:
    """For each size, the positions of the factors whose product it is; empty for a size of 1.

    Example:
        >>> groups_of((4, 1, 2), (2, 2, 2))
        [(0, 1), (), (2,)]
    """
    found: list[tuple[int, ...]] = []
    at = 0
    for size in sizes:
        start, product = at, 1
        while product < size:
            product *= factors[at]
            at += 1
        assert product == size, f"{sizes} are no groups of {factors}"
        found.append(tuple(range(start, at)))
    return found
