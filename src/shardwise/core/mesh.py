"""DeviceMesh as data: a grid of ranks, the selected axes of the grid, and their names.

A sliced mesh (`mesh["tp"]`) keeps the full grid and selects axes of it, so it is the same value on every rank; each
rank is in one slice. A mesh has no process groups: everything that depends on the current rank comes from the host that
the fabric layer registers here.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, SupportsIndex, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch

from shardwise.core.factors import common_factors, groups_of
from shardwise.core.intern import Interned
from shardwise.core.mode_stack import ModeStack, entries_in_force
from shardwise.core.opaque import constant_to_compilers
from shardwise.errors import MeshError, UnsupportedError

__all__ = ["Coordinate", "DeviceMesh", "Host", "checked_device_type", "current_mesh", "hosts", "on_one_grid"]

Axis = SupportsIndex | str
Coordinate = tuple[int, ...]  # of a rank: its index along each axis


@runtime_checkable
class Host(Protocol):
    """The queries that depend on the current rank; implemented by fabrics."""

    name: str
    many_ranks: bool

    def rank(self) -> int:
        """The rank of this process."""
        ...

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        """The process group of this rank along `axes`."""
        ...


# Filled by the fabric layer: the host of each fabric by name, and how to choose one if the user names none.
hosts: dict[str, Host] = {}
choose_fabric: list[Callable[[], str]] = []
# Called once, before the first fabric is chosen: loads the modules that fill these.
on_first_fabric: list[Callable[[], None]] = []
# Called once, when the first mesh is made: set-up that DTensors need and imports should not do.
on_first_mesh: list[Callable[[], None]] = []
fabric_mode = ModeStack[str]("fabric")  # set by `virtual()` and `dry_run()`
_mesh_mode: ModeStack[Any] = ModeStack("mesh")  # set by `with mesh:`


def _load_fabrics() -> None:
    for load in on_first_fabric:  # cleared when it is done: another thread waits for the import
        load()
    on_first_fabric.clear()


def chosen_fabric() -> str:
    """The fabric of a mesh that is made now without naming one.

    Example:
        >>> with fabric_mode.holding("dry"):
        ...     chosen_fabric()
        'dry'
    """
    if on_first_fabric:
        _load_fabrics()
    chosen = fabric_mode.values()
    if chosen:
        return chosen[-1]
    return choose_fabric[-1]() if choose_fabric else "virtual"


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:`; None outside of one.

    Example:
        >>> with DeviceMesh("cpu", [0, 1]):
        ...     current_mesh()
        DeviceMesh(cpu 2, virtual)
    """
    chosen = _mesh_mode.values()
    return chosen[-1] if chosen else None


