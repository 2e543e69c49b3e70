"""Steps as collectives on a process group: one rank's packing, call and unpacking.

Each function binds a step to the participating ranks. Its result starts the collective and returns the function that
waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.core.mesh import Coordinate
from shardwise.fabric.base import BoundRows, check_counts
from shardwise.fabric.block_copies import average_divider, reduce_tensors, slicer
from shardwise.fabric.encoding import CARRIED, as_carried, as_reducible, from_reducible
from shardwise.fabric.line_packing import LineParcels
from shardwise.fabric.packing import Line, Parcels, gathering, pack, scattering, split_in_front, swapping
from shardwise.fabric.row_packing import RowParcels
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, OwnerExchange, ReduceScatter, reduction
from shardwise.rules.owner_programs import Items

__all__ = [
    "Rotation",
    "Start",
    "Wait",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "exchange",
    "exchange_items",
    "exchange_rows",
    "reduce_by_gathering",
    "reduce_scatter",
    "rotate",
]

Wait = Callable[[], torch.Tensor]
Start = Callable[[torch.Tensor], Wait]

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average of every dtype
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def all_gather(step: AllGather, line: Line, group: Any, coordinate: Coordinate) -> Start:
    """The blocks of all ranks, padded if uneven, concatenated along the dim."""
    n = len(line.ranks)
    part, pad, assemble, as_it_comes, shape = gathering(step, line, coordinate)

    def start(local: torch.Tensor) -> Wait:
        local = pad(local)
        buffer = local.new_empty((n, *part))
        work = group._allgather_base(as_carried(buffer).view(-1), as_carried(local).view(-1))

        def wait() -> torch.Tensor:
            work.wait()
            return assemble(buffer)

        return wait

    def start_in_place(local: torch.Tensor) -> Wait:
        local = local.contiguous()
        out = local.new_empty(shape)
        return _after(group._allgather_base(as_carried(out), as_carried(local)), out)

    return start_in_place if as_it_comes else start


def all_reduce(step: AllReduce, group: Any) -> Start:
    """The reduction on every rank."""
    options = dist.AllreduceOptions()
    op = reduction(step)
    options.reduceOp = _REDUCE_OPS.get(op, dist.ReduceOp.SUM)  # norms are sums of powers
    finish = average_divider(step)

    def start(local: torch.Tensor) -> Wait:
        buffer = as_reducible(local, op)
        if buffer is local or not buffer.is_contiguous():
            buffer = buffer.clone(memory_format=torch.contiguous_format)
        work = group.allreduce([buffer], options)

        def wait() -> torch.Tensor:
            work.wait()
            return from_reducible(buffer if finish is None else finish(buffer), local.dtype, op)

        return wait

    return start


def reduce_by_gathering(step: AllReduce | ReduceScatter, group: Any, coordinate: Coordinate) -> Start:
    """A reduction that process groups lack: each rank gathers all addends and reduces them itself."""
    cut = slicer(step.before.block(coordinate), step.after.block(coordinate))

    def start(local: torch.Tensor) -> Wait:
        local = local.contiguous()
        buffer = local.new_empty((group.size(), *local.shape))
        work = group._allgather_base(as_carried(buffer).view(-1), as_carried(local).view(-1))

        def wait() -> torch.Tensor:
            work.wait()
            return cut(reduce_tensors(buffer.unbind(), reduction(step)))

        return wait

    return start


def reduce_scatter(step: ReduceScatter, line: Line, group: Any, coordinate: Coordinate) -> Start:
    """The reduction, of which each rank receives its part, padded if parts are uneven."""
    part, pack, own = scattering(step, line, coordinate)
    options = dist.ReduceScatterOptions()
    op = reduction(step)
    options.reduceOp = _REDUCE_OPS.get(op, dist.ReduceOp.SUM)  # norms are sums of powers
    finish = average_divider(step)

    def start(local: torch.Tensor) -> Wait:
        packed = pack(as_reducible(local, op))
        buffer = packed.new_empty(part)
        work = group._reduce_scatter_base(buffer.view(-1), packed.view(-1), options)

        def wait() -> torch.Tensor:
            work.wait()
            return from_reducible(own(buffer if finish is None else finish(buffer)), local.dtype, op)

        return wait

    return start


def all_to_all(step: AllToAll, line: Line, group: Any, coordinate: Coordinate) -> Start | None:
    """All-to-all for parts of one size, in order and row-major; None if a general exchange is needed."""
    n, source_dim, target_dim = len(line.ranks), step.source_dim, step.target_dim
    goal = swapping(step, line, coordinate)
    if goal is None:
        return None

    def start(local: torch.Tensor) -> Wait:
        packed = split_in_front(local, target_dim, n)
        buffer = torch.empty_like(packed)
        work = group.alltoall_base(as_carried(buffer).view(-1), as_carried(packed).view(-1), [], [])

        def wait() -> torch.Tensor:
            work.wait()
            return buffer.movedim(0, source_dim).reshape(goal)

        return wait

    return start


def exchange(step: Exchange, group: Any, have: Coordinate | None, parcels: Parcels | LineParcels) -> Start:
    """One all-to-all with uneven splits: the boxes of each receiver packed one after the other, and unpacked."""
    got = sum(parcels.got_sizes)
    splits: list[list[int]] = []  # received and sent, in elements that the group carries

    def start(local: torch.Tensor) -> Wait:
        if have is None:  # a rank outside the mesh has an empty local of an arbitrary dtype
            local = local.new_empty(0, dtype=step.before.tensor_meta.dtype)
        packed, buffer = parcels.buffer(local), local.new_empty(got)
        carried = as_carried(buffer)
        if not splits:
            splits.extend(parcels.splits(buffer.element_size() // carried.element_size()))
        work = group.alltoall_base(carried, as_carried(packed), *splits)

        def wait() -> torch.Tensor:
            work.wait()
            return parcels.unpack(local, buffer)

        return wait

    return start


def exchange_rows(group: Any, parcels: RowParcels) -> BoundRows:
    """One all-to-all of the rows of several tensors. Splits are made for each call: most of them are zero."""
    sent, got = (sum(size for _, size in pairs) for pairs in (parcels.sent, parcels.got))

    def run_row_exchange(locals_: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
        packed, buffer = pack(parcels.packed(locals_), locals_[0].new_empty(sent)), locals_[0].new_empty(got)
        carried = as_carried(buffer)
        splits = parcels.splits(buffer.element_size() // carried.element_size())
        group.alltoall_base(carried, as_carried(packed), *splits).wait()
        return parcels.unpack(locals_, buffer, fill)

    return run_row_exchange


class Rotation(NamedTuple):
    """One rank's part in a rotation: numbers of elements, and the ranks that it sends to and receives from."""

    ranks: int
    me: int
    target: int
    source: int
    sent: int
    got: int

    def splits(self, scale: int, extra: int = 0) -> tuple[list[int], list[int]]:
        """Received and sent elements by rank; `extra` elements to itself besides."""
        got, sent = [0] * self.ranks, [0] * self.ranks
        got[self.me] = sent[self.me] = extra * scale
        got[self.source], sent[self.target] = self.got * scale, self.sent * scale
        return got, sent


