"""Linear maps of rows, and their transposes: each is the other's derivative, of any order (`RowMap`, `mapped`).

A `TokenMap` takes rows of each rank's local (`send`), sends each rank its share of them, and puts rows together of what
has arrived (`gather`): one exchange. A row may be taken several times. Its transpose goes back and adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from shardwise.compilers import never_traced
from shardwise.core.cache import BoundedCache
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.placement import AnyShard, Partial, Placement, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import MeshError
from shardwise.events import route_started
from shardwise.fabric.base import fabric_of
from shardwise.fabric.routes import announced
from shardwise.plan.cost import current_cost_model
from shardwise.plan.route import Route, StepCost
from shardwise.plan.step import TokenExchange
from shardwise.rules.owner_programs import Exchanging, Items
from shardwise.tensor import DTensor, apply_function, dtensor_of, is_dtensor, moved, wants_derivatives
from shardwise.tensor.autograd_functions import laid_out_gradient

__all__ = [
    "FIRST",
    "Counts",
    "LineRows",
    "RowLayout",
    "RowMap",
    "RowTable",
    "TokenMap",
    "announce",
    "as_dtensor",
    "is_listened_to",
    "lines_here",
    "mapped",
    "member_of",
    "number_of",
    "quiet_step",
    "sorted_rows",
    "summed",
    "taken",
    "weighted",
]

MAX_STEPS, MAX_SPECS = 256, 16
SUM = Partial()  # the one that a linear map passes on as it is
Counts = tuple[tuple[int, ...], tuple[int, ...]]  # rows to each member, and from each


def as_dtensor(tensor: Any, mesh: DeviceMesh) -> Any:
    """A plain tensor is taken as the same on every rank, as by operators."""
    if not is_dtensor(tensor):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)
    if tensor.device_mesh != mesh:
        raise MeshError(
            f"dispatch: x is on {mesh}, and the experts or weights of its tokens are on {tensor.device_mesh}",
            hint="compute them from x, or build them on its mesh",
        )
    return tensor


def weighted(rows: Any, weights: Any) -> Any:
    """Rows times a number for each, in the dtype of the rows."""
    product = rows * weights.view(-1, *[1] * (rows.dim() - 1))
    return product if product.dtype is rows.dtype else product.to(rows.dtype)


def sorted_rows(flat: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert: their experts, their order, and where the rows of each expert begin, and their end."""
    expert, order = torch.sort(flat, stable=True)
    edges = torch.arange(experts + 1, device=flat.device, dtype=expert.dtype)
    return expert, order, torch.searchsorted(expert, edges)


@dataclass(frozen=True, eq=False)
class RowLayout:
    """How rows lie: their number, and the placement of each axis that splits them, the first one major.

    `rest` is the shape of a row, where it is not that of the tensor.
    """

    rows: int
    axes: tuple[int, ...]
    placements: tuple[Placement, ...]
    rest: tuple[int, ...] | None = None
    _made: BoundedCache[DTensorSpec, DTensorSpec] = field(default_factory=lambda: BoundedCache(MAX_SPECS))

    def of(self, spec: DTensorSpec) -> DTensorSpec:
        """A spec with its rows in this layout; axes that split none keep their placement."""
        found = self._made.get(spec)
        return found if found is not None else self._made.keep(spec, self._of(spec))

    def _of(self, spec: DTensorSpec) -> DTensorSpec:
        placements = list(spec.placements)
        for axis, placement in enumerate(placements):
            rows = isinstance(placement, AnyShard) and (placement.dim == 0 or self.rest is not None)
            if rows or (isinstance(placement, Partial) and placement is not SUM):
                placements[axis] = Replicate()
        for axis, placement in zip(self.axes, self.placements, strict=True):
            placements[axis] = placement
        rest = spec.shape[1:] if self.rest is None else self.rest
        shape = (self.rows, *rest)
        others: list[tuple[int, ...]] = [() for _ in rest]
        if self.rest is None:
            others = [tuple([axis for axis in axes if axis not in self.axes]) for axes in spec.dim_axes[1:]]
        meta = TensorMeta(shape, dense_strides(shape), spec.tensor_meta.dtype)
        return DTensorSpec.from_dim_axes(spec.mesh, tuple(placements), meta, (self.axes, *others))


@runtime_checkable
class LineRows(Protocol):
    """How many rows the members of a line send each other."""

    def between(self, me: int) -> Counts:
        """The rows of a member to each, and from each."""
        ...

    def crossing(self) -> float:
        """The rows that go to another rank."""
        ...


@dataclass(frozen=True, eq=False)
class RowTable(LineRows):
    """The same, as a table by sender and receiver."""

    rows: np.ndarray

    def between(self, me: int) -> Counts:
        """The rows of a member to each, and from each."""
        return tuple(self.rows[me].tolist()), tuple(self.rows[:, me].tolist())

    def crossing(self) -> int:
        """The rows that go to another rank."""
        return int(self.rows.sum() - np.trace(self.rows))


