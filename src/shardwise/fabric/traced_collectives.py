"""Collectives as operators of a graph: the c10d fabric while a compiler or make_fx traces.

The same collectives with the same bytes as issued ones (`packing` works on both), as `_c10d_functional` operators,
which compilers can order and overlap. The caller gives the process group and its ranks.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import traceback as fx_traceback

from shardwise.core.mesh import Coordinate
from shardwise.core.tracing import proxy_mode
from shardwise.fabric.base import BoundRows, BoundStep
from shardwise.fabric.block_copies import average_divider, neutral_element, reduce_tensors, slicer
from shardwise.fabric.collectives import Rotation, Start, Wait
from shardwise.fabric.compiled_failures import note_traced_line
from shardwise.fabric.encoding import as_carried, as_reducible, from_reducible
from shardwise.fabric.packing import Line, Parcels, gathering, pack_traced, scattering, split_in_front, swapping
from shardwise.fabric.rank_tensor import parts_of
from shardwise.fabric.row_packing import RowParcels
from shardwise.plan.step import AllGather, AllReduce, AllToAll, ReduceScatter, Step, Unreduce, reduction
from shardwise.torch_private import (
    FakeTensor,
    FunctionalTensor,
    FunctionalTensorMode,
)

__all__ = [
    "functional_collectives",
    "is_recorded",
    "recorded_exchange",
    "recorded_rotation",
    "recorded_rows",
    "recorded_step",
    "recorded_unreduce",
    "recording",
]

_TAG = "partitioner_tag"  # of a node in a graph: whether it is of forward or of backward


def is_recorded(local: torch.Tensor) -> bool:
    """Whether operators on this tensor are traced, so that a collective must be an operator of the graph."""
    return isinstance(local, FakeTensor | FunctionalTensor) or proxy_mode() is not None


def recording(local: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, operators on this tensor are recorded in its graph, even if its tracer has just ended.

    The compiler flattens results after the program has run, and may then have to recompute a view.
    """
    return FunctionalTensorMode() if isinstance(parts_of(local)[0], FunctionalTensor) else contextlib.nullcontext()


@cache
def functional_collectives() -> Any:
    """torch's functional collectives, declared under their current and older names, with fake implementations."""
    importlib.import_module("torch.distributed._functional_collectives")
    return torch.ops._c10d_functional


def _arrived(collective: str, *args: Any) -> torch.Tensor:
    """The result of a collective. A collective needed in backward stays in backward.

    Compilers would move it into forward if it depends on no gradient, and leave an unused copy in backward.
    """
    operators, meta = functional_collectives(), fx_traceback.current_meta
    note_traced_line(collective, args[0], args[-1])
    tag = meta.get(_TAG)
    if tag == "is_backward":
        meta[_TAG] = "must_be_in_backward"
    try:
        return operators.wait_tensor(getattr(operators, collective)(*args))
    finally:
        if tag is not None:
            meta[_TAG] = tag


def _gathered(local: torch.Tensor, group: Any) -> torch.Tensor:
    """The locals of all ranks of the group, stacked along a new dim 0."""
    n = group.size()
    carried = as_carried(local)
    parts = _arrived("all_gather_into_tensor", carried, n, group.group_name)
    return (
        parts.view(local.dtype).view(n, *local.shape)
        if carried.dtype is not local.dtype
        else parts.view(n, *local.shape)
    )


def recorded_step(step: Step, line: Line, group: Any, coordinate: Coordinate) -> BoundStep | None:
    """The function that records a collective; None if it must be a general exchange."""
    match step:
        case AllGather():
            return _all_gather(step, line, group, coordinate)
        case AllReduce() | ReduceScatter() if step.before.tensor_meta.dtype.is_complex and reduction(step) == "product":
            return _reduce_by_gathering(step, group, coordinate)
        case AllReduce():
            return _all_reduce(step, group)
        case ReduceScatter():
            return _reduce_scatter(step, line, group, coordinate)
        case AllToAll():
            return _all_to_all(step, line, group, coordinate)
        case _:
            return None


def _all_gather(step: AllGather, line: Line, group: Any, coordinate: Coordinate) -> BoundStep:
    how = gathering(step, line, coordinate)
    return lambda local: how.assemble(_gathered(how.pad(local), group))


def _reduce_by_gathering(step: AllReduce | ReduceScatter, group: Any, coordinate: Coordinate) -> BoundStep:
    cut = slicer(step.before.block(coordinate), step.after.block(coordinate))
    return lambda local: cut(reduce_tensors(_gathered(local.contiguous(), group).unbind(), reduction(step)))


