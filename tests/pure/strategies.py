"""Hypothesis strategies for the core data: shapes, meshes, placements, shard orders, specs."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import (
    REDUCE_OPS,
    AnyShard,
    MaskPartial,
    Owned,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    StridedShard,
    Zigzag,
)
from shardwise.core.spec import DTYPE_NAMES, DTensorSpec, TensorMeta

AXIS_NAMES = ("dp", "tp", "cp", "ep")
P = ParamSpec("P")
T = TypeVar("T")

KINDS = ("replicate", "shard", "strided", "zigzag", "ragged", "partial", "mask")
LAYOUT_KINDS = ("replicate", "shard", "strided", "zigzag", "ragged")  # those that say where elements are


def composite(build: Callable[Concatenate[DrawFn, P], T]) -> Callable[P, SearchStrategy[T]]:
    """As `st.composite`. Making our objects may draw from `random`, since beartype picks at random which items of a
    sequence it checks; hypothesis refuses that inside a strategy, so the state is put back."""

    @functools.wraps(build)
    def keeping_state(draw: DrawFn, *args: P.args, **kwargs: P.kwargs) -> T:
        state = random.getstate()
        try:
            return build(draw, *args, **kwargs)
        finally:
            random.setstate(state)

    return st.composite(keeping_state)


def sizes(max_size: int = 9) -> SearchStrategy[int]:
    """Sizes of a dim; zero and one come up often."""
    return st.one_of(st.integers(0, max_size), st.sampled_from((0, 1)))


def shapes(*, min_ndim: int = 0, max_ndim: int = 4, max_size: int = 9) -> SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors, zeros and ones included."""
    return st.lists(sizes(max_size), min_size=min_ndim, max_size=max_ndim).map(tuple)


def dtypes() -> SearchStrategy[torch.dtype]:
    """Dtypes, with a short name and without."""
    return st.sampled_from([*DTYPE_NAMES, torch.uint16, torch.float8_e4m3fnuz])


@composite
def rank_grids(draw: DrawFn, *, max_axes: int = 4, max_axis_size: int = 4) -> np.ndarray:
    """Grids of distinct ranks: from zero on, from elsewhere on, or in any order with gaps."""
    shape = draw(st.lists(st.integers(1, max_axis_size), min_size=1, max_size=max_axes))
    count = math.prod(shape)
    match draw(st.sampled_from(("from zero", "from elsewhere", "any"))):
        case "from zero":
            ranks = np.arange(count)
        case "from elsewhere":
            ranks = np.arange(count) + draw(st.integers(1, 5))
        case _:
            ranks = np.random.default_rng(draw(st.integers(0, 99))).permutation(count + 3)[:count]
    return ranks.reshape(shape)


@composite
def meshes(draw: DrawFn, *, max_axes: int = 4, max_axis_size: int = 4, named: bool | None = None) -> DeviceMesh:
    """Root meshes, with names or without."""
    grid = draw(rank_grids(max_axes=max_axes, max_axis_size=max_axis_size))
    has_names = draw(st.booleans()) if named is None else named
    return DeviceMesh("cpu", grid, mesh_dim_names=AXIS_NAMES[: grid.ndim] if has_names else None, fabric="virtual")


@composite
def parts_of(draw: DrawFn, mesh: DeviceMesh) -> DeviceMesh:
    """A part of a mesh with names: some of its axes in any order, or several of them flattened into one."""
    assert mesh.mesh_dim_names is not None
    order = draw(st.permutations(mesh.mesh_dim_names))
    chosen = tuple(order[: draw(st.integers(1, len(order)))])
    return mesh.flatten(chosen) if draw(st.booleans()) else mesh[chosen]


def any_meshes() -> SearchStrategy[DeviceMesh]:
    """Root meshes and slices of meshes."""
    return st.one_of(meshes(), meshes(named=True).flatmap(parts_of))


@composite
def placements(draw: DrawFn, axes: int, ndim: int, *, kinds: Sequence[str] = KINDS) -> tuple[Placement, ...]:
    """A placement for each of `axes` that fits a tensor of `ndim` dims; reductions that may stand together.

    Ragged ones are drawn by `with_sizes`.
    """
    reduce_op = draw(st.sampled_from(REDUCE_OPS))
    usable = [kind for kind in kinds if ndim > 0 or kind not in ("shard", "strided", "zigzag", "ragged")]
    if reduce_op not in ("sum", "avg"):
        usable = [kind for kind in usable if kind != "mask"]

    def placement() -> Placement:
        match draw(st.sampled_from(usable)):
            case "shard" | "ragged":
                return Shard(draw(st.integers(0, ndim - 1)))
            case "strided":
                return StridedShard(draw(st.integers(0, ndim - 1)), draw(st.integers(1, 4)))
            case "zigzag":
                return Zigzag(draw(st.integers(0, ndim - 1)), split_factor=draw(st.integers(1, 2)))
            case "partial":
                return Partial(reduce_op)
            case "mask":
                return MaskPartial()
            case _:
                return Replicate()

    return tuple(placement() for _ in range(axes))


def axes_by_dim(given: Sequence[Placement]) -> dict[int, list[int]]:
    """For each dim that is split, the axes that split it, in the order of the mesh."""
    found: dict[int, list[int]] = {}
    for axis, placement in enumerate(given):
        if isinstance(placement, AnyShard):
            found.setdefault(placement.dim, []).append(axis)
    return found


@composite
def shard_orders(draw: DrawFn, given: Sequence[Placement]) -> dict[int, tuple[int, ...]]:
    """For each dim that is split, its axes in any order, major first."""
    return {dim: tuple(draw(st.permutations(axes))) for dim, axes in axes_by_dim(given).items()}


@composite
def with_sizes(
    draw: DrawFn, given: Sequence[Placement], mesh: DeviceMesh, shape: Sequence[int], order: dict[int, tuple[int, ...]]
) -> tuple[Placement, ...]:
    """Some of the axes that split a dim first do so by given sizes, or one of their ranks owns it."""
    made = list(given)
    for dim, (first, *_) in order.items():
        if not isinstance(made[first], Shard):
            continue
        ranks = mesh.shape[first]
        match draw(st.sampled_from(("shard", "ragged", "blocks", "owned"))):
            case "ragged" | "blocks" as kind:
                count = ranks if kind == "ragged" else 2 * ranks
                cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1)))
                lengths = [high - low for low, high in itertools.pairwise([0, *cuts, shape[dim]])]
                made[first] = Ragged(dim, lengths, draw(st.permutations(range(count))) if kind == "blocks" else None)
            case "owned":
                made[first] = Owned(draw(st.integers(0, ranks - 1)), dim)
            case _:
                pass
    return tuple(made)


@composite
def specs(
    draw: DrawFn,
    *,
    mesh: SearchStrategy[DeviceMesh] | None = None,
    shape: SearchStrategy[tuple[int, ...]] | None = None,
    dtype: SearchStrategy[torch.dtype] | None = None,
    kinds: Sequence[str] = KINDS,
) -> DTensorSpec:
    """Specs of dense row-major tensors: any mesh, placements and shard order."""
    on = draw(any_meshes() if mesh is None else mesh)
    size = draw(shapes() if shape is None else shape)
    given = draw(placements(on.ndim, len(size), kinds=kinds))
    meta = TensorMeta(size, dtype=torch.float32 if dtype is None else draw(dtype))
    order = draw(shard_orders(given))
    if "ragged" in kinds:
        given = draw(with_sizes(given, on, size, order))
    return DTensorSpec(on, given, meta, order)
