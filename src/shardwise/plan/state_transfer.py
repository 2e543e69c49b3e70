"""A transfer of many tensors between layouts as data: pieces of tensors in buckets, and distances of replicas.

Depends on specs alone, so that every rank makes the same plan. Communicates nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.plan.cost import CostModel

__all__ = ["Distances", "IndexRange", "Piece", "StateTransfer", "plan_buckets", "wire_dtype"]


class IndexRange(NamedTuple):
    """The indices `start` to `stop` of one dim of a global tensor."""

    dim: int
    start: int
    stop: int


class Piece(NamedTuple):
    """A tensor, or a window of it, that is moved at once."""

    tensor: int  # its position among the tensors of the transfer
    window: IndexRange | None  # None: all of it
    turn: int  # chooses among equally near replicas in turn


class StateTransfer(NamedTuple):
    """Tensors in their layouts before and after, and the pieces that are moved together.

    Args:
        sources: the current layout of each tensor.
        targets: its new layout and dtype.
        buckets: the pieces, in the order in which they are moved.
        distances: distances between ranks; None if all are equal.
        meshes: of the sources and targets, each once.
    """

    sources: tuple[DTensorSpec, ...]
    targets: tuple[DTensorSpec, ...]
    buckets: tuple[tuple[Piece, ...], ...]
    distances: Distances | None
    meshes: tuple[DeviceMesh, ...]

    @property
    def ranks(self) -> list[int]:
        """All ranks that hold or want something."""
        return sorted({rank for mesh in self.meshes for rank in mesh.grid_ranks})


def wire_dtype(source: DTensorSpec, target: DTensorSpec) -> torch.dtype:
    """The dtype in which elements are sent: the smaller one. Each element is converted once, on one side."""
    old, new = source.tensor_meta.dtype, target.tensor_meta.dtype
    return new if new.itemsize < old.itemsize else old


# ---------------------------------------------------------------- buckets


def plan_buckets(
    sources: Sequence[DTensorSpec], targets: Sequence[DTensorSpec], limit: int
) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of all tensors, in buckets for which no rank packs or receives more than `limit` bytes.

    A tensor of which a rank has more is cut into windows. A single index of a dim may be larger than `limit`.
    """
    loads: dict[int, list[int]] = {}  # by the number of replicas: the bytes assigned to each turn
    buckets: list[list[Piece]] = []
    held = 0
    for tensor, (source, target) in enumerate(zip(sources, targets, strict=True)):
        replicas = math.prod(source.mesh.shape) // math.prod(
            [source.mesh.shape[axis] for axis in itertools.chain.from_iterable(source.dim_axes)]
        )
        load = loads.setdefault(replicas, [0] * replicas)
        for window, size in _windows(source, target, limit):
            turn = load.index(min(load))
            load[turn] += size
            if not buckets or held + size > limit:
                buckets.append([])
                held = 0
            buckets[-1].append(Piece(tensor, window, turn))
            held += size
    wire = [wire_dtype(*pair).itemsize for pair in zip(sources, targets, strict=True)]
    # wide dtypes first, so that all begin at a multiple of their size in a message
    return tuple(tuple(sorted(bucket, key=lambda piece: -wire[piece.tensor])) for bucket in buckets)


def _windows(source: DTensorSpec, target: DTensorSpec, limit: int) -> Iterator[tuple[IndexRange | None, int]]:
    """The windows of a tensor, and the bytes that a rank may have to stage for each."""
    if 0 in source.shape:
        return
    staged = _staged(source, target, None)
    count = -(-staged // limit)
    if count <= 1 or source.ndim == 0:
        yield None, staged
        return
    dim = _dim_to_cut(source, target, count)
    size = source.shape[dim]
    step = max(size // count, 1)
    while step > 1 and _staged(source, target, IndexRange(dim, 0, step)) > limit:
        step = max(step // 2, 1)
    for start in range(0, size, step):
        window = IndexRange(dim, start, min(start + step, size))
        yield window, _staged(source, target, window)


def _dim_to_cut(source: DTensorSpec, target: DTensorSpec, count: int) -> int:
    """The dim that is sharded least, so that all ranks take part in every window; of those the first that is long."""

    def cost(dim: int) -> tuple[bool, int, int]:
        parts = math.prod([spec.mesh.shape[axis] for spec in (source, target) for axis in spec.dim_axes[dim]])
        return source.shape[dim] < 2 * count, parts, dim

    return min(range(source.ndim), key=cost)


def _staged(source: DTensorSpec, target: DTensorSpec, window: IndexRange | None) -> int:
    """Bytes that a rank packs and receives at most of a piece."""
    itemsize = wire_dtype(source, target).itemsize
    sides = []
    for spec in (source, target):
        shape = list(spec.largest_local_shape)
        if window is not None:
            shape[window.dim] = min(shape[window.dim], window.stop - window.start)
        sides.append(math.prod(shape) * itemsize)
    apart = set(source.mesh.grid_ranks).isdisjoint(target.mesh.grid_ranks)
    return max(sides) if apart else sum(sides)


# ---------------------------------------------------------------- near and far


class Distances:
    """Seconds per byte between two ranks, by the links of the meshes that both are in.

    Args:
        model: the links.
        ranks: all ranks that take part.
        meshes: the first one that has both ranks gives the link.

    Example:
        >>> from shardwise.plan.cost import Link
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("node", "gpu"))
        >>> model = CostModel(axes={"node": Link(1e-4, 1e-8), "gpu": Link(1e-6, 1e-10)})
        >>> Distances(model, range(4), [mesh]).between([0], [0, 1, 2, 3]).tolist()
        [[0.0, 1e-10, 1e-08, 1e-08]]
    """

    def __init__(self, model: CostModel, ranks: Sequence[int], meshes: Sequence[DeviceMesh]) -> None:
        self._tables = [
            (
                mesh.coordinates_of(ranks),
                np.array([model.link(mesh, (axis,)).beta for axis in range(mesh.ndim)]),
            )
            for mesh in meshes
        ]
        self._default = model.link(meshes[0], ()).beta

    def between(self, these: Sequence[int] | np.ndarray, those: Sequence[int] | np.ndarray) -> np.ndarray:
        """The distance of each pair, by their positions among all ranks; the first along the rows."""
        first, second = np.asarray(these), np.asarray(those)
        found = np.full((len(first), len(second)), np.nan)
        for coordinates, betas in self._tables:
            here, there = coordinates[first], coordinates[second]
            known = np.asarray((here >= 0).all(axis=1))[:, None] & np.asarray((there >= 0).all(axis=1))[None, :]
            differs = here[:, None, :] != there[None, :, :]
            farthest = np.where(differs, betas, 0.0).max(axis=2, initial=0.0)
            found = np.where(np.isnan(found) & known, farthest, found)
        return np.where(np.isnan(found), self._default, found)
