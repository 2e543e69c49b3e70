"""An additive checksum: each rank sums the bytes it reads, and the sums of all ranks add up to the block's checksum.

The checksum of a block is the sum of word[i] * BASE**i modulo 2**64 over its 32-bit little-endian words, the last one
padded with zeros. Since it is a sum, ranks may read a block in parts along any dims, and no byte is read only to verify
it. BASE is odd, so a change inside one word is always detected. It has the largest possible order, so no two positions
within 8 GiB have the same weight, even in the significant bits. Other damage is missed with a probability of at most
2**-32. The checksum protects against accidents, not against forgery.
"""

from __future__ import annotations

import functools

import numpy as np

__all__ = ["BASE", "checksum", "sum_of_rows"]

BASE = 0x5851F42D4C957F2D  # 5 modulo 8, so that its powers have the period 2**62
MODULUS = 2**64
WORD = 4
TABLE = 1 << 14  # words summed at a time: they and their weights fit into the CPU cache


@functools.cache
def _powers() -> np.ndarray:
    return _geometric(1, BASE, TABLE)


def _geometric(first: int, ratio: int, count: int) -> np.ndarray:
    """`first * ratio**i` modulo 2**64."""
    terms = np.full(count, ratio, dtype=np.uint64)
    terms[:1] = first
    return np.multiply.accumulate(terms)


def checksum(data: np.ndarray, start: int = 0) -> int:
    """The checksum of consecutive bytes that start at byte `start` of a block.

    Example:
        >>> data = np.arange(11, dtype=np.uint8)
        >>> checksum(data) == (checksum(data[:5]) + checksum(data[5:], start=5)) % 2**64
        True
    """
    return sum_of_rows(data.reshape(1, -1), start, 0)


def sum_of_rows(rows: np.ndarray, start: int, pitch: int) -> int:
    """The checksum of rows of bytes of equal length; row r starts at byte `start + r * pitch` of the block."""
    count, length = rows.shape
    if not count or not length:
        return 0
    if start % WORD == 0 and (pitch % WORD == 0 or count == 1) and length % WORD == 0 and rows.strides[1] == 1:
        return _sum_of_words(rows.view(np.uint32), start // WORD, pitch // WORD)
    total = 0
    for first in range(min(WORD, count)):  # every fourth row has the same alignment to words
        some, at = rows[first::WORD], start + first * pitch
        shift = at % WORD
        padded = np.zeros((len(some), -(-(shift + length) // WORD) * WORD), dtype=np.uint8)
        padded[:, shift : shift + length] = some
        total += _sum_of_words(padded.view(np.uint32), at // WORD, pitch)  # four rows are `pitch` words apart
    return total % MODULUS


def _sum_of_words(words: np.ndarray, start: int, pitch: int) -> int:
    count, length = words.shape
    if count == 1 and length > TABLE:  # split one long row into consecutive rows
        full = length // TABLE * TABLE
        total = _sum_of_words(words[:, :full].reshape(-1, TABLE), start, TABLE)
        return (total + _sum_of_words(words[:, full:], start + full, 0)) % MODULUS if full < length else total
    total = np.zeros(count, dtype=np.uint64)
    powers = _powers()
    for first in range(0, length, TABLE):
        part = words[:, first : first + TABLE]
        sums = np.einsum("ij,j->i", part, powers[: part.shape[1]], dtype=np.uint64, casting="same_kind")
        total += sums * np.uint64(pow(BASE, first, MODULUS))
    weights = _geometric(pow(BASE, start, MODULUS), pow(BASE, pitch, MODULUS), count)
    return int((total * weights).sum(dtype=np.uint64))
