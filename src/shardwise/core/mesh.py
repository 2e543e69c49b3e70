"""DeviceMesh as data: a grid of ranks, which of its axes one looks at, and their names.

A sliced mesh (`mesh["tp"]`) keeps the whole grid and selects axes of it, so it means the same thing on every rank: each
rank lives in the slice that goes through it. Holds no process groups; what depends on "my rank" is asked of the
host that the fabric layer registers here.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, SupportsIndex, runtime_checkable

import numpy as np
import torch

from shardwise.core.intern import Interned
from shardwise.core.mode_stack import ModeStack
from shardwise.core.opaque import constant_to_compilers
from shardwise.errors import MeshError

__all__ = ["Coordinate", "DeviceMesh", "Host", "hosts"]

Axis = SupportsIndex | str
Coordinate = tuple[int, ...]  # of a rank: its index along each axis


@runtime_checkable
class Host(Protocol):
    """What a mesh must ask of whoever runs it."""

    def rank(self) -> int:
        """The rank of this process."""
        ...

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        """The process group of this rank along `axes`."""
        ...


# Filled by the fabric layer: the host of each fabric by name, and how to choose one when the user does not say.
hosts: dict[str, Host] = {}
choose_fabric: list[Callable[[], str]] = []
# Run once, when the first mesh is made: what must be in place before there are DTensors, and not earlier.
on_first_mesh: list[Callable[[], None]] = []
fabric_mode = ModeStack[str]("fabric")  # what `virtual()` and `dry_run()` choose


def chosen_fabric() -> str:
    """The fabric of a mesh that is made here and names none.

    Example:
        >>> with fabric_mode.holding("dry"):
        ...     chosen_fabric()
        'dry'
    """
    chosen = fabric_mode.values()
    if chosen:
        return chosen[-1]
    return choose_fabric[-1]() if choose_fabric else "virtual"


@constant_to_compilers
class DeviceMesh(Interned):
    """A grid of ranks with named axes.

    Args:
        device_type: "cpu" or "cuda".
        mesh: the ranks: a nested list, an array or an integer tensor.
        mesh_dim_names: a name for each axis.
        fabric: "c10d", "virtual" or "dry"; chosen from the surroundings when not given.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
        >>> mesh.shape, mesh["tp"].shape, mesh.coordinate_of(5)
        ((2, 3), (3,), (1, 2))
        >>> mesh.flatten(name="world")
        DeviceMesh(cpu world=6, virtual)
    """

    __slots__ = (
        "_coordinates",
        "_groups",
        "_positions",
        "axes",
        "device_type",
        "fabric",
        "grid_names",
        "grid_ranks",
        "grid_shape",
        "mesh_dim_names",
        "ndim",
        "shape",
    )
    _fields = ("device_type", "fabric", "grid_shape", "grid_ranks", "grid_names", "axes", "mesh_dim_names")
    _untold = ("coordinates", "host", "mesh")  # to compilers: asked of whoever runs it, or long

    device_type: str
    fabric: str
    grid_shape: tuple[int, ...]
    grid_ranks: range | tuple[int, ...]  # row-major; a range where the ranks are consecutive
    grid_names: tuple[str, ...] | None
    axes: tuple[tuple[int, ...], ...]  # for each axis of this mesh the axes of the grid it stands for, major first
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    ndim: int
    _coordinates: np.ndarray | None
    _positions: dict[int, int] | None
    _groups: dict[tuple[int, ...], np.ndarray]

    def __new__(
        cls,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Iterable[str] | None = None,
        fabric: str | None = None,
    ) -> DeviceMesh:
        ranks = _rank_array(mesh)
        names = _checked_names(mesh_dim_names, ranks.ndim)
        flat = tuple(ranks.reshape(-1).tolist())
        if len(set(flat)) != len(flat):
            repeated = sorted(rank for rank, count in Counter(flat).items() if count > 1)
            raise MeshError(
                f"ranks {repeated} stand more than once in the mesh", hint="each rank has one place in a mesh"
            )
        if min(flat) < 0:
            raise MeshError(
                f"the ranks of a mesh count from 0, got {min(flat)}", hint="name each rank by its number in the world"
            )
        if fabric is None:
            fabric = chosen_fabric()
        axes = tuple((a,) for a in range(ranks.ndim))
        return cls._intern(str(device_type), fabric, ranks.shape, _as_range(flat), names, axes, names)

    def _derive(self) -> None:
        put = object.__setattr__
        put(self, "shape", tuple(math.prod(self.grid_shape[g] for g in axis) for axis in self.axes))
        put(self, "ndim", len(self.axes))
        put(self, "_groups", {})
        put(self, "_coordinates", None)
        put(self, "_positions", None)
        while on_first_mesh:
            on_first_mesh.pop(0)()

    def __reduce__(self) -> tuple[Any, ...]:
        # a plain tuple: torch.load(weights_only=True) knows no range
        return rebuild_mesh, tuple(tuple(v) if isinstance(v := getattr(self, n), range) else v for n in self._fields)

    # ---------------------------------------------------------------- looking at parts

    def axis(self, axis: Axis) -> int:
        """The index of an axis given by name or (possibly negative) index.

        Example:
            >>> DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp")).axis("tp")
            1
        """
        if isinstance(axis, str):
            if self.mesh_dim_names is None or axis not in self.mesh_dim_names:
                have = ", ".join(self.mesh_dim_names) if self.mesh_dim_names else "no names"
                raise MeshError(f"{self} has no axis {axis!r}", hint=f"it has {have}")
            return self.mesh_dim_names.index(axis)
        index = operator.index(axis)
        if not -self.ndim <= index < self.ndim:
            raise MeshError(f"{self} has no axis {index}", hint=f"it has {self.ndim} axes")
        return index % self.ndim

    def __getitem__(self, names: str | Iterable[Axis]) -> DeviceMesh:
        """The mesh of the named axes: `mesh["tp"]`, `mesh["dp", "tp"]`. It keeps the grid it was cut from."""
        chosen = [self.axis(name) for name in ((names,) if isinstance(names, str) else names)]
        if not chosen:
            raise MeshError("an empty selection of axes", hint='name at least one, as in mesh["dp"]')
        if len(set(chosen)) != len(chosen):
            raise MeshError(f"an axis stands twice in {names!r}", hint="name each axis once")
        return self._select(tuple(self.axes[a] for a in chosen), tuple(self.axis_name(a) for a in chosen))

    def flatten(self, axes: Iterable[Axis] | None = None, *, name: str | None = None) -> DeviceMesh:
        """One axis out of several (all of them by default), the first one major.

        Example:
            >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
            >>> mesh.flatten(["tp", "dp"]).mesh_dim_names
            ('tp_dp',)
        """
        chosen = [self.axis(a) for a in axes] if axes is not None else list(range(self.ndim))
        if not chosen or len(set(chosen)) != len(chosen):
            raise MeshError(f"cannot flatten the axes {axes!r}", hint="name each axis once, at least one")
        joined = tuple(g for a in chosen for g in self.axes[a])
        names = _checked_names(name, 1) or ("_".join(self.axis_name(a) for a in chosen),)
        return self._select((joined,), names)

    def _select(self, axes: tuple[tuple[int, ...], ...], names: tuple[str, ...]) -> DeviceMesh:
        # the whole grid with numbers for names is the mesh without names
        everything = range(len(self.grid_shape))
        unnamed = axes == tuple((a,) for a in everything) and names == tuple(map(str, everything))
        kept = None if unnamed else names
        return self._intern(
            self.device_type, self.fabric, self.grid_shape, self.grid_ranks, self.grid_names, axes, kept
        )

    @property
    def root(self) -> DeviceMesh:
        """The mesh over the whole grid that this one was cut from (itself, if it was not cut)."""
        axes = tuple((a,) for a in range(len(self.grid_shape)))
        return self._intern(
            self.device_type, self.fabric, self.grid_shape, self.grid_ranks, self.grid_names, axes, self.grid_names
        )

    def axis_of(self, part: DeviceMesh) -> int | None:
        """Which axis of this mesh is the only one of `part`, which was cut from the same grid; None if none is.

        Example:
            >>> mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
            >>> mesh.axis_of(mesh["tp"])
            1
        """
        if self is part:
            return 0
        if self.root is not part.root or part.axes[0] not in self.axes:
            return None
        return self.axes.index(part.axes[0])

    def axis_name(self, axis: int) -> str:
        """The name of an axis, or its number where there are no names."""
        return self.mesh_dim_names[axis] if self.mesh_dim_names else str(axis)

    # ---------------------------------------------------------------- ranks and coordinates

    def size(self, axis: Axis | None = None) -> int:
        """The number of ranks along `axis`, or of the mesh.

        Example:
            >>> DeviceMesh("cpu", [[0, 1, 2]]).size(1)
            3
        """
        return math.prod(self.shape) if axis is None else self.shape[self.axis(axis)]

    @property
    def grid_size(self) -> int:
        """How many ranks the whole grid has: more than `size()` on a slice."""
        return len(self.grid_ranks)

    @property
    def coordinates(self) -> np.ndarray:
        """For each position of the grid (row-major) its coordinate along this mesh's axes: `[grid_size, ndim]`."""
        table = self._coordinates
        if table is None:
            grid = np.indices(self.grid_shape, dtype=np.int64).reshape(len(self.grid_shape), -1)
            columns = [
                np.ravel_multi_index([grid[g] for g in axis], [self.grid_shape[g] for g in axis]) for axis in self.axes
            ]
            table = np.stack(columns, axis=1) if columns else np.zeros((1, 0), dtype=np.int64)
            table.setflags(write=False)
            object.__setattr__(self, "_coordinates", table)
        return table

    def position_of(self, rank: int) -> int | None:
        """Where `rank` stands in the grid (row-major), or None if it is not in it.

        Example:
            >>> DeviceMesh("cpu", [4, 2]).position_of(2)
            1
        """
        if isinstance(self.grid_ranks, range):
            return rank - self.grid_ranks.start if rank in self.grid_ranks else None
        positions = self._positions
        if positions is None:
            positions = {r: i for i, r in enumerate(self.grid_ranks)}
            object.__setattr__(self, "_positions", positions)
        return positions.get(rank)

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of `rank` along this mesh's axes, or None if it is not in the grid."""
        position = self.position_of(rank)
        if position is None:
            return None
        return tuple(self.coordinates[position].tolist())

    def coordinates_of(self, ranks: Sequence[int]) -> np.ndarray:
        """The coordinate of each of the ranks, a row each; -1 for one that is not in the grid.

        Example:
            >>> DeviceMesh("cpu", [[0, 1], [2, 3]]).coordinates_of([3, 7]).tolist()
            [[1, 1], [-1, -1]]
        """
        given = np.asarray(ranks, dtype=np.int64)
        if isinstance(self.grid_ranks, range):
            positions = given - self.grid_ranks.start
        else:
            grid = np.asarray(self.grid_ranks)
            order = np.argsort(grid)
            at = np.minimum(np.searchsorted(grid, given, sorter=order), len(grid) - 1)
            positions = np.where(grid[order[at]] == given, order[at], -1)
        inside = (positions >= 0) & (positions < self.grid_size)
        return np.where(inside[:, None], self.coordinates[np.where(inside, positions, 0)], -1)

    def groups(self, axes: tuple[int, ...]) -> np.ndarray:
        """The groups of grid positions that differ only along `axes` (the first one major): `[groups, members]`.

        Example:
            >>> DeviceMesh("cpu", [[0, 1], [2, 3]]).groups((0,)).tolist()
            [[0, 2], [1, 3]]
        """
        found = self._groups.get(axes)
        if found is None:
            inside = [g for a in axes for g in self.axes[a]]
            outside = [g for g in range(len(self.grid_shape)) if g not in inside]
            members = math.prod(self.grid_shape[g] for g in inside)
            grid = np.arange(self.grid_size).reshape(self.grid_shape)
            found = grid.transpose(outside + inside).reshape(-1, members)
            found.setflags(write=False)
            self._groups[axes] = found
        return found

    def group_through(self, axes: tuple[int, ...], position: int) -> list[int]:
        """The group of grid positions along `axes` (the first one major) that goes through `position`.

        Example:
            >>> DeviceMesh("cpu", [[0, 1], [2, 3]]).group_through((0,), 3)
            [1, 3]
        """
        rows = self.groups(axes)
        return rows[(rows == position).any(axis=1).argmax()].tolist()

    def ranks_along(self, axis: Axis, rank: int) -> list[int]:
        """The ranks of the line along `axis` that goes through `rank`.

        Example:
            >>> DeviceMesh("cpu", [[0, 1], [2, 3]]).ranks_along(0, rank=3)
            [1, 3]
        """
        position = self.position_of(rank)
        if position is None:
            raise MeshError(f"rank {rank} is not in {self}")
        return [self.grid_ranks[i] for i in self.group_through((self.axis(axis),), position)]

    # ---------------------------------------------------------------- what depends on my rank: asked of the host

    @property
    def host(self) -> Host:
        """Whoever runs this mesh."""
        try:
            return hosts[self.fabric]
        except KeyError:
            raise MeshError(f"no fabric named {self.fabric!r}", hint=f"there are {', '.join(hosts)}") from None

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as a tensor of this mesh's shape; for a slice, the slice that goes through my rank."""
        position = 0 if self.size() == self.grid_size else self.position_of(self.get_rank())
        if position is None:
            raise MeshError(f"this rank is not in {self}, so no slice goes through it")
        members = self.group_through(tuple(range(self.ndim)), position)
        return torch.tensor([self.grid_ranks[i] for i in members]).reshape(self.shape)

    def get_rank(self) -> int:
        """The rank of this process."""
        return self.host.rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate, or None if it is not in the mesh."""
        return self.coordinate_of(self.get_rank())

    def get_local_rank(self, axis: Axis | None = None) -> int:
        """This rank's coordinate along `axis` (which may be left out on a mesh of one axis)."""
        index = self._one_axis(axis)
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.get_rank()} is not in {self}")
        return coordinate[index]

    def get_group(self, axis: Axis | None = None) -> Any:
        """The torch process group along `axis` (which may be left out on a mesh of one axis)."""
        return self.host.group(self, (self._one_axis(axis),))

    def get_all_groups(self) -> list[Any]:
        """The process group of every axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def _one_axis(self, axis: Axis | None) -> int:
        if axis is None:
            if self.ndim != 1:
                raise MeshError(f"{self} has {self.ndim} axes", hint="say which one, by name or number")
            return 0
        return self.axis(axis)

    def __repr__(self) -> str:
        sizes = " ".join(
            f"{self.axis_name(a)}={n}" if self.mesh_dim_names else str(n) for a, n in enumerate(self.shape)
        )
        ranks = "" if self.grid_ranks == range(self.grid_size) else f", ranks {list(self.grid_ranks)}"
        part = "" if self.size() == self.grid_size else f" of {self.root.size()}"
        return f"DeviceMesh({self.device_type} {sizes}{part}{ranks}, {self.fabric})"


def rebuild_mesh(
    device_type: str, fabric: str, grid_shape: tuple[int, ...], grid_ranks: tuple[int, ...], *rest: Any
) -> DeviceMesh:
    """The mesh of these fields; what pickle calls."""
    return DeviceMesh._intern(device_type, fabric, grid_shape, _as_range(grid_ranks), *rest)


def _as_range(ranks: tuple[int, ...]) -> range | tuple[int, ...]:
    """A range where the ranks are consecutive: it hashes and compares at once, whatever their number."""
    consecutive = range(ranks[0], ranks[0] + len(ranks))
    return consecutive if ranks == tuple(consecutive) else ranks


def _rank_array(mesh: Any) -> np.ndarray:
    try:
        ranks = mesh.numpy() if isinstance(mesh, torch.Tensor) else np.asarray(mesh)
    except ValueError:
        raise MeshError(f"{mesh!r} is not a grid of ranks", hint="rows must have one length") from None
    if ranks.size == 0 or not np.issubdtype(ranks.dtype, np.integer):
        raise MeshError(f"{mesh!r} is not a grid of ranks", hint="give at least one integer rank")
    return ranks.reshape(1) if ranks.ndim == 0 else ranks


def _checked_names(names: Iterable[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        names = (names,)
    kept = tuple(names)
    if len(kept) != ndim:
        raise MeshError(f"{len(kept)} names {kept} for a mesh of {ndim} axes", hint="one name for each axis")
    if len(set(kept)) != len(kept):
        raise MeshError(f"axis names repeat in {kept}", hint="each axis needs a name of its own")
    for name in kept:
        if not isinstance(name, str) or not name.isidentifier():
            raise MeshError(f"{name!r} cannot name an axis", hint="use a word such as 'dp' or 'tp'")
    return kept
