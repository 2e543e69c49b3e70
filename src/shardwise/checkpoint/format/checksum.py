"""An additive checksum: each rank sums the bytes it reads, and the sums of all ranks add up to the block's checksum.

The checksum of a block is the sum of word[i] * BASE**i modulo 2**64 over its 32-bit little-endian words, the last one
padded with zeros. Since it is a sum, ranks may read a block in parts along any dims, and no byte is read only to verify
it. BASE is odd, so a change inside one word is always detected. It has the largest possible order, so no two positions
within 8 GiB have the same weight, even in the significant bits. Other damage is missed with a probability of at most
2**-32. The checksum protects against accidents, not against forgery.

It is computed from pairs of words, as numbers of 64 bits: `pairs`, the sum of pair[j] * BASE**(2 * j), and the same sum
of their high words. `pairs` alone takes a third of the time. It shows whether bytes are still those that were verified.
"""

from __future__ import annotations

import functools
import math

import numpy as np

__all__ = ["BASE", "MODULUS", "PartSum", "checksum"]

BASE = 0x5851F42D4C957F2D  # 5 modulo 8, so that its powers have the period 2**62
MODULUS = 2**64
PAIR = 8  # bytes
SQUARE = BASE * BASE % MODULUS
TABLE = 1 << 13  # the most pairs of a row that are summed at a time; their weights stay in the CPU cache
GROUP = 1 << 15  # the most pairs whose high words are taken at a time: they and their pairs stay there, too
_HIGH = np.uint64(32)


class PartSum:
    """The sums of parts of a block, which are added one by one.

    Args:
        full: compute the checksum; otherwise `pairs` alone.

    Example:
        >>> data, sums = np.arange(12, dtype=np.uint8), PartSum()
        >>> sums.add(data.reshape(3, 4)[:, :1], start=0, pitch=4)
        >>> sums.add(data.reshape(3, 4)[:, 1:], start=1, pitch=4)
        >>> sums.checksum == checksum(data)
        True
    """

    def __init__(self, *, full: bool = True) -> None:
        self.nbytes = 0
        self._full = full
        self._pairs = 0
        self._high = 0

    def add(self, rows: np.ndarray, start: int, pitch: int) -> None:
        """Add rows of bytes of equal length; row r starts at byte `start + r * pitch` of the block."""
        count, length = rows.shape
        if not count or not length:
            return
        self.nbytes += count * length
        if start % PAIR == 0 and (pitch % PAIR == 0 or count == 1) and rows.strides[1] == 1:
            whole = length // PAIR * PAIR
            if whole:
                self._add_pairs(rows[:, :whole].view(np.uint64), start // PAIR, pitch // PAIR)
            if whole == length:
                return
            rows, start, length = rows[:, whole:], start + whole, length - whole
        apart = PAIR // math.gcd(pitch, PAIR)  # rows with the same alignment
        for first in range(min(apart, count)):
            some, at = rows[first::apart], start + first * pitch
            shift = at % PAIR
            padded = np.zeros((len(some), -(-(shift + length) // PAIR) * PAIR), dtype=np.uint8)
            padded[:, shift : shift + length] = some
            self._add_pairs(padded.view(np.uint64), at // PAIR, pitch * apart // PAIR)

    @property
    def pairs(self) -> int:
        """The sum of pairs of words. A change inside one pair changes it; one of the highest bits of two may not."""
        return self._pairs % MODULUS

    @property
    def checksum(self) -> int:
        """The checksum of the parts so far."""
        assert self._full, "only pairs were summed"
        # a pair is low + 2**32 * high, and has the weight that low has: BASE times less than that of high
        return (self._pairs + (BASE - 2**32) * self._high) % MODULUS

    def _add_pairs(self, pairs: np.ndarray, start: int, pitch: int) -> None:
        count, length = pairs.shape
        if length > TABLE and count == 1:  # split one long row into consecutive rows
            full = length // TABLE * TABLE
            self._add_pairs(pairs[:, :full].reshape(-1, TABLE), start, TABLE)
            if full < length:
                self._add_pairs(pairs[:, full:], start + full, 0)
            return
        if length > TABLE:
            for first in range(0, length, TABLE):
                self._add_pairs(pairs[:, first : first + TABLE], start + first, pitch)
            return
        by_column, by_row = _powers(SQUARE, TABLE)[:length], _powers(_power(pitch), count)
        scale, rows = _power(start), max(1, GROUP // length)
        for row in range(0, count, rows):
            part, those = pairs[row : row + rows], by_row[row : row + rows]
            self._pairs += _weighted(part, by_column, those) * scale
            if self._full:
                self._high += _weighted(part >> _HIGH, by_column, those) * scale


def _weighted(pairs: np.ndarray, by_column: np.ndarray, by_row: np.ndarray) -> int:
    """The sum of pairs, weighted by column and by row."""
    return int(np.dot(np.einsum("ij,j->i", pairs, by_column), by_row))


@functools.lru_cache(maxsize=4096)
def _power(pairs: int) -> int:
    """The weight of this number of pairs: the parts of blocks start at few different places."""
    return pow(SQUARE, pairs, MODULUS)


@functools.lru_cache(maxsize=64)
def _powers(ratio: int, count: int) -> np.ndarray:
    """`ratio**i` modulo 2**64."""
    terms = np.full(count, ratio, dtype=np.uint64)
    terms[:1] = 1
    return np.multiply.accumulate(terms)


def checksum(data: np.ndarray, start: int = 0) -> int:
    """The checksum of consecutive bytes that start at byte `start` of a block.

    Example:
        >>> data = np.arange(11, dtype=np.uint8)
        >>> checksum(data) == (checksum(data[:5]) + checksum(data[5:], start=5)) % 2**64
        True
    """
    sums = PartSum()
    sums.add(data.reshape(1, -1), start, 0)
    return sums.checksum