@constant_to_compilers
class DeviceMesh(Interned):
    """A grid of ranks with named axes. Inside `with mesh:` it is the default mesh.

    Args:
        device_type: "cpu" or "cuda".
        mesh: the ranks: a nested list, an array or an integer tensor.
        mesh_dim_names: a name for each axis.
        fabric: "c10d", "virtual" or "dry"; chosen from the context if not given.

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
    _not_constant = ("coordinates", "host", "mesh")  # hidden from compilers: they depend on the rank, or are long

    device_type: str
    fabric: str
    grid_shape: tuple[int, ...]
    grid_ranks: range | tuple[int, ...]  # row-major; a range where the ranks are consecutive
    grid_names: tuple[str, ...] | None
    axes: tuple[tuple[int, ...], ...]  # for each axis of this mesh the axes of the grid in it, major first
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
        device_type = checked_device_type(device_type)
        ranks = _rank_array(mesh)
        names = _checked_names(mesh_dim_names, ranks.ndim)
        flat = tuple(ranks.reshape(-1).tolist())
        if len(set(flat)) != len(flat):
            repeated = sorted(rank for rank, count in Counter(flat).items() if count > 1)
            raise MeshError(f"ranks {repeated} are in the mesh more than once", hint="name each rank once")
        if min(flat) < 0:
            raise MeshError(
                f"the ranks of a mesh count from 0, got {min(flat)}", hint="name each rank by its number in the world"
            )
        fabric = chosen_fabric() if fabric is None else _here(fabric)
        axes = tuple((a,) for a in range(ranks.ndim))
        return cls._intern(device_type, fabric, ranks.shape, _as_range(flat), names, axes, names)

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
        # a plain tuple: torch.load(weights_only=True) refuses a range
        values = [tuple(v) if isinstance(v := getattr(self, n), range) else v for n in self._fields]
        values[self._fields.index("fabric")] = _kind(self.fabric)
        return rebuild_mesh, tuple(values)

    # ---------------------------------------------------------------- axes and slices

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
        """The mesh of the named axes: `mesh["tp"]`, `mesh["dp", "tp"]`. It keeps the full grid."""
        chosen = [self._named_axis(name) for name in ((names,) if isinstance(names, str) else names)]
        if not chosen:
            raise MeshError("an empty selection of axes", hint='name at least one, as in mesh["dp"]')
        grid = [g for axes, _ in chosen for g in axes]
        if len(set(grid)) != len(grid):
            raise MeshError(f"an axis is named twice in {names!r}", hint="name each axis once")
        return self._select(tuple(axes for axes, _ in chosen), tuple(name for _, name in chosen))

    def _named_axis(self, axis: Axis) -> tuple[tuple[int, ...], str]:
        """The axes of the grid that an axis consists of, and its name, which `_flatten` may have given."""
        if isinstance(axis, str) and axis not in (self.mesh_dim_names or ()):
            joined = _flattened.get(self.root, {}).get(axis)
            if joined is not None and set(joined) <= {g for own in self.axes for g in own}:
                return joined, axis
        index = self.axis(axis)
        return self.axes[index], self.axis_name(index)

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

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """As in torch: one axis out of all. The mesh from which this one was sliced can name it afterwards.

        Example:
            >>> mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]]], mesh_dim_names=("dp", "cp", "tp"))
            >>> mesh["dp", "cp"]._flatten("data") is mesh["data"]
            True
        """
        _check_backends({0: backend_override} if backend_override is not None else {})
        flat = self.flatten(name=mesh_dim_name)
        root, (name,) = self.root, flat.mesh_dim_names or ("",)
        if self.ndim == 1 and flat.mesh_dim_names == self.mesh_dim_names:
            return self
        known = _flattened.setdefault(root, {})
        if name in (root.mesh_dim_names or ()) or known.get(name, flat.axes[0]) != flat.axes[0]:
            raise MeshError(f"{root} has another axis {name!r}", hint="flatten axes under a different name")
        known[name] = flat.axes[0]
        return flat

    def _unflatten(
        self,
        dim: Axis,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Iterable[str],
        backend_override: Mapping[str, Any] | None = None,
    ) -> DeviceMesh:
        """As in torch: an axis split into several, the first one major.

        Example:
            >>> world = DeviceMesh("cpu", range(8), mesh_dim_names=("world",))
            >>> world._unflatten(0, (2, 4), ("dp", "tp"))
            DeviceMesh(cpu dp=2 tp=4, virtual)
        """
        _check_backends(backend_override or {})
        at, sizes = self.axis(dim), tuple(mesh_sizes)
        if self.mesh_dim_names is None and self.ndim > 1:
            raise MeshError(f"{self} has no names for its other axes", hint="make it with mesh_dim_names")
        names = [self.axis_name(a) for a in range(self.ndim)]
        new_names = _checked_names(mesh_dim_names, len(sizes)) or ()
        joined = [self.grid_shape[g] for g in self.axes[at]]
        factors = common_factors(joined, sizes)
        if factors is None:
            raise MeshError(
                f"axis {names[at]!r} of {self.shape[at]} ranks does not split into {sizes}",
                hint="the product of the sizes must be that of the axis, and they must not cut across flattened axes",
            )
        kept = _checked_names([*names[:at], *new_names, *names[at + 1 :]], self.ndim - 1 + len(sizes))
        # the axes of the finer grid that each axis of the grid becomes, and that each new axis consists of
        finer: list[int] = []
        becomes: dict[int, tuple[int, ...]] = {}
        pieces = dict(zip(self.axes[at], groups_of(joined, factors), strict=True))
        for g, size in enumerate(self.grid_shape):
            new = [factors[i] for i in pieces[g]] if g in pieces else [size]
            becomes[g] = tuple(range(len(finer), len(finer) + len(new)))
            finer += new
        order = [i for g in self.axes[at] for i in becomes[g]]
        parts: list[tuple[int, ...]] = []
        for group in groups_of(sizes, factors):
            parts.append(tuple(order[i] for i in group) or (len(finer),))
            finer += [] if group else [1]
        rest = [tuple(i for g in axis for i in becomes[g]) for axis in self.axes]
        axes = (*rest[:at], *parts, *rest[at + 1 :])
        return self._over(tuple(finer), axes, kept)

    def view(self, **axes: int) -> DeviceMesh:
        """Another mesh over the same ranks in the same order, with these axes, the first one major.

        Dense layers may be laid out on one view of a world and experts on another. Tensors on different views go
        together in lists (`clip_grad_norm_`, optimizers, `GradScaler`) and checkpoints, and `redistribute(view, ...)`
        moves between them. No rank receives elements that it already has.

        Args:
            axes: how many ranks along each axis; -1 for one of them: as many as are left.

        Example:
            >>> world = DeviceMesh("cpu", range(8), mesh_dim_names=("world",))
            >>> world.view(dp=4, tp=2), world.view(efsdp=-1, ep=4)
            (DeviceMesh(cpu dp=4 tp=2, virtual), DeviceMesh(cpu efsdp=2 ep=4, virtual))
        """
        if self.size() != self.grid_size:
            raise MeshError(
                f"{self} is a slice of a larger mesh, and a view is over all ranks", hint=f"take one of {self.root}"
            )
        sizes = [operator.index(size) for size in axes.values()]
        left, open_ends = math.prod([size for size in sizes if size != -1]), sizes.count(-1)
        if open_ends == 1 and left > 0 and self.size() % left == 0:
            sizes = [self.size() // left if size == -1 else size for size in sizes]
        if not sizes or min(sizes) < 1 or math.prod(sizes) != self.size():
            raise MeshError(
                f"{self} has no view of {axes}: it has {self.size()} ranks",
                hint="give axes whose sizes multiply to the number of ranks; one of them may be -1",
            )
        order = np.argsort(self.coordinates @ _row_major(self.shape))
        ranks = [self.grid_ranks[position] for position in order.tolist()]
        names, own = _checked_names(axes.keys(), len(sizes)), tuple((axis,) for axis in range(len(sizes)))
        return self._intern(self.device_type, self.fabric, tuple(sizes), _as_range(tuple(ranks)), names, own, names)

    def _over(
        self, grid: tuple[int, ...], axes: tuple[tuple[int, ...], ...], names: tuple[str, ...] | None
    ) -> DeviceMesh:
        """A mesh of these axes over the same ranks in a grid of another shape."""
        if sorted(g for axis in axes for g in axis) == list(range(len(grid))) and all(len(axis) == 1 for axis in axes):
            order = [axis[0] for axis in axes]
            wide = [g for g in order if grid[g] > 1]
            if wide == sorted(wide):  # axes of one rank may be anywhere: the mesh is the full grid
                grid, axes = tuple(grid[g] for g in order), tuple((a,) for a in range(len(grid)))
                return self._intern(self.device_type, self.fabric, grid, self.grid_ranks, names, axes, names)
        return self._intern(self.device_type, self.fabric, grid, self.grid_ranks, None, axes, names)

    def _select(self, axes: tuple[tuple[int, ...], ...], names: tuple[str, ...]) -> DeviceMesh:
        # the full grid with numbers for names is the mesh without names
        everything = range(len(self.grid_shape))
        unnamed = axes == tuple((a,) for a in everything) and names == tuple(map(str, everything))
        kept = None if unnamed else names
        return self._intern(
            self.device_type, self.fabric, self.grid_shape, self.grid_ranks, self.grid_names, axes, kept
        )

    @property
    def root(self) -> DeviceMesh:
        """The mesh over the full grid from which this one was sliced (itself, if it is no slice)."""
        axes = tuple((a,) for a in range(len(self.grid_shape)))
        return self._intern(
            self.device_type, self.fabric, self.grid_shape, self.grid_ranks, self.grid_names, axes, self.grid_names
        )

    def axis_of(self, part: DeviceMesh) -> int | None:
        """The axis of this mesh that is the only axis of `part`, a mesh of the same grid; None if there is none.

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

    def __enter__(self) -> Self:
        _mesh_mode.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        entry = next(e for e in reversed(entries_in_force()) if e.mode is _mesh_mode and e.value is self)
        _mesh_mode.leave(entry)

    # ---------------------------------------------------------------- ranks and coordinates

    def size(self, mesh_dim: Axis | None = None) -> int:
        """The number of ranks along an axis, or of the mesh.

        Example:
            >>> DeviceMesh("cpu", [[0, 1, 2]]).size(1)
            3
        """
        return math.prod(self.shape) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    @property
    def grid_size(self) -> int:
        """The number of ranks of the full grid: more than `size()` on a slice."""
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
        """The position of `rank` in the grid (row-major), or None if it is not in it.

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

    # ---------------------------------------------------------------- the current rank: answered by the host

    @property
    def host(self) -> Host:
        """The host of this mesh's fabric."""
        try:
            return hosts[self.fabric]
        except KeyError:
            raise MeshError(f"no fabric named {self.fabric!r}", hint=f"there are {', '.join(hosts)}") from None

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as a tensor of this mesh's shape; for a slice, the slice that goes through my rank."""
        position = 0 if self.size() == self.grid_size else self.position_of(self.get_rank())
        if position is None:
            raise MeshError(f"this rank is not in {self}, so it has no slice", hint="call it on ranks of the mesh")
        members = self.group_through(tuple(range(self.ndim)), position)
        return torch.tensor([self.grid_ranks[i] for i in members]).reshape(self.shape)

    def get_rank(self) -> int:
        """The rank of this process."""
        return self.host.rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's coordinate, or None if it is not in the mesh."""
        return self.coordinate_of(self.get_rank())

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """This rank's coordinate along an axis (which may be left out on a mesh of one axis)."""
        index = self._one_axis(mesh_dim)
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise MeshError(f"rank {self.get_rank()} is not in {self}")
        return coordinate[index]

    def get_group(self, mesh_dim: Axis | None = None) -> Any:
        """The torch process group along an axis (which may be left out on a mesh of one axis)."""
        return self.host.group(self, (self._one_axis(mesh_dim),))

    def get_all_groups(self) -> list[Any]:
        """The process group of every axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def _one_axis(self, axis: Axis | None) -> int:
        if axis is None:
            if self.ndim != 1:
                raise MeshError(f"{self} has {self.ndim} axes", hint="pass mesh_dim: the name or number of an axis")
            return 0
        return self.axis(axis)

    def __repr__(self) -> str:
        sizes = " ".join(
            f"{self.axis_name(a)}={n}" if self.mesh_dim_names else str(n) for a, n in enumerate(self.shape)
        )
        ranks = "" if self.grid_ranks == range(self.grid_size) else f", ranks {list(self.grid_ranks)}"
        part = "" if self.size() == self.grid_size else f" of {self.root.size()}"
        return f"DeviceMesh({self.device_type} {sizes}{part}{ranks}, {_kind(self.fabric)})"


# For the mesh over a full grid, the names that `_flatten` has given to several of its axes. As long as it is alive: a
# program that makes it again names them again.
_flattened: WeakKeyDictionary[DeviceMesh, dict[str, tuple[int, ...]]] = WeakKeyDictionary()


def on_one_grid(first: DeviceMesh, second: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh] | None:
    """Two meshes over the same ranks as meshes over one grid; None if no grid has the axes of both.

    Example:
        >>> world = DeviceMesh("cpu", range(8), mesh_dim_names=("world",))
        >>> loading, dense = world._unflatten(0, (4, 2), ("batch", "tp")), world._unflatten(0, (2, 4), ("dp", "rest"))
        >>> tp, dp = on_one_grid(loading["tp"], dense["dp"])
        >>> tp.root is dp.root, tp.axes, dp.axes
        (True, ((2,),), ((0,),))
    """
    if first.root is second.root:
        return first, second
    if (first.device_type, first.fabric, first.grid_ranks) != (second.device_type, second.fabric, second.grid_ranks):
        return None
    factors = common_factors(first.grid_shape, second.grid_shape)
    if factors is None:
        return None
    grid = list(factors)
    made = []
    for mesh in (first, second):
        groups = groups_of(mesh.grid_shape, factors)
        axes = []
        for axis in mesh.axes:
            axes.append(tuple(i for g in axis for i in groups[g]) or (len(grid),))
            grid += [] if any(groups[g] for g in axis) else [1]
        made.append((mesh, tuple(axes)))
    return tuple(  # pyright: ignore[reportReturnType]
        m._intern(m.device_type, m.fabric, tuple(grid), m.grid_ranks, None, axes, m.mesh_dim_names) for m, axes in made
    )


def _row_major(shape: Sequence[int]) -> np.ndarray:
    """The row-major strides of a shape."""
    return np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])


def _check_backends(chosen: Mapping[Any, Any]) -> None:
    """Accept "fake" only: groups are made on first use, so it changes nothing. Other backends are refused."""
    for axis, backend in chosen.items():
        if backend != "fake":
            raise UnsupportedError(
                f"the backend {backend!r} for axis {axis!r}: all groups have the backend of the default group",
                hint="adopt a torch mesh made with it: its groups are used unchanged",
            )


def _kind(fabric: str) -> str:
    """The kind of a fabric: if ranks are threads of one process, the name of each rank's fabric ends with a number."""
    return fabric.partition("/")[0]


