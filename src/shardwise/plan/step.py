"""Steps of routes: frozen data that a fabric binds and executes.

Each step has the spec before and after it; a fabric needs nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, SupportsIndex

import numpy as np

from shardwise.core.layout import Segment, Window, dense_strides
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.plan.line_change import LineChange

__all__ = [
    "AllGather", "AllReduce", "AllToAll", "ChosenRows", "Collective", "Compact", "Exchange", "Expand", "OwnerExchange",
    "ReduceScatter", "Rotate", "RowExchange", "Rows", "SendState", "Slice", "Step", "TokenExchange", "Unreduce",
    "Windowed",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One step between two layouts of the same tensor."""

    before: DTensorSpec
    after: DTensorSpec
    collective: ClassVar[str | None] = None  # the name of the collective in torch, None for a local step

    @property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes whose ranks communicate, major first."""
        return ()

    @property
    def title(self) -> str:
        """What a record is called that begins with this step and belongs to no operator."""
        return "redistribute"

    def describe(self) -> str:
        """The step in words: `all-gather dim 0 over tp`."""
        raise NotImplementedError

    def _names(self, axes: tuple[int, ...]) -> str:
        return " x ".join(self.before.mesh.axis_name(a) for a in axes)


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Each rank keeps a part of its local: R -> S, several axes and dims at once. No communication.

    Both layouts may be on different meshes of the same ranks in the same order.
    """

    def describe(self) -> str:
        if self.before.mesh is not self.after.mesh:
            return f"keep what {self.after.mesh} wants"
        if self.before.block((0,) * self.before.mesh.ndim) == self.after.block((0,) * self.after.mesh.ndim):
            return "relabel"
        cut = [
            f"dim {dim} by {self._names(after[len(before) :])}"
            for dim, (before, after) in enumerate(zip(self.before.dim_axes, self.after.dim_axes, strict=True))
            if len(after) > len(before)
        ]
        return f"slice {', '.join(cut)}" if cut else "slice"


@dataclass(frozen=True, slots=True)
class Compact(Step):
    """Keep one index of each broadcast dim, so that collectives move stored elements only. No communication."""

    def describe(self) -> str:
        return f"compact {_dims(self.before.broadcast)}"


@dataclass(frozen=True, slots=True)
class Expand(Step):
    """Broadcast dims get their size back, in any layout. No communication.

    `reads`: the result is only read, so it may have stride 0 along `dims`. Otherwise each element has its own
    memory, except along dims that are broadcast afterwards.
    """

    dims: tuple[int, ...]
    reads: bool = False

    def describe(self) -> str:
        return f"expand {_dims(self.dims)}"


def _dims(dims: tuple[int, ...]) -> str:
    return f"dim{'s' if len(dims) > 1 else ''} {', '.join(map(str, dims))}"


@dataclass(frozen=True, slots=True)
class Unreduce(Step):
    """R -> P: one rank along the axes keeps the value and the others the neutral element. No communication."""

    @property
    def new_axes(self) -> tuple[int, ...]:
        """The axes that become Partial."""
        return tuple(a for a in self.after.partial_axes if self.before.placements[a].is_replicate())

    def describe(self) -> str:
        return f"make partial over {self._names(self.new_axes)}"


