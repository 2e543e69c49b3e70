"""Jumps in the stream of torch's CPU generator: its state after any number of words, at a constant cost.

The generator is the Mersenne Twister MT19937. Its words follow a linear recurrence over GF(2). If g(x) is x^J modulo
the characteristic polynomial of the recurrence, then word J + k is the XOR of the words i + k over the terms x^i of g
(Haramoto, Matsumoto, L'Ecuyer: A Fast Jump Ahead Algorithm for Linear Recurrences in a Polynomial Space, 2008).
A polynomial is a Python integer here; bit i is the coefficient of x^i.

The layout of the generator's state is torch's own. `jumps_exactly` tests it at run time.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

__all__ = ["Origin", "characteristic_polynomial", "jumps_exactly", "power_of_x"]

Words = npt.NDArray[np.uint32]

SIZE, AHEAD = 624, 397  # words of a block of the state; the third word of the recurrence
UPPER, LOWER, TWIST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
DEGREE = 19937
ROWS = 8  # words at this many distances are combined in one table, for all 2**ROWS combinations
COLUMNS = -(-DEGREE // ROWS)
WIDTH = COLUMNS + SIZE - 1
LINES = 128  # of the table that are combined at once: they fit into a core's cache
SQUARES = np.array([sum((byte >> i & 1) << 2 * i for i in range(8)) for byte in range(256)], "<u2")

# Of `torch.Generator.get_state()`. `next` words of the block are used; after `manual_seed`, `next` is 0 and all are.
LAYOUT = np.dtype([
    ("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8"), ("words", "<u8", SIZE), ("normals", "u1", 40),
])  # fmt: skip


class Origin:
    """The state of a generator, and the states that follow it.

    Args:
        generator: a CPU generator; its state now.

    Example:
        >>> generator = torch.Generator().manual_seed(7)
        >>> Origin(generator).jump(generator, 10_000)
        >>> number = torch.rand(1, generator=generator)
        >>> torch.equal(number, torch.rand(10_001, generator=generator.manual_seed(7))[-1:])
        True
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._state = generator.get_state()
        self._fields = self._state.numpy().view(LAYOUT)
        self._lines: Words | None = None

    @property
    def is_plausible(self) -> bool:
        """Whether the layout may be that of the state: two of its fields depend on each other."""
        used, left = int(self._fields["next"][0]), int(self._fields["left"][0])
        return (used, left) == (0, 1) or (0 < used <= SIZE and used + left == SIZE + 1)

    @property
    def keeps_normal(self) -> bool:
        """Whether the generator keeps a normal number for a later call. torch makes some of them in pairs."""
        return bool(self._fields["normals"].any())

    def jump(self, generator: torch.Generator, words: int) -> None:
        """Set a generator to the state after this number of words. A normal number that is kept stays."""
        blocks, rest = divmod(words, SIZE)
        block = self._block(blocks)
        used = (int(self._fields["next"][0]) or SIZE) + rest
        if used > SIZE:  # torch makes the next block when it needs a word of it
            block, used = _following(block, SIZE), used - SIZE
        if words:
            state = self._state.clone()
            fields = state.numpy().view(LAYOUT)
            fields["words"], fields["next"], fields["left"] = block, used, SIZE + 1 - used
            generator.set_state(state)
        else:
            generator.set_state(self._state)

    def _block(self, blocks: int) -> Words:
        """The block of the state that comes this many blocks later."""
        if blocks == 0:
            return self._fields["words"][0].astype(np.uint32)
        if self._lines is None:
            self._lines = _table(self._block(0))
        starts = _combinations(blocks - 1) * np.intp(WIDTH) + np.arange(COLUMNS)
        windows = sliding_window_view(self._lines.reshape(-1), SIZE)
        found = np.zeros(SIZE, np.uint32)
        for begin in range(0, COLUMNS, LINES):
            found ^= np.bitwise_xor.reduce(windows[starts[begin : begin + LINES]], axis=0)
        return found


def _following(block: Words, count: int) -> Words:
    """The words after a block, by the recurrence; as many at a time as do not depend on each other."""
    words = np.empty(SIZE + count, np.uint32)
    words[:SIZE] = block
    step = SIZE - AHEAD
    for begin in range(SIZE, SIZE + count, step):
        end = min(begin + step, SIZE + count)
        oldest, second = words[begin - SIZE : end - SIZE], words[begin - SIZE + 1 : end - SIZE + 1]
        mixed = (oldest & UPPER) | (second & LOWER)
        words[begin:end] = words[begin - step : end - step] ^ (mixed >> 1) ^ (mixed & 1) * TWIST
    return words[SIZE:]