def _here(fabric: str) -> str:
    """The name of the fabric of this kind on the current rank."""
    if on_first_fabric:
        _load_fabrics()
    return hosts[fabric].name if fabric in hosts else fabric


def rebuild_mesh(
    device_type: str, fabric: str, grid_shape: tuple[int, ...], grid_ranks: tuple[int, ...], *rest: Any
) -> DeviceMesh:
    """The mesh of these fields; called by pickle."""
    return DeviceMesh._intern(device_type, _here(fabric), grid_shape, _as_range(grid_ranks), *rest)


def _as_range(ranks: tuple[int, ...]) -> range | tuple[int, ...]:
    """A range if the ranks are consecutive: hashing and comparing it takes constant time."""
    consecutive = range(ranks[0], ranks[0] + len(ranks))
    return consecutive if ranks == tuple(consecutive) else ranks


def checked_device_type(device_type: object) -> str:
    """A type of device that torch knows. An index is refused: it would be that of every rank."""
    try:
        device = torch.device(device_type) if isinstance(device_type, str | torch.device) else None
    except RuntimeError:
        device = None
    if device is None:
        raise MeshError(f"{device_type!r} is not a type of device", hint='as in "cpu" or "cuda"')
    if device.index is not None:
        raise MeshError(
            f"{device_type!r} is one device, and the ranks of a mesh have one each",
            hint=f'pass "{device.type}"; torch.{device.type}.set_device chooses the device of a process',
        )
    return device.type


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
        raise MeshError(f"axis names repeat in {kept}", hint="axis names must be different")
    for name in kept:
        if not isinstance(name, str) or not name.isidentifier():
            raise MeshError(f"{name!r} cannot name an axis", hint="use a word such as 'dp' or 'tp'")
    return kept
