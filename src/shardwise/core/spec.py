"""TensorMeta, ShardOrder and DTensorSpec: the layout of one global tensor on a mesh.

A spec has the local shape and offset of every coordinate.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch

from shardwise.core.intern import Interned
from shardwise.core.layout import (
    Block,
    Division,
    Run,
    block_of,
    dense_strides,
    longest,
    misfit,
    nested_chunk,
    normalize_dim,
    runs_of,
)
from shardwise.core.mesh import DeviceMesh, hosts
from shardwise.core.opaque import constant_to_compilers
from shardwise.core.placement import (
    AnyShard,
    Owned,
    Partial,
    Placement,
    Ragged,
    Replicate,
    Shard,
    Zigzag,
    as_placement,
)
from shardwise.core.symbolic import has_symbols, hinted, known_value, specialized, unrecorded
from shardwise.errors import LayoutError

__all__ = ["DTensorSpec", "ShardOrder", "ShardOrderEntry", "TensorMeta", "checked_placements", "dtype_name"]

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex128: "c128", torch.complex64: "c64", torch.complex32: "c32",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: f32, bf16, i64, b8.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bf16'
    """
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def _as_size(size: Any) -> Any:
    # operator.index would fix a symbolic integer to one value
    return size if isinstance(size, torch.SymInt) else operator.index(size)