def _table(block: Words) -> Words:
    """Line c: the XOR of the words from `row * COLUMNS` on after the block, over the rows that are bits of c.

    The words begin after the block, since 31 bits of its first word are not part of the recurrence.
    """
    words = _following(block, ROWS * COLUMNS + SIZE - 1)
    lines = np.zeros((1 << ROWS, WIDTH), np.uint32)
    for row in range(ROWS):
        begin = row * COLUMNS
        np.bitwise_xor(lines[: 1 << row], words[begin : begin + WIDTH], out=lines[1 << row : 2 << row])
    return lines


@functools.lru_cache(maxsize=1024)
def _combinations(blocks: int) -> npt.NDArray[np.uint8]:
    """For each column, the line of the table that a jump over blocks takes: its terms, a bit for each row."""
    terms = power_of_x(blocks * SIZE).to_bytes(ROWS * COLUMNS // 8, "little")
    bits = np.unpackbits(np.frombuffer(terms, np.uint8), bitorder="little").reshape(ROWS, COLUMNS)
    return np.packbits(bits, axis=0, bitorder="little")[0]


# ---------------------------------------------------------------- polynomials over GF(2)


@functools.cache
def characteristic_polynomial() -> int:
    """The characteristic polynomial of the recurrence.

    A step of the recurrence for all but one of a word's 32 bits is u = x^623 + x^396, and the twist adds bit b of the
    constant to the terms with u^(31 - b).

    Example:
        >>> phi = characteristic_polynomial()
        >>> phi.bit_length() - 1, phi.bit_count()
        (19937, 135)
    """
    found = 1
    for bit in range(31):
        found = _times_u(found) ^ (int(TWIST) >> bit & 1)
    return _times_u(found) << 1 ^ int(TWIST) >> 31


def _times_u(polynomial: int) -> int:
    return polynomial << SIZE - 1 ^ polynomial << AHEAD - 1


@functools.cache
def _gaps() -> tuple[int, ...]:
    """How far each term of the characteristic polynomial, other than the first, is below the first."""
    polynomial = characteristic_polynomial()
    return tuple(DEGREE - term for term in range(DEGREE) if polynomial >> term & 1)


@functools.cache
def _inverse() -> list[list[int]]:
    """The gaps of e, e^2, e^4, ...: those of the terms that a quotient of at most DEGREE has."""
    doubled = [[gap << power for gap in _gaps() if gap << power <= DEGREE] for power in range(DEGREE.bit_length())]
    return [gaps for gaps in doubled if gaps]


def power_of_x(exponent: int) -> int:
    """x^exponent modulo the characteristic polynomial.

    Example:
        >>> power_of_x(5), power_of_x(DEGREE) == characteristic_polynomial() ^ 1 << DEGREE
        (32, True)
    """
    halvings = max(exponent.bit_length() - DEGREE.bit_length() + 1, 0)
    found = 1 << (exponent >> halvings)
    for bit in reversed(range(halvings)):
        found = _remainder(_square(found) << (exponent >> bit & 1))
    return _remainder(found)


def _square(polynomial: int) -> int:
    """Each term x^i becomes x^2i: a zero between all bits."""
    as_bytes = np.frombuffer(polynomial.to_bytes(DEGREE // 8 + 1, "little"), np.uint8)
    return int.from_bytes(SQUARES[as_bytes].tobytes(), "little")


def _remainder(polynomial: int) -> int:
    """The remainder modulo the characteristic polynomial, of a polynomial of at most twice its degree.

    The characteristic polynomial is x^DEGREE (1 + e), where e has terms x^-gap. Over GF(2) its inverse is
    x^-DEGREE (1 + e) (1 + e^2) (1 + e^4) ..., and e^2 has the terms x^(-2 gap).
    """
    quotient = polynomial >> DEGREE
    for gaps in _inverse():
        product = quotient
        for gap in gaps:
            product ^= quotient >> gap
        quotient = product
    for gap in _gaps():
        polynomial ^= quotient << DEGREE - gap
    return polynomial & (1 << DEGREE) - 1


# ---------------------------------------------------------------- calibration


@functools.cache
def jumps_exactly() -> bool:
    """Whether jumps give the states that drawing gives: of all bytes, from a fresh state and from a used one."""
    generator, drawn = torch.Generator(), torch.Generator()
    if generator.get_state().nbytes != LAYOUT.itemsize:
        return False
    for normals, used, words in ((0, 0, 50_003), (1, 300, 324), (1, 301, 40_000), (0, 623, 1)):
        for each in (generator, drawn):
            torch.empty(normals).normal_(generator=each.manual_seed(1))
            torch.empty(used).uniform_(generator=each)  # a word for each number
        origin = Origin(generator)
        if not origin.is_plausible:
            return False
        origin.jump(generator, words)
        torch.empty(words).uniform_(generator=drawn)
        if not torch.equal(generator.get_state(), drawn.get_state()):
            return False
    return True
