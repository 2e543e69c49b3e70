"""Layouts of the planner as small integers, and the facts of one planning problem."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from shardwise.core.layout import Division, longest
from shardwise.core.placement import AnyShard, MaskPartial, Partial, Placement, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec
from shardwise.plan.cost import CostModel, links_of

__all__ = ["Dims", "DistState", "Problem", "Splits", "common_beginning", "dims_of", "division_of"]

REPLICATE = Replicate()

# The splits of a dim, major first: the number of an axis, plus the number of axes times the number of the kind of split
# if that is no plain `Shard`. Plain splits are thus the axes themselves, as in `DTensorSpec.dim_axes`.
Splits = tuple[int, ...]
Dims = tuple[Splits, ...]


class DistState(NamedTuple):
    """The splits of each dim, and the axes to be reduced. Other axes are replicated, or remain Partial."""

    dims: Dims
    partial: tuple[int, ...]


ARRIVED = DistState(((-1,),), ())  # on another mesh than the source's


def dims_of(spec: DTensorSpec) -> Dims:
    """The splits of each dim, without axes of one rank."""
    sizes = spec.mesh.shape
    if 1 not in sizes and not spec.is_strided:
        return spec.dim_axes
    axes, placements = len(sizes), spec.placements
    return tuple(
        [tuple([a + axes * _kind_of(placements[a]) for a in split if sizes[a] > 1]) for split in spec.dim_axes]
    )


# Kinds of splits by number: even numbers are twice the rows of a `StridedShard`, odd ones are given out as other
# placements come, on dim 0. They stay as long as these: sizes that are seen once must not stay for ever.
_numbers: WeakKeyDictionary[AnyShard, int] = WeakKeyDictionary()
_numbered: WeakValueDictionary[int, AnyShard] = WeakValueDictionary()
_odd = itertools.count(1, 2)


def _on_first_dim(spec: DTensorSpec) -> list[AnyShard]:
    return [p.on_dim(0) for p in spec.placements if isinstance(p, AnyShard)] if spec.is_strided else []


def _kind_of(placement: Placement) -> int:
    match placement:
        case StridedShard(split_factor=rows):
            return 2 * rows
        case AnyShard() if not isinstance(placement, Shard):
            shard = placement.on_dim(0)
            number = _numbers.get(shard)
            if number is None:
                number = _numbers.setdefault(shard, next(_odd))
                _numbered[number] = shard
            return number
        case _:
            return 0


def shard_of(way: int, dim: int = 0) -> AnyShard:
    """The placement of the kind of split with this number."""
    if way % 2:
        return _numbered[way].on_dim(dim)
    return StridedShard(dim, way // 2) if way else Shard(dim)


def division_of(way: int, parts: int) -> Division:
    """How a dim is cut into `parts` by the kind of split with this number."""
    return shard_of(way).division(parts)


def common_beginning(have: Splits, want: Splits) -> int:
    """The length of the common prefix of two lists."""
    common = 0
    for a, b in zip(have, want, strict=False):
        if a != b:
            break
        common += 1
    return common


class Problem:
    """Source and target of a search."""

    def __init__(self, model: CostModel, source: DTensorSpec, target: DTensorSpec) -> None:
        mesh = source.mesh
        self.source, self.target, self.mesh = source, target, mesh
        self.on_first_dim = _on_first_dim(source) + _on_first_dim(target)  # kept for as long as their numbers are used
        self.links = links_of(model, mesh)
        self.sizes, self.axes, self.shape = mesh.shape, mesh.ndim, source.shape
        self.itemsize = source.tensor_meta.dtype.itemsize
        self.nbytes = math.prod(self.shape) * self.itemsize
        self.same_mesh = mesh is target.mesh
        self.kept = _kept_partials(source, target) if target.partial_axes and self.same_mesh else frozenset()
        self.start = DistState(dims_of(source), self._pending(source))
        self.goal = dims_of(target)
        self.strided = source.is_strided or target.is_strided
        self.leaf = DistState(self.goal, ()) if self.same_mesh else ARRIVED  # the state after the last collective
        self.wanted_dim = self._wanted_dims() if self.same_mesh else {}
        self._most: dict[Dims, int] = {} if self.same_mesh else {ARRIVED.dims: target.local_bytes}
        self._mean: dict[Dims, float] = {}
        self._sliced: dict[DistState, DistState] = {}
        self.goal_mean = self.nbytes / math.prod([target.mesh.shape[a] for axes in target.dim_axes for a in axes])
        self.missing_of: dict[Dims, float] = {}  # cache of `plan.missing_bytes`
        self.bounds: dict[tuple[str, Any], Any] = {}  # cache of `plan.heuristic`

    def _pending(self, source: DTensorSpec) -> tuple[int, ...]:
        if not source.partial_axes:
            return ()
        return tuple([a for a in source.partial_axes if self.sizes[a] > 1 and a not in self.kept])

    def _wanted_dims(self) -> dict[int, int]:
        """For each axis that splits a dim in the goal, that dim."""
        return {split % self.axes: dim for dim, splits in enumerate(self.goal) for split in splits}

    # ---------------------------------------------------------------- sizes of states

    def most(self, dims: Dims) -> int:
        """The bytes of the largest local part."""
        found = self._most.get(dims)
        if found is None:
            found = self.itemsize
            for size, splits in zip(self.shape, dims, strict=True):
                found *= self.longest_part(size, splits)
            self._most[dims] = found
        return found

    def longest_part(self, size: int, splits: Splits) -> int:
        """The largest local size of a dim of `size`."""
        left = size
        for split in splits:
            if split >= self.axes:
                return longest(size, [division_of(s // self.axes, self.sizes[s % self.axes]) for s in splits])
            left = -(-left // self.sizes[split])
        return left

    def mean(self, dims: Dims) -> float:
        """The average bytes of a local part."""
        found = self._mean.get(dims)
        if found is None:
            found = float(self.nbytes)
            for splits in dims:
                for split in splits:
                    found /= self.sizes[split % self.axes]
            self._mean[dims] = found
        return found

    def divides(self, dims: Dims) -> bool:
        """Whether all local parts are equally large."""
        return self.most(dims) == self.mean(dims)

    # ---------------------------------------------------------------- slices, which cost nothing

    def used_axes(self, state: DistState) -> set[int]:
        """The axes that are not replicated."""
        return {*state.partial, *self.kept, *[split % self.axes for splits in state.dims for split in splits]}

    def slice_to_goal(self, state: DistState) -> DistState:
        """`state` after every slice towards the goal; slices are free and never make later steps dearer."""
        if state.dims == self.goal or not self.same_mesh:
            return state
        found = self._sliced.get(state)
        if found is None:
            dims = self._dims_sliced_to_goal(state)
            found = self._sliced[state] = state if dims == state.dims else DistState(dims, state.partial)
        return found

    def _dims_sliced_to_goal(self, state: DistState) -> Dims:
        used: set[int] | None = None
        sliced: list[Splits] = []
        for have, want in zip(state.dims, self.goal, strict=True):
            upto = len(have)
            if upto < len(want) and want[:upto] == have:
                used = used or self.used_axes(state)
                while upto < len(want) and want[upto] % self.axes not in used:
                    upto += 1
                have = want[:upto]
            sliced.append(have)
        return tuple(sliced)

    def early_slices(self, state: DistState) -> list[DistState]:
        """`state` with replicated axes sliced, so that less is reduced, or less crosses the slower links; a second
        collective must gather it again."""
        if not state.partial and (self.links.uniform or not self.same_mesh):
            return []
        used = self.used_axes(state)
        free = tuple([axis for axis, n in enumerate(self.sizes) if n > 1 and axis not in used])
        extras = [free, *[(axis,) for axis in free]] if len(free) > 1 else [free] if free else []
        dims = state.dims
        return [
            DistState((*dims[:dim], (*splits, *extra), *dims[dim + 1 :]), state.partial)
            for extra in extras
            for dim, splits in enumerate(dims)
        ]

    # ---------------------------------------------------------------- specs, for the states of the chosen path alone

    def spec(self, state: DistState) -> DTensorSpec:
        """The spec of a state, with the placements of the source or the target where it agrees with these."""
        if state == self.leaf and all(self.source.placements[a] is self.target.placements[a] for a in self.kept):
            return self.unreduced()
        if state == self.start:
            return self.source
        placements: list[Placement] = [REPLICATE] * self.axes
        for axis in (*state.partial, *self.kept):
            placements[axis] = self.source.placements[axis]
        for dim, splits in enumerate(state.dims):
            for split in splits:
                placements[split % self.axes] = shard_of(split // self.axes, dim)
        dim_axes = [tuple([split % self.axes for split in splits]) for splits in state.dims]
        return DTensorSpec.from_dim_axes(self.mesh, tuple(placements), self.source.tensor_meta, dim_axes)

    def unreduced(self) -> DTensorSpec:
        """The target before axes become Partial."""
        target = self.target
        fresh = [a for a in target.partial_axes if target.mesh.shape[a] > 1 and a not in self.kept]
        if not fresh:
            return target
        placements = tuple([REPLICATE if a in fresh else p for a, p in enumerate(target.placements)])
        return DTensorSpec.from_dim_axes(target.mesh, placements, target.tensor_meta, target.dim_axes)


def _kept_partials(source: DTensorSpec, target: DTensorSpec) -> frozenset[int]:
    """The axes that are Partial before and after, which no step changes."""
    return frozenset(
        axis
        for axis in source.partial_axes
        if source.mesh.shape[axis] > 1 and _may_be_called(source.placements[axis], target.placements[axis])
    )


def _may_be_called(old: Placement, new: Placement) -> bool:
    """Whether a tensor with placement `old` also has placement `new`: a mask-partial is a sum."""
    if not isinstance(new, Partial):
        return False
    return old is new or (isinstance(old, MaskPartial) and new.reduce_op == "sum")
