"""Parameters that are split only between granules (quantization blocks, experts): the cuts, and the flat buffer.

The concatenated parameters of a group are one sequence of elements, and each rank stores a contiguous part of it. Parts
begin at the start of a granule and are as equal as possible. A row of the flat buffer is the part of a rank, padded to
the longest; the rows without padding are the sequence. No communication.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import torch

from shardwise.core.layout import sizes_of_parts
from shardwise.core.placement import Ragged
from shardwise.parallel.data_parallel.flat_params import Coordinate, FlatLayout, ParamSlot

__all__ = ["GranularLayout", "granular_placements"]


def granular_placements(shapes: Sequence[Sequence[int]], granules: Sequence[int], ranks: int) -> list[Ragged]:
    """Splits of several tensors along their first dims that give ranks about equal shares of all of them.

    Args:
        shapes: the shapes of the tensors.
        granules: the number of indices of the first dim of each that stay together.
        ranks: the number of ranks.

    Example:
        >>> granular_placements([(8, 4), (4, 4)], [4, 4], 2)
        [Ragged(0, (4, 4)), Ragged(0, (0, 4))]
        >>> granular_placements([(8, 4), (4, 4)], [2, 1], 2)
        [Ragged(0, (6, 2)), Ragged(0, (0, 4))]
    """
    inner = [math.prod(shape[1:]) for shape in shapes]
    begins = [0, *itertools.accumulate(math.prod(shape) for shape in shapes)]
    total = begins[-1]
    cuts = [0, *(_nearest(rank * total / ranks, shapes, granules, inner, begins) for rank in range(1, ranks)), total]
    placed = []
    for shape, each, begin in zip(shapes, inner, begins, strict=False):
        size = math.prod(shape)
        edges = [min(max(cut - begin, 0), size) // max(each, 1) for cut in cuts]
        rows = [high - low for low, high in itertools.pairwise(edges)]
        placed.append(Ragged(0, rows if size else [shape[0]] + [0] * (ranks - 1)))
    return placed


def _nearest(
    wanted: float, shapes: Sequence[Sequence[int]], granules: Sequence[int], inner: Sequence[int], begins: Sequence[int]
) -> int:
    """The end of a granule that is nearest to an element of the sequence."""
    at = min(bisect.bisect_right(begins, wanted) - 1, len(shapes) - 1)
    step, size = granules[at] * inner[at], math.prod(shapes[at])
    low = int((wanted - begins[at]) // max(step, 1)) * step
    high = min(low + step, size)
    return begins[at] + (low if wanted - begins[at] - low <= begins[at] + high - wanted else high)


class GranularLayout(FlatLayout):
    """A flat buffer in which each row is a rank's part of the concatenated parameters."""

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        super().__init__(slots)
        rows = [sizes_of_parts(slot.spec.division(slot.axis)) for slot in self.slots if slot.axis is not None]
        shapes = [slot.gathered.largest_local_shape for slot in self.slots]
        inner = [math.prod(shape[1:]) for shape in shapes]
        self._lengths = [sum(map(math.prod, zip(part, inner, strict=True))) for part in zip(*rows, strict=True)]
        self.sizes = [math.prod(shape) for shape in shapes]  # of the gathered parameters
        self.total = max(self._lengths)
        self._ends = [self.total - length for length in self._lengths]  # the padding of each row
        self._pieces = [size for pair in zip(self._lengths, self._ends, strict=True) for size in pair]
        self.is_even = not any(self._ends)
        self.is_simple = False
        self._offsets: dict[tuple[Coordinate, ...], list[int]] = {}

    def joined(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
        missing = self.total - sum(tensor.numel() for tensor in flat)
        return torch.cat([*flat, flat[0].new_zeros(missing)] if missing else flat)

    def blocks(self, row: torch.Tensor, coordinates: Sequence[Coordinate]) -> list[torch.Tensor]:
        key, stored = tuple(coordinates), self.shapes(coordinates)[0]
        offsets = self._offsets.get(key)
        if offsets is None:
            offsets = [0, *itertools.accumulate(math.prod(shape) for shape, _ in stored)]
            self._offsets[key] = offsets
        start = row.storage_offset()
        pairs = zip(offsets, stored, strict=False)
        return [row.as_strided(shape, stride, start + at) for at, (shape, stride) in pairs]

    def spread(self, buffer: torch.Tensor, full_tensors: Sequence[torch.Tensor]) -> None:
        flat = buffer if self.is_even else torch.cat(buffer.split(self._pieces)[::2])
        torch.split_with_sizes_copy(flat, self.sizes, out=[full.view(-1) for full in full_tensors])

    def fill(self, buffer: torch.Tensor, full_tensors: Sequence[torch.Tensor]) -> None:
        flat = [full.reshape(-1).to(buffer.dtype) for full in full_tensors]
        if not self.is_even:
            pieces: list[torch.Tensor] = [buffer] * len(self._pieces)
            pieces[::2] = torch.cat(flat).split(self._lengths)
            pieces[1::2] = buffer.new_zeros(sum(self._ends)).split(self._ends)
            flat = pieces
        torch.cat(flat, out=buffer)