@constant_to_compilers
class TensorMeta(Interned):
    """Shape, stride and dtype of a global tensor.

    Example:
        >>> TensorMeta((8, 32), dtype=torch.float32)
        f32[8,32]
        >>> TensorMeta((2, 2)) is TensorMeta(torch.Size((2, 2)), (2, 1), torch.float32)
        True
    """

    __slots__ = ("_contiguous", "dtype", "is_symbolic", "shape", "stride")
    _fields = ("shape", "stride", "dtype")
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_symbolic: bool  # whether some sizes are those of a compiler, known only when the program runs

    def __new__(
        cls,
        shape: Iterable[SupportsIndex],
        stride: Iterable[SupportsIndex] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TensorMeta:
        try:
            size: torch.Size = torch.Size(shape)  # pyright: ignore[reportArgumentType]  # it takes any integers
            strides = dense_strides(size) if stride is None else tuple(map(_as_size, stride))
        except (TypeError, ValueError):
            given = f"{shape!r}" if stride is None else f"{shape!r} with strides {stride!r}"
            raise LayoutError(f"{given} is not a shape", hint="as in (8, 32): an integer for each dim") from None
        return cls._intern(size, strides, dtype)

    def _derive(self) -> None:
        object.__setattr__(self, "is_symbolic", has_symbols(self.shape) or has_symbols(self.stride))
        if not self.is_symbolic and min(self.shape, default=0) < 0:
            raise LayoutError(f"{tuple(self.shape)} is not a shape", hint="sizes count from 0")
        if len(self.stride) != len(self.shape):
            raise LayoutError(f"strides {self.stride} for shape {tuple(self.shape)}", hint="one stride for each dim")
        # torch.Size does not convert the integers of numpy
        object.__setattr__(self, "shape", torch.Size(map(_as_size, self.shape)))
        # comparing symbolic sizes adds a guard: only when requested
        object.__setattr__(self, "_contiguous", None if self.is_symbolic else self.stride == dense_strides(self.shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are exactly those of a new tensor of this shape."""
        return self.stride == dense_strides(self.shape) if self._contiguous is None else self._contiguous

    def dense(self) -> TensorMeta:
        """The metadata of a copy of the tensor: the same order of dims in memory, without gaps and overlaps."""
        return _dense(self) if self.is_symbolic else known_dense(self)

    def hinted(self) -> TensorMeta:
        """The metadata with the sizes of the inputs of a compiler's trace; itself, if all sizes are known."""
        if not self.is_symbolic:
            return self
        return self._intern(torch.Size(hinted(self.shape)), hinted(self.stride), self.dtype)

    def specialized(self) -> TensorMeta:
        """The metadata with sizes fixed to numbers; a compiler traces again for others."""
        if not self.is_symbolic:
            return self
        return self._intern(torch.Size(specialized(self.shape)), specialized(self.stride), self.dtype)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The metadata of `tensor`."""
        return cls._intern(tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor, stored densely."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"{dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]"


def _dense(meta: TensorMeta) -> TensorMeta:
    with unrecorded():
        like = torch.empty_strided(meta.shape, meta.stride, device="meta")
        return TensorMeta(meta.shape, torch.empty_like(like).stride(), meta.dtype)


known_dense = functools.lru_cache(maxsize=4096)(_dense)  # by identity: interned ones, which are few


class ShardOrderEntry(NamedTuple):
    """The mesh axes that split tensor dim `dim`, in order: the first one is major."""

    dim: int
    axes: tuple[int, ...]


ShardOrder = tuple[ShardOrderEntry, ...]
Context = tuple[DeviceMesh, tuple[Placement, ...], ShardOrder, tuple[int, ...]]
_LOCAL = ["_local_tensor"]


class ByRank(tuple[Any, ...]):
    """The context of a tensor that compilers flatten into the locals of all virtual ranks: their shapes may differ."""

    __slots__ = ()

    def __deepcopy__(self, memo: Any) -> ByRank:
        return self


@functools.cache
def _rank_names(count: int) -> list[str]:
    return [f"_t{rank}" for rank in range(count)]


@constant_to_compilers
class DTensorSpec(Interned):
    """The layout of one global tensor on a mesh: a placement for each axis, and the order of axes that split one dim.

    Args:
        mesh: the mesh.
        placements: one for each axis of the mesh.
        tensor_meta: shape, stride and dtype of the global tensor.
        shard_order: for dims split by several axes, `(dim, axes)` entries, major axis first; by default the order of
            the mesh's axes.
        broadcast: dims along which the tensor is constant and the local has stride 0. They need no memory and no
            communication. Never a sharded dim, nor one of size one.

    Example:
        >>> from shardwise.core.placement import Shard
        >>> mesh = DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp"))
        >>> spec = DTensorSpec(mesh, [Shard(0), Replicate()], TensorMeta((8, 32)))
        >>> spec, spec.local_shape((1, 0)), spec.global_offset((1, 0))
        (f32[8,32] dp:S0 tp:R, (4, 32), (4, 0))
        >>> DTensorSpec(mesh, [Shard(0), Shard(0)], TensorMeta((8, 32)), shard_order=[(0, ("tp", "dp"))])
        f32[8,32] dp:S0 tp:S0 order 0:tp>dp
        >>> DTensorSpec(mesh, [Shard(0), Replicate()], TensorMeta((8, 32)), broadcast=[0, 1])
        f32[8,32] dp:S0 tp:R broadcast 1
    """

    __slots__ = (
        "_blocks", "_largest", "broadcast", "context", "dim_axes", "flattened", "is_lazy", "is_ragged", "is_replicated",
        "is_strided", "mesh", "ndim", "partial_axes", "placements", "shape", "shard_order", "tensor_meta",
    )  # fmt: skip
    _fields = ("mesh", "placements", "tensor_meta", "shard_order", "broadcast")
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta
    shard_order: ShardOrder
    broadcast: tuple[int, ...]
    shape: torch.Size
    ndim: int
    dim_axes: tuple[tuple[int, ...], ...]  # for each dim the axes that split it, major first
    partial_axes: tuple[int, ...]
    is_replicated: bool
    is_lazy: bool  # whether one device would have stored a broadcast dim: a write must materialize it first
    context: Context  # all fields except the metadata
    # for compilers: the names of the local, or of each virtual rank's, and the context that they guard
    flattened: tuple[list[str], tuple[Any, ...]]
    is_strided: bool  # whether a rank may have several runs of a dim: some placement is another split than `Shard`
    is_ragged: bool  # whether some placement has given sizes, which may be used only once
    _blocks: dict[tuple[SupportsIndex, ...], Block]
    _largest: tuple[int, ...] | None

    def __new__(
        cls,
        mesh: DeviceMesh,
        placements: Iterable[object] | Placement,
        tensor_meta: TensorMeta,
        shard_order: Iterable[Any] | None = None,
        broadcast: Iterable[int] = (),
    ) -> DTensorSpec:
        kept = checked_placements(placements, mesh, len(tensor_meta.shape))
        order = default_shard_order(kept)
        if shard_order is not None:
            order = checked_order(shard_order, order, mesh, kept, len(tensor_meta.shape))
        return cls._intern(mesh, kept, tensor_meta, order, broadcastable(broadcast, tensor_meta, order))

    @classmethod
    def from_dim_axes(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        tensor_meta: TensorMeta,
        dim_axes: Iterable[tuple[int, ...]],
        broadcast: Iterable[int] = (),
    ) -> DTensorSpec:
        """The spec for placements and an order that are known to be valid; no checks."""
        order = tuple([ShardOrderEntry(dim, axes) for dim, axes in enumerate(dim_axes) if axes])
        if broadcast:
            broadcast = broadcastable(broadcast, tensor_meta, order)
        return cls._intern(mesh, placements, tensor_meta, order, broadcast)

    @classmethod
    def from_context(cls, context: Context, tensor_meta: TensorMeta) -> DTensorSpec:
        """The spec of a tensor with the layout of another of as many dims; no checks."""
        mesh, placements, order, broadcast = context
        return cls._intern(mesh, placements, tensor_meta, order, broadcast)

    def __reduce__(self) -> tuple[Any, ...]:
        # plain tuples only, so that torch.load(weights_only=True) can read it
        order = tuple(tuple(e) for e in self.shard_order)
        return DTensorSpec, (self.mesh, self.placements, self.tensor_meta, order, self.broadcast)

    def _derive(self) -> None:
        put = object.__setattr__
        shape, placements, by_dim = self.tensor_meta.shape, self.placements, dict(self.shard_order)
        put(self, "context", (self.mesh, placements, self.shard_order, self.broadcast))
        put(self, "shape", shape)
        put(self, "ndim", len(shape))
        put(self, "dim_axes", tuple([by_dim.get(dim, ()) for dim in range(len(shape))]))
        put(self, "partial_axes", tuple([a for a, p in enumerate(placements) if isinstance(p, Partial)]))
        put(self, "is_replicated", not by_dim and not self.partial_axes)
        stride = self.tensor_meta.stride
        put(self, "is_lazy", bool(self.broadcast) and any(_is_stored(stride[dim]) for dim in self.broadcast))
        put(self, "is_strided", any(isinstance(p, AnyShard) and not isinstance(p, Shard) for p in placements))
        put(self, "is_ragged", self.is_strided and any(isinstance(p, Ragged) for p in placements))
        if self.is_ragged:
            assert sum(map(len, by_dim.values())) == sum(isinstance(p, AnyShard) for p in placements), self.shard_order
            _check_sizes(self)
        by_rank = hosts[self.mesh.fabric].many_ranks and self._is_uneven()
        flattened = (_rank_names(self.mesh.grid_size), ByRank(self.context)) if by_rank else (_LOCAL, self.context)
        put(self, "flattened", flattened)
        put(self, "_blocks", {})
        put(self, "_largest", None)

    def _is_uneven(self) -> bool:
        """Whether local shapes may differ between ranks. A symbolic size that is sharded divides evenly."""
        for dim, axes in self.shard_order:
            if any(isinstance(self.placements[axis], Ragged | Owned) for axis in axes):
                return True
            pieces = [(d.rows or 1) * (len(d.blocks) if d.blocks else d.parts) for d in map(self.division, axes)]
            if isinstance(size := self.shape[dim], int) and size % math.prod(pieces):
                return True
        return False

    # ---------------------------------------------------------------- the local part of a coordinate

    def block(self, coordinate: Iterable[SupportsIndex]) -> Block:
        """The block of the rank at `coordinate`."""
        key = tuple(coordinate)
        found = self._blocks.get(key)
        if found is None:
            checked = self._checked_coordinate(key)
            runs = tuple([self.runs(dim, checked) for dim in range(self.ndim)])
            found = self._blocks[checked] = block_of(self.shape, runs)
        return found

    def runs(self, dim: int, coordinate: tuple[int, ...]) -> tuple[Run, ...]:
        """The runs of indices of `dim` of the rank at `coordinate`, which must be in the mesh."""
        size, axes, sizes = self.shape[dim], self.dim_axes[dim], self.mesh.shape
        if not axes:
            return (Run(0, size),)
        if size.__class__ is not int:
            equal = self._equal_run(dim, coordinate)
            if equal is not None:
                return (equal,)
            (size,) = specialized((size,))
        if self.is_ragged and len(axes) == 1:
            placement, at = self.placements[axes[0]], coordinate[axes[0]]
            if isinstance(placement, Ragged) and placement.blocks is None:
                return (Run(sum(placement.sizes[:at]), placement.sizes[at]),)
        if self.is_strided:
            find = runs_of.__wrapped__ if self.is_ragged else runs_of  # given sizes may be used only once
            return find(size, tuple([self.division(a).cut(coordinate[a]) for a in axes]))
        return (nested_chunk(size, [(sizes[a], coordinate[a]) for a in axes]),)

    def starts_and_lengths(self, dim: int, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The run of indices of `dim` for each row of `coordinates`, as arrays. Not for strided layouts.

        Example:
            >>> from shardwise.core.placement import Shard
            >>> spec = DTensorSpec(DeviceMesh("cpu", range(4)), [Shard(0)], TensorMeta((5,)))
            >>> [array.tolist() for array in spec.starts_and_lengths(0, spec.mesh.coordinates)]
            [[0, 2, 4, 5], [2, 2, 1, 0]]
        """
        assert not self.is_strided
        start = np.zeros(len(coordinates), dtype=np.int64)
        length = np.full(len(coordinates), operator.index(self.shape[dim]))
        for axis in self.dim_axes[dim]:
            step = -(-length // self.mesh.shape[axis])
            begin = np.minimum(coordinates[:, axis] * step, length)
            start, length = start + begin, np.minimum(step, length - begin)
        return start, length

    def _equal_run(self, dim: int, coordinate: tuple[int, ...]) -> Run | None:
        """The run of a dim of symbolic size, which all ranks share equally."""
        size, axes, sizes = self.shape[dim], self.dim_axes[dim], self.mesh.shape
        parts = math.prod([sizes[a] for a in axes])
        if any(self.rows(a) for a in axes) or size % parts != 0:
            return None
        index = 0
        for axis in axes:
            index = index * sizes[axis] + coordinate[axis]
        return Run(known_value(index * (size // parts)), known_value(size // parts))

    def _checked_coordinate(self, given: tuple[SupportsIndex, ...]) -> tuple[int, ...]:
        mesh = self.mesh
        coordinate = tuple(map(operator.index, given))
        if len(coordinate) != mesh.ndim or not all(0 <= i < n for i, n in zip(coordinate, mesh.shape, strict=True)):
            raise LayoutError(
                f"{mesh} has no coordinate {coordinate}",
                hint=f"one number for each axis, less than the axis's size: {mesh.shape}",
            )
        return coordinate

    def rows(self, axis: int) -> int | None:
        """The number of rows of a dim, each of which `axis` splits separately; None for placements without rows."""
        placement = self.placements[axis]
        return placement.division(1).rows if isinstance(placement, AnyShard) else None

    def division(self, axis: int) -> Division:
        """How `axis` cuts the dim that it splits."""
        placement = self.placements[axis]
        assert isinstance(placement, AnyShard)
        return placement.division(self.mesh.shape[axis])

    def local_shape(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """The local shape of the rank at `coordinate`."""
        return self.block(coordinate).shape

    def share(self, coordinate: Iterable[SupportsIndex], dims: Iterable[int]) -> tuple[int, int]:
        """The number of local elements along `dims` of the rank at `coordinate`, and the global number.

        A symbolic size is split into equal parts or not at all, and counted in such parts.
        """
        local, count, total = self.local_shape(coordinate), 1, 1
        for dim in dims:
            if isinstance(local[dim], torch.SymInt):
                total *= math.prod([self.mesh.shape[axis] for axis in self.dim_axes[dim]])
            else:
                count, total = count * local[dim], total * operator.index(self.shape[dim])
        return count, total

    def global_offset(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """Where the block of `coordinate` begins in the global tensor: the size of a dim in which it is empty."""
        return self.block(coordinate).offset

    def local_stride(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """The strides of a local block: 0 for broadcast dims, else dense, in the memory order of the global tensor."""
        shape = list(self.local_shape(coordinate))
        for dim in self.broadcast:
            shape[dim] = 1
        strides = dense_strides(shape, like=self.tensor_meta.stride)
        return tuple([0 if dim in self.broadcast else stride for dim, stride in enumerate(strides)])

    @property
    def largest_local_shape(self) -> tuple[int, ...]:
        """The largest local size of each dim; of symbolic sizes, for the current inputs."""
        found = self._largest
        if found is None:
            divisions = [[self.division(a) for a in axes] for axes in self.dim_axes]
            found = tuple(map(longest, self.tensor_meta.hinted().shape, divisions))
            object.__setattr__(self, "_largest", found)
        return found

    @property
    def local_bytes(self) -> int:
        """The bytes of the largest local tensor."""
        stored = [size for dim, size in enumerate(self.largest_local_shape) if dim not in self.broadcast]
        return math.prod(stored) * self.tensor_meta.dtype.itemsize

    # ---------------------------------------------------------------- changed copies

    def with_placements(
        self,
        placements: Iterable[object] | Placement,
        shard_order: Iterable[Any] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> DTensorSpec:
        """The same tensor in another layout."""
        return DTensorSpec(mesh or self.mesh, placements, self.tensor_meta, shard_order)

    def remapped(self, mesh: DeviceMesh, tensor_meta: TensorMeta | None = None) -> DTensorSpec:
        """The layout on another mesh of the same grid: unchanged on common axes, replicated along the others.

        Example:
            >>> from shardwise.core.placement import Shard
            >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
            >>> DTensorSpec(mesh["tp"], [Shard(0)], TensorMeta((8,))).remapped(mesh)
            f32[8] dp:R tp:S0
        """
        there = {grid_axes: axis for axis, grid_axes in enumerate(mesh.axes)}
        to = {axis: there[grid_axes] for axis, grid_axes in enumerate(self.mesh.axes) if grid_axes in there}
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for axis, new in to.items():
            placements[new] = self.placements[axis]
        dim_axes = [tuple(to[axis] for axis in axes if axis in to) for axes in self.dim_axes]
        return DTensorSpec.from_dim_axes(mesh, tuple(placements), tensor_meta or self.tensor_meta, dim_axes)

    def reduced(self) -> DTensorSpec:
        """The layout after every Partial is reduced: those axes are replicated."""
        if not self.partial_axes:
            return self
        placements = tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements)
        return DTensorSpec.from_dim_axes(self.mesh, placements, self.tensor_meta, self.dim_axes)

    def with_meta(self, tensor_meta: TensorMeta) -> DTensorSpec:
        """The same layout for a tensor of the same number of dims."""
        return self._intern(self.mesh, self.placements, tensor_meta, self.shard_order, ())

    def materialized(self) -> DTensorSpec:
        """The same layout without broadcast dims: every element of the local is stored."""
        return self.with_meta(self.tensor_meta) if self.broadcast else self

    def compact(self) -> DTensorSpec:
        """The spec of the stored elements: broadcast dims have size one and are replicated."""
        meta, dims = self.tensor_meta, self.broadcast
        shape = [1 if dim in dims else size for dim, size in enumerate(meta.shape)]
        stored = TensorMeta(shape, dense_strides(shape, like=meta.stride), meta.dtype)
        return self._intern(self.mesh, self.placements, stored, self.shard_order, ())

    def with_dtype(self, dtype: torch.dtype) -> DTensorSpec:
        """The same layout with another dtype."""
        meta = self.tensor_meta
        return self.with_meta(TensorMeta._intern(meta.shape, meta.stride, dtype))

    @property
    def layout(self) -> str:
        """The layout alone in short notation: `dp:S0 tp:R`."""
        names = self.mesh.mesh_dim_names
        parts = [f"{names[a]}:{p.short}" if names else p.short for a, p in enumerate(self.placements)]
        for dim, axes in self.shard_order:
            if list(axes) != sorted(axes):
                parts.append(f"order {dim}:{'>'.join(self.mesh.axis_name(a) for a in axes)}")
        if self.broadcast:
            parts.append(f"broadcast {','.join(map(str, self.broadcast))}")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"{self.tensor_meta} {self.layout}"


def broadcastable(dims: Iterable[int], meta: TensorMeta, order: ShardOrder) -> tuple[int, ...]:
    """Those of `dims` that may be broadcast: no axis splits them, and their size is more than one."""
    split = {entry.dim for entry in order}
    return tuple(sorted({dim for dim in dims if dim not in split and _is_long(meta.shape[dim])}))


def _is_long(size: Any) -> bool:
    # compilers trace again for sizes of zero and one, so a symbolic one is larger
    return size.__class__ is not int or size > 1


def _is_stored(stride: Any) -> bool:
    return stride.__class__ is not int or stride != 0


def default_shard_order(placements: Sequence[Placement]) -> ShardOrder:
    """The order of the mesh's axes, for each dim that is split.

    Example:
        >>> from shardwise.core.placement import Shard
        >>> default_shard_order([Shard(1), Replicate(), Shard(1)])
        (ShardOrderEntry(dim=1, axes=(0, 2)),)
    """
    by_dim: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, AnyShard):
            by_dim[placement.dim] = (*by_dim.get(placement.dim, ()), axis)
    return tuple([ShardOrderEntry(dim, by_dim[dim]) for dim in sorted(by_dim)])


def checked_placements(placements: Iterable[object] | Placement, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """`placements` as values of `Placement`, with nonnegative dims. Raises if they do not fit the tensor."""
    if isinstance(placements, Placement):
        placements = (placements,)
    try:
        kept = [p if isinstance(p, Placement) else as_placement(p) for p in placements]
    except TypeError:
        raise LayoutError(
            f"{placements!r} is not a list of placements", hint="as in [Shard(0), Replicate()], one for each axis"
        ) from None
    if len(kept) != mesh.ndim:
        raise LayoutError(
            f"{len(kept)} placements {kept} for {mesh}, which has {mesh.ndim} axes",
            hint="give one placement for each axis of the mesh",
        )
    for axis, placement in enumerate(kept):
        if isinstance(placement, AnyShard) and not 0 <= placement.dim < ndim:
            kept[axis] = placement = with_dim_from_front(placement, mesh, axis, ndim)
        if isinstance(placement, Zigzag) and placement.blocks is not None:
            kept[axis] = _with_blocks_over(placement, mesh, axis)
        elif isinstance(placement, Ragged | Owned):
            _check_ranks(placement, mesh, axis)
    reductions = {p.reduce_op for p in kept if isinstance(p, Partial)}
    if len(reductions) > 1 and not reductions <= {"sum", "avg"}:
        raise LayoutError(
            f"the placements {kept} mix the reductions {sorted(reductions)}, whose order would change the value",
            hint="reduce one of them first: redistribute it to Replicate() or Shard()",
        )
    return tuple(kept)


def _with_blocks_over(placement: Zigzag, mesh: DeviceMesh, axis: int) -> Placement:
    """The placement of `axis`, without `blocks` if these are the usual ones; an error if they do not fit."""
    assert placement.blocks is not None
    blocks, ranks = len(placement.blocks), mesh.shape[axis]
    if blocks % ranks:
        raise LayoutError(
            f"{placement!r} on axis {mesh.axis_name(axis)!r}: {blocks} blocks for {ranks} ranks",
            hint="give every rank equally many blocks",
        )
    usual = Zigzag(placement.dim, None, placement.split_factor)
    return usual if usual.blocks_over(ranks) == placement.blocks else placement


def _check_ranks(placement: Ragged | Owned, mesh: DeviceMesh, axis: int) -> None:
    """Raise unless there is a size for each rank of `axis`, or the owner is one of them."""
    ranks = mesh.shape[axis]
    where = f"{placement!r} on axis {mesh.axis_name(axis)!r}, which has {ranks} ranks"
    if isinstance(placement, Owned) and placement.rank >= ranks:
        raise LayoutError(where, hint=f"an owner is a coordinate from 0 to {ranks - 1}")
    if isinstance(placement, Ragged) and placement.blocks is not None and len(placement.sizes) % ranks:
        raise LayoutError(f"{where}: {len(placement.sizes)} blocks", hint="give every rank equally many blocks")
    if isinstance(placement, Ragged) and placement.blocks is None and len(placement.sizes) != ranks:
        raise LayoutError(f"{where}: {len(placement.sizes)} sizes", hint="give one size for each rank of the axis")


def _check_sizes(spec: DTensorSpec) -> None:
    """Raise unless the sizes of each `Ragged` sum to the length that the axes before it leave of its dim."""
    for dim, axes in spec.shard_order:
        if not any(isinstance(spec.placements[axis], Ragged) for axis in axes):
            continue
        (size,) = specialized((spec.shape[dim],))
        wrong = misfit(size, [spec.division(axis) for axis in axes])
        if wrong is not None:
            raise LayoutError(
                f"{spec}: the sizes {wrong[0].sizes} are {sum(wrong[0].sizes or ())} indices in all, and dim {dim} has "
                f"{' or '.join(map(str, wrong[1]))} to split",
                hint="give sizes that add up to the size of the dim",
            )


def with_dim_from_front(placement: AnyShard, mesh: DeviceMesh, axis: int, ndim: int) -> AnyShard:
    """The placement of `axis` with its dim counted from the front, or an error if a tensor of `ndim` dims lacks it."""
    dim = normalize_dim(placement.dim, ndim)
    if dim is None:
        raise LayoutError(
            f"{placement!r} on axis {mesh.axis_name(axis)!r}: {_dims(ndim)}",
            hint="use Replicate() here" if ndim == 0 else f"shard one of its {ndim} dims, or use Replicate()",
        )
    return placement.on_dim(dim)


def checked_order(
    given: Iterable[Any], default: ShardOrder, mesh: DeviceMesh, placements: Sequence[Placement], ndim: int
) -> ShardOrder:
    """The `default` order of `placements` changed as `given` for some dims. Raises if they do not fit."""
    order = {entry.dim: entry.axes for entry in default}
    seen: set[int] = set()
    for dim, axes in given.items() if isinstance(given, dict) else given:
        chosen = tuple(mesh.axis(a) for a in axes)
        at = normalize_dim(operator.index(dim), ndim)
        have = () if at is None else order.get(at, ())
        if at is None or sorted(chosen) != sorted(have):
            split = f"the placements {list(placements)} split it by {[mesh.axis_name(a) for a in have]}"
            raise LayoutError(
                f"the shard order says that dim {dim} is split by {[mesh.axis_name(a) for a in chosen]}, "
                f"{_dims(ndim) if at is None else split}",
                hint="list exactly the axes that shard the dim, major first",
            )
        if at in seen:
            raise LayoutError(f"the shard order names dim {dim} twice", hint="give one entry for each dim")
        seen.add(at)
        if chosen:
            order[at] = chosen
    return tuple(ShardOrderEntry(dim, order[dim]) for dim in sorted(order))


def _dims(ndim: int) -> str:
    return f"the tensor has dims 0 to {ndim - 1}" if ndim else "a 0-d tensor has no dims"