class Collective(Step):
    """A step in which the ranks along the axes `over` communicate; `over` is the last field of every kind."""

    __slots__ = ()
    over: tuple[int, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        return self.over


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """The minor axes of a dim -> R, over their product group."""

    dim: int
    over: tuple[int, ...]
    collective = "all_gather"

    def describe(self) -> str:
        return f"all-gather dim {self.dim} over {self._names(self.over)}"


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """P -> R over the axes' product group."""

    over: tuple[int, ...]
    collective = "all_reduce"

    def describe(self) -> str:
        return f"all-reduce ({reduction(self)}) over {self._names(self.over)}"


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """P -> S over the axes' product group; the axes become the minor ones of `dim`."""

    dim: int
    over: tuple[int, ...]
    collective = "reduce_scatter"

    def describe(self) -> str:
        return f"reduce-scatter ({reduction(self)}) onto dim {self.dim} over {self._names(self.over)}"


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """The minor axes of one dim become the minor axes of another."""

    source_dim: int
    target_dim: int
    over: tuple[int, ...]
    collective = "all_to_all"

    def describe(self) -> str:
        return f"all-to-all dim {self.source_dim} -> dim {self.target_dim} over {self._names(self.over)}"


@dataclass(frozen=True, slots=True)
class Exchange(Collective):
    """Any layout to any other with the same Partial axes: each rank receives its missing parts from the others.

    On one mesh it runs over `over`, the axes whose role in the layout changes. Between two meshes `over` is empty and
    all ranks of both take part. `change` has the runs of each rank where one axis splits one dim into given sizes.
    """

    over: tuple[int, ...]
    change: LineChange | None = field(default=None, compare=False, repr=False)
    collective = "all_to_all"

    def describe(self) -> str:
        where = f"over {self._names(self.over)}" if self.over else "between meshes"
        return f"exchange {where}"


@dataclass(frozen=True, slots=True)
class SendState(Collective):
    """All tensors of a state change layout and mesh: each rank receives its missing parts from the nearest replicas.

    `before` and `after` are the first tensor's. Messages go between those ranks alone that have something to send.
    """

    tensors: int
    buckets: int
    over: tuple[int, ...] = ()
    collective = "send_recv"

    def describe(self) -> str:
        buckets = f"{self.buckets} bucket{'s' if self.buckets != 1 else ''}"
        return f"transfer of {self.tensors} tensor{'s' if self.tensors != 1 else ''} in {buckets}"


class OtherRows:
    """A tensor of which ranks have other rows than its layout says: what follows from the shapes of their locals.

    Subclasses have the layout, `spec`.
    """

    __slots__ = ()
    spec: DTensorSpec

    @property
    def mesh(self) -> DeviceMesh:
        return self.spec.mesh

    @property
    def tensor_meta(self) -> TensorMeta:
        return self.spec.tensor_meta

    @property
    def largest_local_shape(self) -> tuple[int, ...]:
        """The largest local size of each dim."""
        raise NotImplementedError

    def local_shape(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """The local shape of the rank at `coordinate`."""
        raise NotImplementedError

    def local_stride(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """Dense strides, in the memory order of the global tensor."""
        return dense_strides(self.local_shape(coordinate), like=self.tensor_meta.stride)

    @property
    def local_bytes(self) -> int:
        """The bytes of the largest local."""
        return math.prod(self.largest_local_shape) * self.tensor_meta.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Windowed(OtherRows):
    """A tensor with halos: each rank has the rows that its part of another tensor needs.

    Args:
        spec: the layout without halos.
        windows: for each dim with halos the dim, the window, and the other tensor, which is sharded along it too.
    """

    spec: DTensorSpec
    windows: tuple[tuple[int, Window, DTensorSpec], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, without padding."""
        return self.spec.shape

    def starts_and_lengths(self, dim: int, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of `dim` of the ranks at these coordinates; the first may be negative."""
        for at, window, reference in self.windows:
            if at == dim:
                return window.over(*reference.starts_and_lengths(dim, coordinates))
        return self.spec.starts_and_lengths(dim, coordinates)

    def local_shape(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """The local shape of the rank at `coordinate`."""
        here = tuple(coordinate)
        shape = list(self.spec.local_shape(here))
        for dim, window, reference in self.windows:
            shape[dim] = window.over(*reference.runs(dim, here)[0])[1]  # pyright: ignore[reportArgumentType]
        return tuple(shape)

    @property
    def largest_local_shape(self) -> tuple[int, ...]:
        """The largest local size of each dim."""
        shape = list(self.spec.largest_local_shape)
        for dim, _, _ in self.windows:
            shape[dim] = int(self.starts_and_lengths(dim, self.mesh.coordinates)[1].max())
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class ChosenRows(OtherRows):
    """Rows of a tensor that are listed for each rank along some axes; its global tensor has those of all, in order.

    Args:
        spec: the layout of the tensor that the rows are of.
        dim: the dim of the rows, which the axes `over` shard.
        over: the axes, the first major.
        lengths: the number of rows of the rank at each position along the axes.
    """

    spec: DTensorSpec
    dim: int
    over: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return (*self.spec.shape[: self.dim], sum(self.lengths), *self.spec.shape[self.dim + 1 :])

    def starts_and_lengths(self, dim: int, coordinates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of `dim` of the ranks at these coordinates."""
        if dim != self.dim:
            return self.spec.starts_and_lengths(dim, coordinates)
        lengths, at = np.array(self.lengths), self._positions(coordinates)
        return (np.cumsum(lengths) - lengths)[at], lengths[at]

    def _positions(self, coordinates: np.ndarray) -> np.ndarray:
        at = np.zeros(len(coordinates), dtype=np.int64)
        for axis in self.over:
            at = at * self.mesh.shape[axis] + coordinates[:, axis]
        return at

    def local_shape(self, coordinate: Iterable[SupportsIndex]) -> tuple[int, ...]:
        """The local shape of the rank at `coordinate`."""
        here = tuple(coordinate)
        shape = list(self.spec.local_shape(here))
        shape[self.dim] = self.lengths[int(self._positions(np.array([here]))[0])]
        return tuple(shape)

    @property
    def largest_local_shape(self) -> tuple[int, ...]:
        """The largest local size of each dim."""
        shape = list(self.spec.largest_local_shape)
        shape[self.dim] = max(self.lengths)
        return tuple(shape)


Rows = DTensorSpec | Windowed | ChosenRows  # the operands and results of a row exchange


@dataclass(frozen=True, slots=True)
class RowExchange(Collective):
    """Rows of some tensors become rows of others on the same axes: each rank receives its missing rows.

    `before` and `after` are the first operand and the first result. With `adds`, rows of several ranks are added: this
    returns the gradients of halos to the ranks that own the rows.
    """

    operands: tuple[Rows, ...]
    results: tuple[Rows, ...]
    dim: int
    segments: tuple[Segment, ...]
    over: tuple[int, ...]
    adds: bool = False
    collective = "all_to_all"

    def describe(self) -> str:
        names = self._names(self.over)
        halo = any(isinstance(spec, Windowed) for spec in (*self.operands, *self.results))
        if self.adds:
            return f"return {'halos' if halo else 'rows'} of dim {self.dim} over {names} and add them"
        return f"exchange {'halos' if halo else 'rows'} of dim {self.dim} over {names}"


@dataclass(frozen=True, slots=True)
class Rotate(Collective):
    """Each rank receives the blocks of the rank `distance` before it along the axes, cyclically.

    It moves the locals of `blocks` in one flat buffer: those of the sending rank or, with `back`, gradients that other
    ranks have computed for the locals of the receiving rank. `wanted` are the ranks along the axes that receive
    something.
    """

    blocks: tuple[DTensorSpec, ...]
    distance: int
    wanted: tuple[bool, ...]
    back: bool
    over: tuple[int, ...]
    collective = "all_to_all"

    def describe(self) -> str:
        return f"rotate by {self.distance} over {self._names(self.over)}"

    def elements(self, sender: Coordinate, receiver: Coordinate) -> int:
        """The number of elements that the rank at a coordinate sends to the one at another."""
        owner = receiver if self.back else sender
        return sum(math.prod(spec.local_shape(owner)) for spec in self.blocks)


@dataclass(frozen=True, slots=True)
class OwnerExchange(Collective):
    """Items are sent to the ranks that own them, which may answer. Which and how many depends on values.

    Dim `dim` of `before` defines the owners; `after` is the first result.
    """

    dim: int
    over: tuple[int, ...]
    collective = "all_to_all"

    def describe(self) -> str:
        return f"exchange by owners of dim {self.dim} over {self._names(self.over)}"


@dataclass(frozen=True, slots=True)
class TokenExchange(OwnerExchange):
    """Rows of tokens are sent to the ranks of their experts, or results back; `what`: the rows, in words."""

    what: str = "tokens"
    rows: int | None = None  # that cross between ranks, in total, if requested

    @property
    def title(self) -> str:
        return self.what if self.rows is None else f"{self.rows} {self.what}"

    def describe(self) -> str:
        return f"exchange {self.title} over {self._names(self.over)}"


def reduction(step: AllReduce | ReduceScatter) -> str:
    """The reduction of a step. Sums and averages over several axes are one: "avg" only if all of them are."""
    ops = {step.before.placements[a].reduce_op for a in step.over}  # pyright: ignore[reportAttributeAccessIssue]
    return ops.pop() if len(ops) == 1 else "sum"


def average_over(step: AllReduce | ReduceScatter) -> int:
    """The divisor of a sum: the product of the sizes of the axes that are averages."""
    count = 1
    for axis in step.over:
        if step.before.placements[axis].is_partial("avg"):
            count *= step.before.mesh.shape[axis]
    return count
