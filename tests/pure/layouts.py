"""Pairs of layouts for hypothesis, and an oracle of who holds what, by torch.chunk on lists of indices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import AnyShard, Owned, Partial, Placement, Ragged, Replicate, StridedShard, Zigzag
from shardwise.core.spec import DTensorSpec, TensorMeta
from tests.pure.strategies import KINDS, LAYOUT_KINDS, composite, placements, shard_orders, sizes, with_sizes


@composite
def mesh_shapes(draw: DrawFn, *, max_axes: int = 4, max_ranks: int = 16) -> tuple[int, ...]:
    """Shapes of meshes of up to `max_ranks` ranks; axes of one rank among them."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        shape.append(draw(st.integers(1, min(4, max_ranks // max(1, int(np.prod(shape)))))))
    return tuple(shape)


@composite
def meshes_of(draw: DrawFn, *, max_axes: int = 4, max_ranks: int = 16) -> DeviceMesh:
    """Virtual meshes over the ranks from zero on."""
    shape = draw(mesh_shapes(max_axes=max_axes, max_ranks=max_ranks))
    return DeviceMesh("cpu", np.arange(int(np.prod(shape))).reshape(shape), fabric="virtual")


def small_shapes(max_ndim: int = 4, max_size: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes small enough to be compared element by element; zeros, ones and uneven sizes among them."""
    return st.lists(sizes(max_size), min_size=0, max_size=max_ndim).map(tuple)


@composite
def spec_pairs(
    draw: DrawFn,
    *,
    source_kinds: Sequence[str] = KINDS,
    target_kinds: Sequence[str] = KINDS,
    two_meshes: bool = False,
    max_axes: int = 4,
    max_ranks: int = 16,
    max_ndim: int = 4,
    dtype: torch.dtype = torch.float64,
) -> tuple[DTensorSpec, DTensorSpec]:
    """Two layouts of one tensor such that the first can become the second."""
    mesh = draw(meshes_of(max_axes=max_axes, max_ranks=max_ranks))
    other = draw(meshes_of(max_axes=max_axes, max_ranks=max_ranks)) if two_meshes else mesh
    meta = TensorMeta(draw(small_shapes(max_ndim)), dtype=dtype)
    before = draw(placements(mesh.ndim, len(meta.shape), kinds=source_kinds))
    after = draw(placements(other.ndim, len(meta.shape), kinds=target_kinds))
    if mesh is other:
        after = tuple(map(_reachable, before, after))
    return (
        draw(_spec_of(mesh, before, meta, "ragged" in source_kinds)),
        draw(_spec_of(other, after, meta, "ragged" in target_kinds)),
    )


@composite
def _spec_of(
    draw: DrawFn, mesh: DeviceMesh, given: tuple[Placement, ...], meta: TensorMeta, ragged: bool
) -> DTensorSpec:
    order = draw(shard_orders(given))
    return DTensorSpec(mesh, draw(with_sizes(given, mesh, meta.shape, order)) if ragged else given, meta, order)


def _reachable(old: Placement, new: Placement) -> Placement:
    """Nothing that is sharded becomes Partial."""
    return Replicate() if isinstance(new, Partial) and isinstance(old, AnyShard) else new


def plain_pairs(**options: object) -> st.SearchStrategy[tuple[DTensorSpec, DTensorSpec]]:
    """Pairs without Partial."""
    return spec_pairs(source_kinds=LAYOUT_KINDS, target_kinds=LAYOUT_KINDS, **options)


# ---------------------------------------------------------------- who holds what


def held(spec: DTensorSpec, coordinate: Sequence[int]) -> tuple[list[int], ...]:
    """For each dim the global indices that the rank at `coordinate` holds, in the order it holds them."""
    found = []
    for dim, size in enumerate(spec.shape):
        indices = torch.arange(size)
        for axis in dict(spec.shard_order).get(dim, ()):
            placement = spec.placements[axis]
            rows = placement.split_factor if isinstance(placement, StridedShard | Zigzag) else 1
            parts, at = spec.mesh.shape[axis], coordinate[axis]
            if isinstance(placement, Ragged):
                blocks, order = indices.split(placement.sizes), placement.blocks or range(parts)
                each = len(order) // parts
                indices = torch.cat([blocks[block] for block in sorted(order[at * each : (at + 1) * each])])
                continue
            if isinstance(placement, Owned):
                indices = indices if at == placement.rank else indices[:0]
                continue
            count, mine = parts, [at]
            if isinstance(placement, Zigzag):
                count, mine = 2 * parts, [at, 2 * parts - 1 - at]
                if placement.blocks is not None:
                    count = len(placement.blocks)
                    mine = sorted(placement.blocks[at * count // parts : (at + 1) * count // parts])
            indices = torch.cat([_chunk(row, count, block) for row in indices.chunk(rows) for block in mine])
        found.append(indices.tolist())
    return tuple(found)


def _chunk(indices: torch.Tensor, parts: int, at: int) -> torch.Tensor:
    chunks = indices.chunk(parts)
    return chunks[at] if at < len(chunks) else indices[:0]


def cells(spec: DTensorSpec, rank: int) -> set[tuple[int, ...]]:
    """The elements of the global tensor that `rank` holds; none outside the mesh."""
    coordinate = spec.mesh.coordinate_of(rank)
    return set() if coordinate is None else set(itertools.product(*held(spec, coordinate)))


def average_lack(source: DTensorSpec, target: DTensorSpec) -> float:
    """Bytes that a rank of the target's mesh needs and does not hold, on average."""
    lacking = [len(cells(target, rank) - cells(source, rank)) for rank in target.mesh.grid_ranks]
    return sum(lacking) / len(lacking) * target.tensor_meta.dtype.itemsize
