"""Which ranks hold which rectangle of a tensor: the data of all pictures of layouts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import MaskPartial, Partial
from shardwise.core.spec import DTensorSpec

__all__ = ["Face", "Holders", "IndexRange", "Panel", "Tile", "face_of", "mesh_ranks", "ranks_text", "some"]


class IndexRange(NamedTuple):
    """Consecutive indices of a dim on the same ranks; `owner`: their coordinates along the axes that shard the dim."""

    start: int
    length: int
    owner: tuple[int, ...]

    @property
    def text(self) -> str:
        """The range as a Python slice: `4:7`."""
        return f"{self.start}:{self.start + self.length}"


class Holders(NamedTuple):
    """The ranks of a block. Each group has the value, as the `reduce_op` of its ranks' local values."""

    groups: tuple[tuple[int, ...], ...]
    reduce_op: str | None  # None: nothing is Partial

    @property
    def text(self) -> str:
        """`0`, `0,2` for replicas, `0+1` for a sum, `max(0,1)` for others, `0+1, 2+3` for replicas of a sum."""
        if self.reduce_op is None:
            return ranks_text([group[0] for group in self.groups])
        parts = [_reduced_text(group, self.reduce_op) for group in self.groups]
        return ", ".join(parts if len(parts) <= 3 else [*parts[:2], "...", parts[-1]])

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(itertools.chain.from_iterable(self.groups))


@dataclass(frozen=True, slots=True)
class Tile:
    """One rectangle of a face: its rows and columns, and its ranks."""

    rows: IndexRange
    columns: IndexRange
    holders: Holders


@dataclass(frozen=True, slots=True)
class Panel:
    """One slice of a tensor: `fixed` index ranges of the dims that are not shown."""

    fixed: tuple[tuple[int, IndexRange], ...]
    face: Face

    def tile(self, rows: IndexRange, columns: IndexRange) -> Tile:
        """The tile at two index ranges of the face."""
        return Tile(rows, columns, self.face.holders(rows, columns, self.fixed))


@dataclass(frozen=True, eq=False)
class Face:
    """The two dims of a tensor that a picture shows; further sharded dims become slices.

    A tensor of one dim has one row, a tensor of no dims one row and one column.
    """

    spec: DTensorSpec
    row_dim: int | None
    column_dim: int | None

    @functools.cached_property
    def rows(self) -> tuple[IndexRange, ...]:
        """The index ranges from top to bottom."""
        return self._index_ranges(self.row_dim)

    @functools.cached_property
    def columns(self) -> tuple[IndexRange, ...]:
        """The index ranges from left to right."""
        return self._index_ranges(self.column_dim)

    def _index_ranges(self, dim: int | None) -> tuple[IndexRange, ...]:
        return (IndexRange(0, 1, ()),) if dim is None else index_ranges(self.spec, dim)

    @property
    def sliced_dims(self) -> tuple[int, ...]:
        """The sharded dims that are not shown: one panel for each combination of their index ranges."""
        shown = (self.row_dim, self.column_dim)
        return tuple(dim for dim, axes in enumerate(self.spec.dim_axes) if axes and dim not in shown)

    @property
    def panel_count(self) -> int:
        """The number of panels."""
        return math.prod(len(index_ranges(self.spec, dim)) for dim in self.sliced_dims)

    def panels(self) -> Iterator[Panel]:
        """The panels, the first dim major."""
        choices = [[(dim, index_range) for index_range in index_ranges(self.spec, dim)] for dim in self.sliced_dims]
        return (Panel(fixed, self) for fixed in itertools.product(*choices))

    def holders(self, rows: IndexRange, columns: IndexRange, fixed: Sequence[tuple[int, IndexRange]] = ()) -> Holders:
        """The ranks of the block at these index ranges."""
        where: list[int | slice] = [slice(None)] * self.spec.mesh.ndim
        for dim, index_range in ((self.row_dim, rows), (self.column_dim, columns), *fixed):
            if dim is not None:
                for axis, index in zip(self.spec.dim_axes[dim], index_range.owner, strict=True):
                    where[axis] = index
        free = [axis for axis, index in enumerate(where) if isinstance(index, slice)]
        found = mesh_ranks(self.spec.mesh)[tuple(where)]
        partial = [axis for axis in free if axis in self.spec.partial_axes]
        order = [free.index(axis) for axis in free if axis not in partial] + [free.index(axis) for axis in partial]
        addends = math.prod([self.spec.mesh.shape[axis] for axis in partial])
        groups = found.transpose(order).reshape(-1, addends).tolist()
        return Holders(tuple(map(tuple, groups)), _reduce_op(self.spec))

    @functools.cached_property
    def idle_ranks(self) -> list[int]:
        """The ranks without elements."""
        busy = np.ones(self.spec.mesh.shape, dtype=bool)
        for dim, axes in enumerate(self.spec.dim_axes):
            if axes:
                holding = np.zeros([self.spec.mesh.shape[axis] for axis in axes], dtype=bool)
                for index_range in index_ranges(self.spec, dim):
                    holding[index_range.owner] = index_range.length > 0
                rest = [1 if axis not in axes else n for axis, n in enumerate(self.spec.mesh.shape)]
                busy &= holding.transpose(np.argsort(axes)).reshape(rest)
        if 0 in self.spec.shape:
            busy[...] = False
        return mesh_ranks(self.spec.mesh)[~busy].tolist()


