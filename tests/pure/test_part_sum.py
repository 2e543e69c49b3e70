"""The checksum of checkpoints: parts of a block in any order add up to the number that the format defines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format.checksum import TABLE, PartSum, checksum

BASE = 0x5851F42D4C957F2D  # of the format, see docs/checkpoint.md


def defined(data: bytes) -> int:
    """The checksum as the page of the format says it."""
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    return sum(word * pow(BASE, i, 2**64) for i, word in enumerate(words)) % 2**64


@given(
    offset=st.integers(0, 9),
    count=st.integers(0, 20),
    cuts=st.lists(st.integers(0, 40), min_size=2, max_size=4).map(sorted),
    seed=st.integers(0, 2**32 - 1),
)
def test_columns_of_a_block_add_up(offset: int, count: int, cuts: list[int], seed: int) -> None:
    """Columns of any width, at any alignment in the block and in memory."""
    width = cuts[-1]
    memory = np.random.default_rng(seed).integers(0, 256, offset + count * width, dtype=np.uint8)
    block = memory[offset:].reshape(count, width)
    sums, again = PartSum(), PartSum(full=False)
    for first, last in zip([0, *cuts], cuts, strict=False):
        sums.add(block[:, first:last], first, width)
        again.add(np.ascontiguousarray(block[:, first:last]), first, width)
    assert sums.checksum == defined(block.tobytes())
    assert sums.nbytes == count * width
    assert again.pairs == sums.pairs


@pytest.mark.parametrize("size", [8 * TABLE - 8, 8 * TABLE, 8 * TABLE + 5, 24 * TABLE + 12])
def test_long_runs(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert checksum(data) == defined(data.tobytes())
    parts = PartSum()
    for first, last in ((0, 1001), (1001, 8 * TABLE - 16), (8 * TABLE - 16, size)):
        parts.add(data[first:last].reshape(1, -1), first, 0)
    assert parts.checksum == defined(data.tobytes())


@given(at=st.integers(0, 99), flip=st.integers(1, 255), swap=st.integers(0, 11), seed=st.integers(0, 2**32 - 1))
def test_a_change_changes_both_sums(at: int, flip: int, swap: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, 100, dtype=np.uint8)
    flipped, swapped = data.copy(), data.copy()
    flipped[at] ^= flip
    swapped[8 * swap : 8 * swap + 8], swapped[:8] = data[:8], data[8 * swap : 8 * swap + 8]
    before = _both(data)
    assert all(a != b for a, b in zip(_both(flipped), before, strict=True))
    assert swap == 0 or all(a != b for a, b in zip(_both(swapped), before, strict=True))


def _both(data: np.ndarray) -> tuple[int, int]:
    sums = PartSum()
    sums.add(data.reshape(1, -1), 0, 0)
    return sums.checksum, sums.pairs