def member_of(mesh: DeviceMesh, over: tuple[int, ...], at: Coordinate) -> int:
    """The number of a rank among those of its line, the first axis major."""
    member = 0
    for axis in over:
        member = member * mesh.shape[axis] + at[axis]
    return member


def lines_here(mesh: DeviceMesh, over: tuple[int, ...], local: torch.Tensor) -> torch.Tensor:
    """For each rank here the number of its line, as a local: ranks of different slices have the same coordinate."""
    fabric = fabric_of(mesh)
    if not fabric.many_ranks:
        return FIRST
    numbers = np.empty(mesh.grid_size, dtype=np.int64)
    for number, line in enumerate(mesh.groups(over)):
        numbers[line] = number
    in_order = iter(numbers.tolist())
    return fabric.map(mesh, lambda _, tensor: torch.tensor(next(in_order), device="cpu"), local)


FIRST = torch.tensor(0)  # the line of a process, which is in one; it is not read


@runtime_checkable
class RowMap(Protocol):
    """A linear map of the rows of a DTensor, and its transpose."""

    def layouts(self, spec: DTensorSpec, transposed: bool) -> tuple[DTensorSpec, DTensorSpec]:
        """The layout that a tensor is moved to first, and the one of the result."""
        ...

    def run(self, tensor: Any, after: DTensorSpec, transposed: bool) -> Any:
        """The rows of a tensor in the first of these layouts, mapped to the second; without derivatives."""
        ...


@dataclass(eq=False)
class TokenMap(RowMap):
    """A map of rows to other ranks, and what is known of it on the host.

    Args:
        mesh: of the ranks.
        source: how the rows lie before.
        target: how they lie afterwards.
        send: for each rank here the local rows that it sends, those for the first rank of its line first.
        gather: for each rank here which of the rows that arrive its own are.
        rows: for each line how many rows its members send each other.
        over: the axes along which ranks exchange.
        line: for each rank here the number of its line.
        inverse: for each rank here the inverse of `gather` and that of `send`, if no row is taken twice, here or there,
            and none is empty.
        padded: whether there are rows that nothing is taken for: `send` or `gather` is the number of rows there.
        what: the rows, in words.
    """

    mesh: DeviceMesh
    source: RowLayout
    target: RowLayout
    send: torch.Tensor
    gather: torch.Tensor
    rows: Mapping[int, LineRows]
    over: tuple[int, ...]
    line: torch.Tensor
    inverse: tuple[torch.Tensor, ...] = ()
    padded: bool = False
    what: str = "tokens"
    _layouts: dict[tuple[DTensorSpec, bool], tuple[DTensorSpec, DTensorSpec]] = field(default_factory=dict)
    _between: dict[Any, Counts] = field(default_factory=dict)

    def crossing(self) -> float:
        """The rows that go to another rank, of one line on average."""
        return sum(rows.crossing() for rows in self.rows.values()) / len(self.rows)

    def layouts(self, spec: DTensorSpec, transposed: bool) -> tuple[DTensorSpec, DTensorSpec]:
        """The layout that a tensor is moved to first, and the one of the result."""
        found = self._layouts.get((spec, transposed))
        if found is None:
            start, end = (self.target, self.source) if transposed else (self.source, self.target)
            before = start.of(spec)
            found = self._layouts[spec, transposed] = before, end.of(before)
            self._layouts[found[1], not transposed] = found[1], before
        return found

    def between(self, line: torch.Tensor, at: Coordinate) -> Counts:
        """The rows of the rank at a coordinate to each member of its line, and from each."""
        key = at if line is FIRST else (number_of(line), at)
        found = self._between.get(key)
        if found is None:
            mesh = self.mesh
            found = self._between[key] = self.rows[number_of(line)].between(member_of(mesh, self.over, at))
        return found

    def step(self, before: DTensorSpec, after: DTensorSpec, transposed: bool) -> TokenExchange:
        """The step of an exchange between these layouts, of which listeners are told."""
        if not is_listened_to(self.mesh):
            return quiet_step(after if transposed else before, self.over, self.what)

        def row_bytes() -> int:
            rest = before.largest_local_shape[1:] if self.source.rest is None else ()
            return before.tensor_meta.dtype.itemsize * math.prod(rest)

        return announce(before, lambda: after, self.over, self.what, self.crossing, row_bytes)

    def run(self, tensor: Any, after: DTensorSpec, transposed: bool) -> Any:
        """One exchange."""
        step, program = self.step(tensor._spec, after, transposed), _return if transposed else _send

        def start(at: Coordinate, own: list[torch.Tensor]) -> Exchanging:
            return program(self, own, self.between(own[3], at), after, at)

        locals_ = [tensor._local_tensor, self.send, self.gather, self.line, *self.inverse]
        (local,) = fabric_of(self.mesh).exchange_by_owner(step, start, locals_)
        return dtensor_of(after, local)


