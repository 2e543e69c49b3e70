"""Many tensors in one flat buffer, so that one collective moves them all: the offset of each in it.

A buffer has a row for each rank that shards the parameters, and in each row a slot for each parameter, as long as its
largest local block. Works on the tensors of single ranks, without communication.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import EqualChunks, dense_strides, equal_chunks, runs_of
from shardwise.core.placement import Ragged, Replicate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.block_copies import chunk_rows, chunk_views
from shardwise.torch_private import foreach_copy_

__all__ = ["FlatLayout", "ParamSlot"]

Coordinate = tuple[int, ...]


@dataclass(eq=False)
class ParamSlot:
    """The slot of one parameter in a row of the buffer.

    Args:
        spec: how the parameter is stored.
        axis: the data axis of its mesh that shards it, the most minor axis of its dim; None if it is not sharded.
        dim: the dim that is sharded.
    """

    spec: DTensorSpec
    axis: int | None
    dim: int
    _chunks: dict[int, list[EqualChunks]] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Elements of the slot."""
        return math.prod(self.spec.largest_local_shape)

    @property
    def is_granular(self) -> bool:
        """Whether it is split only between granules."""
        return self.axis is not None and isinstance(self.spec.placements[self.axis], Ragged)

    @functools.cached_property
    def gathered(self) -> DTensorSpec:
        """The layout of the parameter after it is gathered over the data axis."""
        if self.axis is None:
            return self.spec
        placements = [*self.spec.placements]
        placements[self.axis] = Replicate()
        dim_axes = tuple([tuple([axis for axis in axes if axis != self.axis]) for axes in self.spec.dim_axes])
        return DTensorSpec.from_dim_axes(self.spec.mesh, tuple(placements), self.spec.tensor_meta, dim_axes)

    @property
    def ranks(self) -> int:
        """The number of ranks that shard the parameter."""
        return 1 if self.axis is None else self.spec.mesh.shape[self.axis]

    def chunks(self, size: int) -> list[EqualChunks]:
        """The blocks of a dim of `size` over the sharding ranks: of at most two lengths."""
        found = self._chunks.get(size)
        if found is None:
            found = self._chunks[size] = equal_chunks(size, [self.ranks])
        return found

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every block of every rank fills its slot."""
        sizes = self.spec.mesh.shape
        parts = [math.prod([sizes[axis] for axis in axes]) for axes in self.spec.dim_axes]
        return not self.spec.is_strided and all(n % m == 0 for n, m in zip(self.spec.shape, parts, strict=True))

    def cut(self, full: torch.Tensor, coordinate: Coordinate) -> torch.Tensor:
        """A copy of the stored block of the rank at `coordinate`, cut from its gathered parameter."""
        if self.axis is None:
            return full.detach().clone(memory_format=torch.contiguous_format)
        (run,) = runs_of(full.shape[self.dim], (self.spec.division(self.axis).cut(coordinate[self.axis]),))
        part = full.detach().narrow(self.dim, run.start, run.length)
        return part.clone(memory_format=torch.contiguous_format)


class View(NamedTuple):
    """Offset and strides of a view in the memory of a dense tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: Any  # an int

    @classmethod
    def of(cls, view: torch.Tensor, base: torch.Tensor) -> View:
        """The geometry of `view` in `base`."""
        return cls(view.size(), view.stride(), view.storage_offset() - base.storage_offset())

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor of that shape."""
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class FlatLayout:
    """The flat buffer of a group: consecutive slots."""

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        self.slots = tuple(slots)
        self.sizes = [slot.size for slot in self.slots]
        self.offsets = [0, *itertools.accumulate(self.sizes)]
        self.total = self.offsets.pop()
        self.meshes = [slot.spec.mesh for slot in self.slots]
        self._shapes: dict[tuple[Coordinate, ...], tuple[list[Any], list[Any]]] = {}
        self._views: dict[tuple[Any, ...], list[tuple[int, View, View]]] = {}  # by shapes, where blocks are uneven

    def shapes(self, coordinates: Sequence[Coordinate]) -> tuple[list[Any], list[Any]]:
        """The stored block of each parameter on a rank, with strides, and the gathered shapes.

        `coordinates` has the coordinate of the rank on each slot's own mesh.
        """
        key = tuple(coordinates)
        found = self._shapes.get(key)
        if found is None:
            each = list(zip(self.slots, key, strict=True))
            stored = [slot.spec.local_shape(at) for slot, at in each]
            found = self._shapes[key] = (
                [(shape, dense_strides(shape)) for shape in stored],
                [slot.gathered.local_shape(at) for slot, at in each],
            )
        return found

    def joined(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """One row: the stored blocks of a rank, each padded to its slot."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        if self.is_even and {tensor.dtype for tensor in flat} == {dtype}:
            return torch.cat(flat)
        row = (torch.empty if self.is_even else torch.zeros)(self.total, dtype=dtype, device=flat[0].device)
        foreach_copy_([row.narrow(0, at, tensor.numel()) for at, tensor in zip(self.offsets, flat, strict=True)], flat)
        return row

    def blocks(self, row: torch.Tensor, coordinates: Sequence[Coordinate]) -> list[torch.Tensor]:
        """The stored blocks of each parameter, as views of the rank's row."""
        start, stored = row.storage_offset(), self.shapes(coordinates)[0]
        pairs = zip(self.offsets, stored, strict=True)
        return [row.as_strided(shape, stride, start + at) for at, (shape, stride) in pairs]

    def spread(self, buffer: torch.Tensor, full_tensors: Sequence[torch.Tensor]) -> None:
        """Copy the rows of a gathered buffer to the gathered parameters of a rank."""
        if self.is_simple:
            rows = self.slots[0].ranks
            targets = [full.view(rows, -1) for full in full_tensors]
            torch.split_with_sizes_copy(buffer.view(rows, -1), self.sizes, dim=1, out=targets)
        elif pairs := self._pairs(buffer, full_tensors):
            foreach_copy_([full for _, full in pairs], [row for row, _ in pairs])

    def fill(self, buffer: torch.Tensor, full_tensors: Sequence[torch.Tensor]) -> None:
        """Copy the locals of the computation, or their gradients, into the rows of a buffer; gaps are not written."""
        if self.is_simple and {full.dtype for full in full_tensors} == {buffer.dtype}:
            rows = self.slots[0].ranks
            torch.cat([full.reshape(rows, -1) for full in full_tensors], dim=1, out=buffer.view(rows, -1))
        elif pairs := self._pairs(buffer, full_tensors):
            foreach_copy_([row for row, _ in pairs], [full for _, full in pairs])

    def _pairs(
        self, buffer: torch.Tensor, full_tensors: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the buffer and of tensors with the same elements. The choice is cached."""
        if not all(map(torch.Tensor.is_contiguous, full_tensors)):
            return [pair for index, full in enumerate(full_tensors) for pair in self._matched(buffer, index, full)]
        key = tuple([full.shape for full in full_tensors])
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = [
                (index, View.of(row, buffer), View.of(part, full))
                for index, full in enumerate(full_tensors)
                for row, part in self._matched(buffer, index, full)
            ]
        return [(row.on(buffer), part.on(full_tensors[index])) for index, row, part in views]

    def _matched(self, buffer: torch.Tensor, index: int, full: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the buffer and of `full` with the same elements: a pair for each kind of block, two at most.

        Their number does not depend on the number of ranks.
        """
        slot, offset = self.slots[index], self.offsets[index]
        if not full.numel():
            return []
        rows = buffer.view(slot.ranks, self.total)
        if slot.axis is None:
            return [(rows[0].narrow(0, offset, full.numel()).view(full.shape), full)]
        views = [(chunks, chunk_views(full, slot.dim, chunks)) for chunks in slot.chunks(full.shape[slot.dim])]
        return [(chunk_rows(rows, offset, view.shape, chunks), view) for chunks, view in views]

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether the slots leave no gap on any row."""
        return all(slot.is_even for slot in self.slots)

    @functools.cached_property
    def is_simple(self) -> bool:
        """Whether all blocks are even and split dim 0: then one call of torch copies all of them."""
        return self.is_even and all(slot.dim == 0 for slot in self.slots)