def _reduce_name(step: AllReduce | ReduceScatter) -> str:
    op = reduction(step)
    # averages are divided afterwards and norms are sums of powers, as issued ones are
    return op if op in ("min", "max", "product") else "sum"


def _all_reduce(step: AllReduce, group: Any) -> BoundStep:
    finish, op, name = average_divider(step), reduction(step), _reduce_name(step)

    def trace_all_reduce(local: torch.Tensor) -> torch.Tensor:
        given = as_reducible(local, op).contiguous()
        total = _arrived("all_reduce", given, name, group.group_name)
        return from_reducible(total if finish is None else finish(total), local.dtype, op)

    return trace_all_reduce


def _reduce_scatter(step: ReduceScatter, line: Line, group: Any, coordinate: Coordinate) -> BoundStep:
    how = scattering(step, line, coordinate)
    finish, op, name = average_divider(step), reduction(step), _reduce_name(step)

    def trace_reduce_scatter(local: torch.Tensor) -> torch.Tensor:
        packed = how.pack(as_reducible(local, op))
        rows = packed.view(-1, *packed.shape[2:]) if packed.dim() > 1 else packed
        total = _arrived("reduce_scatter_tensor", rows, name, group.size(), group.group_name)
        total = total.view(how.part)
        return from_reducible(how.own(total if finish is None else finish(total)), local.dtype, op)

    return trace_reduce_scatter


def _all_to_all(step: AllToAll, line: Line, group: Any, coordinate: Coordinate) -> BoundStep | None:
    goal = swapping(step, line, coordinate)
    if goal is None:
        return None
    n = group.size()

    def trace_all_to_all(local: torch.Tensor) -> torch.Tensor:
        packed = split_in_front(local, step.target_dim, n)
        carried = as_carried(packed).view(n, -1)
        got = _arrived("all_to_all_single", carried, [1] * n, [1] * n, group.group_name)
        return got.view(packed.dtype).view(packed.shape).movedim(0, step.source_dim).reshape(goal)

    return trace_all_to_all


def recorded_unreduce(step: Unreduce, coordinate: Coordinate) -> BoundStep:
    """R -> P. The neutral element also depends on the local: graphs must be the same on all ranks."""
    neutral = neutral_element(step, coordinate)
    if neutral is None:
        return torch.clone
    return lambda local: local.masked_fill(torch.ones_like(local, dtype=torch.bool), neutral)


def recorded_exchange(parcels: Parcels, group: Any, have: Coordinate | None, dtype: torch.dtype) -> BoundStep:
    """One all-to-all with uneven splits."""
    sent = sum(parcels.sent_sizes)

    def trace_exchange(local: torch.Tensor) -> torch.Tensor:
        if have is None:  # a rank outside the mesh has an empty local of an arbitrary dtype
            local = local.new_empty(0, dtype=dtype)
        packed = pack_traced(parcels.packed(local), local, sent)
        carried = as_carried(packed)
        scale = packed.element_size() // carried.element_size()
        buffer = _arrived("all_to_all_single", carried, *parcels.splits(scale), group.group_name)
        return parcels.unpack(local, buffer.view(packed.dtype))

    return trace_exchange


def recorded_rotation(parcels: Rotation, group: Any, tag: int) -> Start:
    """One all-to-all of one block. It is waited for at once; compilers move the wait.

    An element that a rank sends to itself is a tag: it distinguishes two rotations in which a rank sends nothing.
    """
    at = 1 if parcels.target > parcels.me else 0  # where the block begins, beside the tag
    from_ = 1 if parcels.source > parcels.me else 0

    def start(flat: torch.Tensor) -> Wait:
        packed = pack_traced([(at, flat[: parcels.sent])], flat, parcels.sent + 1, tag)
        carried = as_carried(packed)
        splits = parcels.splits(packed.element_size() // carried.element_size(), extra=1)
        buffer = _arrived("all_to_all_single", carried, *splits, group.group_name).view(packed.dtype)
        arrived = buffer.narrow(0, from_ if parcels.got else 0, parcels.got)
        return lambda: arrived

    return start


def recorded_rows(parcels: RowParcels, group: Any) -> BoundRows:
    """One all-to-all of the rows of several tensors."""
    sent = sum(size for _, size in parcels.sent)

    def trace_row_exchange(locals_: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
        packed = pack_traced(parcels.packed(locals_), locals_[0], sent, parcels.tag)
        carried = as_carried(packed)
        splits = parcels.splits(packed.element_size() // carried.element_size())
        buffer = _arrived("all_to_all_single", carried, *splits, group.group_name)
        return parcels.unpack_traced(locals_, buffer.view(packed.dtype), fill)

    return trace_row_exchange