def mapped(tensor: Any, by: RowMap, transposed: bool = False) -> Any:
    """A DTensor with its rows mapped, with derivatives."""
    want, after = by.layouts(tensor._spec, transposed)
    if tensor._spec is not want:
        tensor = moved(tensor, want)
    if wants_derivatives(tensor):
        return apply_function(MapRows, tensor, by, after, transposed)
    return by.run(tensor, after, transposed)


class MapRows(torch.autograd.Function):
    """A map of rows, or its transpose. Linear: each is the derivative of the other."""

    @staticmethod
    def forward(tensor: Any, by: RowMap, after: DTensorSpec, transposed: bool) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return by.run(tensor, after, transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensor, ctx.by, ctx.spec, ctx.transposed = inputs
        ctx.dtype = tensor.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if grad is None:
            return None, None, None, None
        grad = laid_out_gradient(grad, ctx.spec)
        grad = grad if grad.dtype is ctx.dtype else grad.to(ctx.dtype)
        return mapped(grad, ctx.by, not ctx.transposed), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return mapped(laid_out_gradient(tangent, ctx.spec), ctx.by, ctx.transposed)


def number_of(line: torch.Tensor) -> int:
    """The number of a rank's line, from its part of `lines_here`. In a dry run there is one."""
    return 0 if line is FIRST or line.is_meta else int(line)


def is_listened_to(mesh: DeviceMesh) -> bool:
    """Whether somebody is told of exchanges."""
    return bool(route_started) or not fabric_of(mesh).has_values


_quiet: BoundedCache[tuple[Any, ...], TokenExchange] = BoundedCache(MAX_STEPS)


def quiet_step(spec: DTensorSpec, over: tuple[int, ...], what: str) -> TokenExchange:
    """The step of an exchange that nobody listens to, of tokens in this layout."""
    found = _quiet.get((spec, over, what))
    return found or _quiet.keep_recent((spec, over, what), TokenExchange(spec, spec, 0, over, what))


def announce(
    before: DTensorSpec,
    end: Callable[[], DTensorSpec],
    over: tuple[int, ...],
    what: str,
    crossing: Callable[[], float],
    row_bytes: Callable[[], int],
) -> TokenExchange:
    """The step of an exchange, of which listeners are told: so many rows cross between the ranks of a line.

    The layout afterwards (`end`) and the numbers are worked out if somebody listens.
    """
    if not is_listened_to(before.mesh):
        return quiet_step(before, over, what)
    after, rows = end(), crossing()
    step = TokenExchange(before, after, 0, over, what, round(rows))
    received = rows * row_bytes() / math.prod(before.mesh.shape[axis] for axis in over)
    cost = StepCost(received, current_cost_model().seconds(before.mesh, over, received), after.local_bytes)
    announced(Route(before, after, (step,), (cost,)))
    return step


# ---------------------------------------------------------------- on the locals of one rank


def _send(by: TokenMap, own: Sequence[torch.Tensor], counts: Counts, after: DTensorSpec, at: Coordinate) -> Exchanging:
    rows, send, gather = own[:3]
    if by.source.rest is not None:
        rows = rows.reshape(-1)
    got = yield Items((taken(rows, send, by.padded),), *counts)
    return (taken(got.tensors[0], gather, by.padded),)


def _return(
    by: TokenMap, own: Sequence[torch.Tensor], counts: Counts, after: DTensorSpec, at: Coordinate
) -> Exchanging:
    rows, send, gather, _, *inverse = own
    shape = after.local_shape(at)
    sent, arriving = counts
    if inverse:
        got = yield Items((rows.index_select(0, inverse[0]),), arriving, sent)
        return (got.tensors[0].index_select(0, inverse[1]).view(shape),)
    got = yield Items((summed(rows, gather, sum(arriving), by.padded),), arriving, sent)
    count = shape[0] if by.source.rest is None else math.prod(shape)
    return (summed(got.tensors[0], send, count, by.padded).view(shape),)


def taken(rows: torch.Tensor, index: torch.Tensor, padded: bool) -> torch.Tensor:
    """Rows by index; the one after the last is zero."""
    if padded:
        rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
    return rows.index_select(0, index)


def summed(rows: torch.Tensor, index: torch.Tensor, count: int, padded: bool = False) -> torch.Tensor:
    """The sums of rows with the same index; what has the index `count` is dropped."""
    total = rows.new_zeros((count + padded, *rows.shape[1:])).index_add_(0, index, rows)
    return total[:count] if padded else total


never_traced(*(getattr(MapRows, name) for name in ("forward", "setup_context", "backward", "jvp")))