@functools.lru_cache(maxsize=256)
def face_of(spec: DTensorSpec) -> Face:
    """Choose the two dims to draw: the last sharded dims, else the last dims.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), fabric="dry")
        >>> from shardwise.core.notation import parse_spec
        >>> face = face_of(parse_spec("f32[10,7] dp:S0 tp:S1", mesh))
        >>> [segment.text for segment in face.rows], [segment.text for segment in face.columns]
        (['0:5', '5:10'], ['0:4', '4:7'])
        >>> face.holders(face.rows[1], face.columns[0]).text
        '2'
    """
    split = [dim for dim, axes in enumerate(spec.dim_axes) if axes][-2:]
    others = [dim for dim in reversed(range(spec.ndim)) if dim not in split]
    shown = sorted((split + others)[:2])
    if len(shown) < 2:
        return Face(spec, None, shown[0] if shown else None)
    return Face(spec, shown[0], shown[1])


@functools.lru_cache(maxsize=256)
def index_ranges(spec: DTensorSpec, dim: int) -> tuple[IndexRange, ...]:
    """The index ranges of a dim in order; an empty dim has one empty range."""
    axes = spec.dim_axes[dim]
    found = []
    for owner in itertools.product(*(range(spec.mesh.shape[axis]) for axis in axes)):
        coordinate = [0] * spec.mesh.ndim
        for axis, index in zip(axes, owner, strict=True):
            coordinate[axis] = index
        found += [IndexRange(run.start, run.length, owner) for run in spec.runs(dim, tuple(coordinate)) if run.length]
    return tuple(sorted(found)) or (IndexRange(0, 0, (0,) * len(axes)),)


def mesh_ranks(mesh: DeviceMesh) -> np.ndarray:
    """The ranks in the shape of the mesh; for a slice, of the first slice."""
    positions = mesh.groups(tuple(range(mesh.ndim)))[0]
    return np.asarray(mesh.grid_ranks)[positions].reshape(mesh.shape)


def _reduce_op(spec: DTensorSpec) -> str | None:
    found = [spec.placements[axis] for axis in spec.partial_axes]
    ops = {"mask" if isinstance(p, MaskPartial) else p.reduce_op for p in found if isinstance(p, Partial)}
    return None if not ops else ops.pop() if len(ops) == 1 else "sum"


def _reduced_text(group: Sequence[int], reduce_op: str) -> str:
    if reduce_op in ("sum", "mask"):
        shown = list(map(str, group)) if len(group) <= 4 else [str(group[0]), str(group[1]), "...", str(group[-1])]
        return "+".join(shown)
    return f"{reduce_op}({ranks_text(group)})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as short text: `0-7` for consecutive ones, `0,8,...,56` for equally spaced ones.

    Example:
        >>> ranks_text([3]), ranks_text([0, 2]), ranks_text(range(8)), ranks_text(range(0, 64, 8))
        ('3', '0,2', '0-7', '0,8,...,56')
        >>> ranks_text([0, 1, 2, 3, 8, 9, 10, 11])
        '0-3,8-11'
    """
    kept = sorted(ranks)
    steps = {b - a for a, b in itertools.pairwise(kept)}
    if len(kept) > 3 and len(steps) == 1 and steps != {1}:
        return f"{kept[0]},{kept[1]},...,{kept[-1]}"
    parts = []
    for _, run in itertools.groupby(enumerate(kept), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts += [f"{members[0]}-{members[-1]}"] if len(members) > 2 else list(map(str, members))
    return ",".join(parts if len(parts) <= 5 else [*parts[:2], "...", parts[-1]])


def some(items: Sequence[IndexRange], most: int) -> list[IndexRange | None]:
    """At most `most` of the items: the first ones and the last, with None in place of omitted ones.

    Example:
        >>> [item and item.start for item in some([IndexRange(i, 1, ()) for i in range(9)], 4)]
        [0, 1, None, 8]
    """
    if len(items) <= most:
        return list(items)
    return [*items[: most - 2], None, items[-1]]
