"""One step as a collective on a process group: what is packed, called and unpacked by one rank.

Each function is given the ranks that take part and binds the step to them; what comes back starts the collective and
gives the function that waits for it. Knows nothing of where groups come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.core.layout import Block, dense_strides
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.pieces import Box, average_divider, fill_from, overlap, reduce_tensors, slicer
from shardwise.fabric.traffic import Traffic
from shardwise.fabric.wire import as_carried, as_reducible, from_reducible
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, reduction

__all__ = [
    "Line", "Start", "Wait", "all_gather", "all_reduce", "all_to_all", "exchange", "reduce_by_gathering",
    "reduce_scatter",
]  # fmt: skip

Wait = Callable[[], torch.Tensor]
Start = Callable[[torch.Tensor], Wait]

_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average of every dtype
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class Line(NamedTuple):
    """The ranks that differ from this one along some axes of a mesh alone, by coordinate, the first axis major."""

    ranks: list[int]
    coordinates: list[Coordinate]
    order: list[int]  # the rank of each in the group
    in_order: bool  # whether that is the order of the coordinates
    group_ranks: list[int]  # the same ranks as the group has them
    group_coordinates: tuple[Coordinate, ...]


def all_gather(step: AllGather, line: Line, group: Any, coordinate: Coordinate) -> Start:
    """The blocks of all, padded where they are uneven, put together along the dim."""
    order, dim, n = line.order, step.dim, len(line.ranks)
    goal = step.after.block(coordinate)
    even = line.in_order and _divides(step.before, dim)
    blocks = [] if even else [step.before.block(other) for other in line.coordinates]
    in_order = even or (line.in_order and _follow_each_other(blocks, goal, dim))
    sizes = [block.shape[dim] for block in blocks]
    whole = list(step.before.local_shape(coordinate))
    whole[dim] = widest = max(sizes, default=whole[dim])

    def assemble(parts: torch.Tensor) -> torch.Tensor:
        if even:
            return parts.movedim(0, dim).reshape(goal.shape)
        pieces = [parts[order[i]].narrow(dim, 0, sizes[i]) for i in range(n)]
        if in_order:
            return torch.cat(pieces, dim)
        out = parts.new_empty(goal.shape)
        for block, piece in zip(blocks, pieces, strict=True):
            fill_from(out, piece, overlap(block, goal))
        return out

    def start(local: torch.Tensor) -> Wait:
        if local.shape[dim] < widest:
            local = _padded(local, dim, widest)
        local = local.contiguous()
        buffer = local.new_empty((n, *whole))
        work = group._allgather_base(as_carried(buffer).view(-1), as_carried(local).view(-1))

        def wait() -> torch.Tensor:
            work.wait()
            return assemble(buffer)

        return wait

    def start_in_place(local: torch.Tensor) -> Wait:
        local = local.contiguous()
        out = local.new_empty(goal.shape)
        return _after(group._allgather_base(as_carried(out), as_carried(local)), out)

    return start_in_place if even and dim == 0 else start


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
    """A reduction that process groups lack: each rank gets all parts and reduces them itself."""
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
    """The reduction, of which each rank gets its part, padded where parts are uneven."""
    order, dim, n = line.order, step.dim, len(line.ranks)
    even = line.in_order and _divides(step.after, dim)
    blocks = [] if even else [step.after.block(other) for other in line.coordinates]
    source = step.before.block(coordinate)
    boxes = [overlap(source, block) for block in blocks]
    mine = step.after.local_shape(coordinate)[dim]
    widest = max([block.shape[dim] for block in blocks], default=mine)
    whole = list(source.shape)
    whole[dim] = widest
    options = dist.ReduceScatterOptions()
    op = reduction(step)
    options.reduceOp = _REDUCE_OPS.get(op, dist.ReduceOp.SUM)  # norms are sums of powers
    finish = average_divider(step)

    def pack(local: torch.Tensor) -> torch.Tensor:
        if even:
            return _split_in_front(local, dim, n)
        packed = local.new_zeros((n, *whole))
        for i, parts in enumerate(boxes):
            fill_from(packed[order[i]], local, parts)
        return packed

    def start(local: torch.Tensor) -> Wait:
        packed = pack(as_reducible(local, op))
        buffer = packed.new_empty(whole)
        work = group._reduce_scatter_base(buffer.view(-1), packed.view(-1), options)

        def wait() -> torch.Tensor:
            work.wait()
            total = buffer if finish is None else finish(buffer)
            if mine != widest:
                total = total.narrow(dim, 0, mine).clone()
            return from_reducible(total, local.dtype, op)

        return wait

    return start


def all_to_all(step: AllToAll, line: Line, group: Any, coordinate: Coordinate) -> Start | None:
    """Where all parts are of one size, in order and row-major; None where the general exchange must do it."""
    n, source_dim, target_dim = len(line.ranks), step.source_dim, step.target_dim
    alike = _divides(step.before, source_dim) and _divides(step.after, target_dim)
    row_major = step.after.tensor_meta.stride == dense_strides(step.after.shape)
    if not alike or not row_major or not line.in_order:
        return None
    shape = list(step.before.local_shape(coordinate))
    shape[target_dim] //= n
    goal = [size * n if dim == source_dim else size for dim, size in enumerate(shape)]

    def start(local: torch.Tensor) -> Wait:
        packed = _split_in_front(local, target_dim, n)
        buffer = torch.empty_like(packed)
        work = group.alltoall_base(as_carried(buffer).view(-1), as_carried(packed).view(-1), [], [])

        def wait() -> torch.Tensor:
            work.wait()
            return buffer.movedim(0, source_dim).reshape(goal)

        return wait

    return start


def exchange(
    step: Exchange, group: Any, me: int, moved: Traffic, have: Coordinate | None, want: Coordinate | None
) -> Start:
    """One all-to-all with uneven splits: the boxes of each receiver packed one after the other, and unpacked."""
    sent_sizes = [sum([box.numel for box in boxes]) for boxes in moved.sends]
    got_sizes = [sum([box.numel for box in boxes]) for boxes in moved.receives]
    if any(got_sizes) and not any(sent_sizes):
        # torch's fake backend takes no empty input, so one element goes from this rank to itself
        sent_sizes[me] = got_sizes[me] = 1
    sent, got = sum(sent_sizes), sum(got_sizes)
    sends, receives = _parts(moved.sends, sent_sizes), _parts(moved.receives, got_sizes)
    shape = None if want is None else step.after.local_shape(want)
    stride = None if want is None else step.after.local_stride(want)

    def start(local: torch.Tensor) -> Wait:
        if have is None:  # a rank outside held nothing, of no dtype in particular
            local = local.new_empty(0, dtype=step.before.tensor_meta.dtype)
        packed, buffer = local.new_empty(sent), local.new_empty(got)
        for box, part in zip(sends.boxes, packed.split_with_sizes(sends.lengths), strict=True):
            if box is not None:
                part.view(box.shape).copy_(local[box.source])
        carried = as_carried(buffer)
        scale = buffer.element_size() // carried.element_size()
        work = group.alltoall_base(
            carried, as_carried(packed), [n * scale for n in got_sizes], [n * scale for n in sent_sizes]
        )

        def wait() -> torch.Tensor:
            work.wait()
            if shape is None or stride is None:
                return local.new_empty(0)
            out = local.new_empty_strided(shape, stride)
            fill_from(out, local, moved.keeps)
            for box, part in zip(receives.boxes, buffer.split_with_sizes(receives.lengths), strict=True):
                if box is not None:
                    out[box.target].copy_(part.view(box.shape))
            return out

        return wait

    return start


class Parts(NamedTuple):
    """A flat buffer in parts: the box that each is, None for elements that nobody wants, and how long each is."""

    boxes: list[Box | None]
    lengths: list[int]


def _parts(boxes: Sequence[Sequence[Box]], sizes: Sequence[int]) -> Parts:
    """The parts of a buffer in which the ranks have places of `sizes`."""
    made = Parts([], [])
    for of_rank, size in zip(boxes, sizes, strict=True):
        made.boxes.extend(of_rank or [None])
        made.lengths.extend([box.numel for box in of_rank] or [size])
    return made


def _divides(spec: DTensorSpec, dim: int) -> bool:
    """Whether all ranks hold runs of one length of `dim`."""
    axes = spec.dim_axes[dim]
    if spec.is_strided and any(spec.rows(axis) for axis in axes):
        return False
    return spec.shape[dim] % math.prod([spec.mesh.shape[axis] for axis in axes]) == 0


def _follow_each_other(blocks: Sequence[Block], whole: Block, dim: int) -> bool:
    """Whether in `dim` the blocks, one after the other, are `whole`; strided ones need not be."""
    runs = [run for block in blocks for run in block.runs[dim] if run.length]
    ends = [run.start + run.length for run in runs]
    return len(whole.runs[dim]) == 1 and all(run.start == end for run, end in zip(runs[1:], ends, strict=False))


def _after(work: Any, result: torch.Tensor) -> Wait:
    """Waits for `work`, which fills `result`."""

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def _split_in_front(local: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """`local` as a dense row of `parts`, into which `dim` is split evenly."""
    shape = local.shape
    split = local.reshape(*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    return split.movedim(dim, 0).contiguous()


def _padded(local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = size
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return padded