def rotate(group: Any, rotation: Rotation) -> Start:
    """One all-to-all in which a rank sends to one rank and receives from one."""

    def start(flat: torch.Tensor) -> Wait:
        buffer, sent = flat.new_empty(rotation.got), flat[: rotation.sent]
        carried = as_carried(buffer)
        splits = rotation.splits(flat.element_size() // carried.element_size())
        return _after(group.alltoall_base(carried, as_carried(sent), *splits), buffer)

    return start


def exchange_items(step: OwnerExchange, group: Any, line: Line, items: Items) -> Items:
    """The items received by their owner. Unless sizes are known, they are sent first, and the host waits for them.

    Items are in the order of the coordinates; the group may number its ranks differently.
    """
    sizes, arriving, tensors = items.counts, items.arriving, items.tensors
    if arriving is None:
        counts = sizes if isinstance(sizes, torch.Tensor) else torch.tensor(sizes, device=tensors[0].device)
        counts = counts if line.in_order else counts[_by_rank(line)]
        incoming = torch.empty_like(counts)
        group.alltoall_base(incoming, counts, [], []).wait()
        both = torch.stack([counts, incoming]).tolist()
        sizes, arriving = (tuple(_by_coordinate(line, own)) for own in both)
        check_counts(step, (*sizes, *arriving))
    assert isinstance(sizes, tuple)
    do = items.meanwhile
    got = [_exchanged_rows(group, line, tensors[0], sizes, arriving, do)]
    got += [_exchanged_rows(group, line, tensor, sizes, arriving) for tensor in tensors[1:]]
    return Items(tuple(got), arriving, sizes)


def _by_rank(line: Line) -> list[int]:
    """The position by coordinate of each rank of the group."""
    positions = [0] * len(line.order)
    for position, rank in enumerate(line.order):
        positions[rank] = position
    return positions


def _by_coordinate(line: Line, sizes: Sequence[int]) -> list[int]:
    return list(sizes) if line.in_order else [sizes[rank] for rank in line.order]


def _exchanged_rows(
    group: Any,
    line: Line,
    tensor: torch.Tensor,
    sent: Sequence[int],
    got: Sequence[int],
    meanwhile: Callable[[], object] | None = None,
) -> torch.Tensor:
    """One all-to-all of rows, with the numbers of rows sent to and received from each rank, by coordinate."""
    if not line.in_order:
        parts, positions = tensor.split(list(sent)), _by_rank(line)
        tensor = torch.cat([parts[position] for position in positions])
        sent, got = [sent[position] for position in positions], [got[position] for position in positions]
    buffer = tensor.new_empty((sum(got), *tensor.shape[1:]))
    if tensor.dtype in CARRIED and line.in_order and tensor.dim() <= 2 and 0 not in tensor.shape[1:]:
        work = group.alltoall_base(buffer, tensor.contiguous(), list(got), list(sent))  # splits are numbers of rows
        _wait(work, meanwhile)
        return buffer
    carried = as_carried(buffer.view(-1))
    scale = math.prod(tensor.shape[1:]) * (tensor.element_size() // carried.element_size())
    packed = as_carried(tensor.contiguous().view(-1))
    work = group.alltoall_base(carried, packed, [n * scale for n in got], [n * scale for n in sent])
    _wait(work, meanwhile)
    if line.in_order:
        return buffer
    parts = buffer.split(list(got))
    return torch.cat([parts[rank] for rank in line.order])


def _wait(work: Any, meanwhile: Callable[[], object] | None) -> None:
    try:
        if meanwhile is not None:
            meanwhile()
    finally:
        work.wait()


def _after(work: Any, result: torch.Tensor) -> Wait:
    """Waits for `work`, which fills `result`."""

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait
