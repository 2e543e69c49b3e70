"""The fabric of real machines: one rank a process, on torch.distributed (gloo, NCCL, MPI, and torch's fake backend).

Calls the process group's own methods with preallocated outputs. Knows nothing of operators or DTensors.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core.layout import Block, dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import norm_order
from shardwise.core.spec import DTensorSpec
from shardwise.errors import MeshError
from shardwise.fabric.base import BoundStep, Coordinate, Fabric, register
from shardwise.fabric.pieces import (
    Box,
    average_divider,
    empty_block,
    fill_from,
    local_step,
    norm_from_powers,
    overlap,
    powers_of,
    reduce_tensors,
    slicer,
)
from shardwise.fabric.traffic import Traffic, traffic
from shardwise.plan.route import Route
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Step, reduction

__all__ = ["C10dFabric"]

T = TypeVar("T")
Wait = Callable[[], torch.Tensor]
Start = Callable[[torch.Tensor], Wait]

# What process groups carry as it is. Anything else travels as bytes (copies) or is widened (reductions).
_CARRIED = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip
_WIDENED = {torch.bool: torch.int32, torch.int16: torch.int32, torch.bfloat16: torch.float32}


class Line(NamedTuple):
    """The ranks that differ from this one along some axes of a mesh alone, by coordinate, the first axis major."""

    ranks: list[int]
    coordinates: list[Coordinate]
    order: list[int]  # the rank of each in the group
    in_order: bool  # whether that is the order of the coordinates
    group_ranks: list[int]  # the same ranks as the group has them
    group_coordinates: tuple[Coordinate, ...]


class C10dFabric(Fabric):
    """One rank in this process; the others are reached through process groups, made on first use."""

    name = "c10d"
    asynchronous = True

    def __init__(self) -> None:
        self._world: Any = None
        self._rank = 0
        self._groups: dict[tuple[int, ...], Any] = {}
        self._lines: dict[tuple[DeviceMesh, tuple[int, ...]], Line] = {}
        self._coordinates: dict[DeviceMesh, Coordinate | None] = {}

    # ---------------------------------------------------------------- who am I

    def rank(self) -> int:
        if self._world is not None and self._world is dist.group.WORLD:
            return self._rank
        if not dist.is_initialized():
            raise MeshError(
                "no process group is up, so this process has no rank",
                hint="start the program with torchrun, or call torch.distributed.init_process_group first",
            )
        self._world, self._rank = dist.group.WORLD, dist.get_rank()
        self._groups.clear()  # they are gone with the former world
        self._lines.clear()
        self._coordinates.clear()
        return self._rank

    def coordinate(self, mesh: DeviceMesh) -> Coordinate | None:
        """This rank's coordinate, None outside the mesh."""
        rank = self.rank()  # forgets the coordinates of a former world
        if mesh not in self._coordinates:
            self._coordinates[mesh] = mesh.coordinate_of(rank)
        return self._coordinates[mesh]

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        return self.group_of(self._line(mesh, axes).ranks)

    def _line(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Line:
        position = mesh.position_of(self.rank())
        if position is None:
            raise MeshError(f"rank {self.rank()} is not in {mesh}")
        found = self._lines.get((mesh, axes))
        if found is None:
            rows = mesh.groups(axes)
            members = rows[(rows == position).any(axis=1).argmax()].tolist()
            ranks = [mesh.grid_ranks[i] for i in members]
            coordinates = [tuple(row) for row in mesh.coordinates[members].tolist()]
            where = dict(zip(ranks, coordinates, strict=True))
            in_group = {rank: i for i, rank in enumerate(sorted(ranks))}
            order = [in_group[rank] for rank in ranks]
            in_order, by_rank = order == sorted(order), tuple([where[rank] for rank in in_group])
            found = Line(ranks, coordinates, order, in_order, list(in_group), by_rank)
            self._lines[mesh, axes] = found
        return found

    def group_of(self, ranks: Sequence[int]) -> Any:
        """The process group of these ranks; made on first use, by its members alone."""
        self.rank()  # forgets the groups of a former world
        key = tuple(sorted(ranks))
        found = self._groups.get(key)
        if found is None:
            if key == tuple(range(dist.get_world_size())):
                found = dist.group.WORLD
            else:
                found = _new_group(key)
            self._groups[key] = found
        return found

    def adopt(self, group: Any) -> None:
        """Use an existing process group for its ranks instead of making one."""
        self.rank()  # forgets the groups of a former world
        self._groups.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)

    # ---------------------------------------------------------------- values of this rank

    def build(self, mesh: DeviceMesh, make: Callable[[Coordinate], torch.Tensor]) -> torch.Tensor:
        coordinate = self.coordinate(mesh)
        return torch.empty(0, device=device_of(mesh)) if coordinate is None else make(coordinate)

    def map(self, mesh: DeviceMesh, fn: Callable[..., torch.Tensor], *locals_: torch.Tensor) -> torch.Tensor:
        coordinate = self.coordinate(mesh)
        return locals_[0] if coordinate is None else fn(coordinate, *locals_)

    def parts(self, mesh: DeviceMesh, local: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
        coordinate = self.coordinate(mesh)
        return [] if coordinate is None else [(coordinate, local)]

    def scatter(
        self, mesh: DeviceMesh, blocks: Callable[[Coordinate], torch.Tensor], source: int | None
    ) -> torch.Tensor:
        coordinate = self.coordinate(mesh)
        if coordinate is None or source is None:
            return self.build(mesh, blocks)
        ranks, coordinates, *_ = self._line(mesh, tuple(range(mesh.ndim)))
        group = self.group_of(ranks)
        if not 0 <= source < len(ranks):
            raise MeshError(f"src_data_rank={source} is not in {mesh}", hint=f"it has the ranks 0 to {len(ranks) - 1}")
        own = blocks(coordinate).contiguous()
        sender = ranks[source]
        if len(ranks) == 1:
            return own
        if self.rank() == sender:
            others = [
                (rank, blocks(at).contiguous()) for rank, at in zip(ranks, coordinates, strict=True) if rank != sender
            ]
            sends = [dist.P2POp(dist.isend, _as_carried(block), rank, group) for rank, block in others if block.numel()]
            for work in dist.batch_isend_irecv(sends) if sends else ():
                work.wait()
            return own
        received = torch.empty_like(own)
        if received.numel():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, _as_carried(received), sender, group)]):
                work.wait()
        return received

    def agree(self, mesh: DeviceMesh, facts: Any, tensor: torch.Tensor) -> list[Any]:
        if self.coordinate(mesh) is None:
            return []
        group = self.group(mesh, tuple(range(mesh.ndim)))
        if dist.get_backend(group) == "fake":  # where nobody else is there to answer
            return [facts] * mesh.size()
        said: list[Any] = [None] * mesh.size()
        dist.all_gather_object(said, facts, group=group)
        return said

    # ---------------------------------------------------------------- steps

    def bind_route(self, route: Route) -> BoundStep:
        bind = super().bind_route
        return _of_this_world(lambda: bind(route))

    def start_route(self, route: Route) -> Start:
        bind = super().start_route
        return _of_this_world(lambda: bind(route))

    def bind(self, step: Step) -> BoundStep:
        coordinate = self.coordinate(step.before.mesh)
        if coordinate is not None:
            local = local_step(step, coordinate)
            if local is not None:
                return local
        start = self.start(step)
        return lambda local: start(local)()

    def start(self, step: Step) -> Start:
        if 0 in step.before.shape:
            return self._nothing_to_send(step)
        if isinstance(step, Exchange):
            return self._exchange(step)
        coordinate = self.coordinate(step.before.mesh)
        if coordinate is None:
            return lambda local: lambda: local
        match step:
            case AllGather():
                return self._all_gather(step, coordinate)
            case AllReduce() | ReduceScatter() if step.before.tensor_meta.dtype.is_complex and _is_product(step):
                return self._reduce_by_gathering(step, coordinate)
            case AllReduce():
                return self._all_reduce(step)
            case ReduceScatter():
                return self._reduce_scatter(step, coordinate)
            case AllToAll():
                general = Exchange(step.before, step.after, step.over)
                return self._all_to_all(step, coordinate) or self._exchange(general)
            case _:
                bound = self.bind(step)
                return lambda local: lambda: bound(local)

    def _nothing_to_send(self, step: Step) -> Start:
        """A tensor without elements: every rank knows, so none is called."""
        coordinate = self.coordinate(step.after.mesh)
        if coordinate is None:
            return lambda local: lambda: local
        return lambda local: lambda: empty_block(step.after, coordinate, local)

    def _all_gather(self, step: AllGather, coordinate: Coordinate) -> Start:
        line = self._line(step.before.mesh, step.over)
        group, order, dim, n = self.group_of(line.ranks), line.order, step.dim, len(line.ranks)
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
            work = group._allgather_base(_as_carried(buffer).view(-1), _as_carried(local).view(-1))

            def wait() -> torch.Tensor:
                work.wait()
                return assemble(buffer)

            return wait

        def start_in_place(local: torch.Tensor) -> Wait:
            local = local.contiguous()
            out = local.new_empty(goal.shape)
            return _after(group._allgather_base(_as_carried(out), _as_carried(local)), out)

        return start_in_place if even and dim == 0 else start

    def _all_reduce(self, step: AllReduce) -> Start:
        group = self.group(step.before.mesh, step.over)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS.get(reduction(step), dist.ReduceOp.SUM)
        finish = average_divider(step)
        special = _special(step)

        def start(local: torch.Tensor) -> Wait:
            buffer = _as_reducible(local, special)
            if buffer is local or not buffer.is_contiguous():
                buffer = buffer.clone(memory_format=torch.contiguous_format)
            work = group.allreduce([buffer], options)

            def wait() -> torch.Tensor:
                work.wait()
                return _from_reducible(buffer if finish is None else finish(buffer), local.dtype, special)

            return wait

        return start

    def _reduce_by_gathering(self, step: AllReduce | ReduceScatter, coordinate: Coordinate) -> Start:
        """A reduction that process groups lack: each rank gets all parts and reduces them itself."""
        group = self.group(step.before.mesh, step.over)
        cut = slicer(step.before.block(coordinate), step.after.block(coordinate))

        def start(local: torch.Tensor) -> Wait:
            local = local.contiguous()
            buffer = local.new_empty((group.size(), *local.shape))
            work = group._allgather_base(_as_carried(buffer).view(-1), _as_carried(local).view(-1))

            def wait() -> torch.Tensor:
                work.wait()
                return cut(reduce_tensors(buffer.unbind(), reduction(step)))

            return wait

        return start

    def _reduce_scatter(self, step: ReduceScatter, coordinate: Coordinate) -> Start:
        line = self._line(step.before.mesh, step.over)
        group, order, dim, n = self.group_of(line.ranks), line.order, step.dim, len(line.ranks)
        even = line.in_order and _divides(step.after, dim)
        blocks = [] if even else [step.after.block(other) for other in line.coordinates]
        source = step.before.block(coordinate)
        boxes = [overlap(source, block) for block in blocks]
        mine = step.after.local_shape(coordinate)[dim]
        widest = max([block.shape[dim] for block in blocks], default=mine)
        whole = list(source.shape)
        whole[dim] = widest
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS.get(reduction(step), dist.ReduceOp.SUM)
        finish = average_divider(step)
        special = _special(step)

        def pack(local: torch.Tensor) -> torch.Tensor:
            if even:
                return _split_in_front(local, dim, n)
            packed = local.new_zeros((n, *whole))
            for i, parts in enumerate(boxes):
                fill_from(packed[order[i]], local, parts)
            return packed

        def start(local: torch.Tensor) -> Wait:
            packed = pack(_as_reducible(local, special))
            buffer = packed.new_empty(whole)
            work = group._reduce_scatter_base(buffer.view(-1), packed.view(-1), options)

            def wait() -> torch.Tensor:
                work.wait()
                total = buffer if finish is None else finish(buffer)
                if mine != widest:
                    total = total.narrow(dim, 0, mine).clone()
                return _from_reducible(total, local.dtype, special)

            return wait

        return start

    def _all_to_all(self, step: AllToAll, coordinate: Coordinate) -> Start | None:
        """Where all parts are of one size, in order and row-major; None where the general exchange must do it."""
        line = self._line(step.before.mesh, step.over)
        n, source_dim, target_dim = len(line.ranks), step.source_dim, step.target_dim
        alike = _divides(step.before, source_dim) and _divides(step.after, target_dim)
        row_major = step.after.tensor_meta.stride == dense_strides(step.after.shape)
        if not alike or not row_major or not line.in_order:
            return None
        group = self.group_of(line.ranks)
        shape = list(step.before.local_shape(coordinate))
        shape[target_dim] //= n
        goal = [size * n if dim == source_dim else size for dim, size in enumerate(shape)]

        def start(local: torch.Tensor) -> Wait:
            packed = _split_in_front(local, target_dim, n)
            buffer = torch.empty_like(packed)
            work = group.alltoall_base(_as_carried(buffer).view(-1), _as_carried(packed).view(-1), [], [])

            def wait() -> torch.Tensor:
                work.wait()
                return buffer.movedim(0, source_dim).reshape(goal)

            return wait

        return start

    def _exchange(self, step: Exchange) -> Start:
        before, after = step.before, step.after
        if before.mesh is not after.mesh:
            ranks = sorted({*before.mesh.grid_ranks, *after.mesh.grid_ranks})
            having, wanting = (tuple(map(spec.mesh.coordinate_of, ranks)) for spec in (before, after))
        elif self.coordinate(before.mesh) is not None:
            line = self._line(before.mesh, step.over)
            ranks, having, wanting = line.group_ranks, line.group_coordinates, line.group_coordinates
        else:
            ranks, having, wanting = [], (), ()
        if self.rank() not in ranks:
            return lambda local: lambda: local
        me = ranks.index(self.rank())
        moved = traffic(before, after, ranks, me, having, wanting)
        return _exchanger(step, self.group_of(ranks), me, moved, having[me], wanting[me])


def _exchanger(
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
        carried = _as_carried(buffer)
        scale = buffer.element_size() // carried.element_size()
        work = group.alltoall_base(
            carried, _as_carried(packed), [n * scale for n in got_sizes], [n * scale for n in sent_sizes]
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


def _is_product(step: AllReduce | ReduceScatter) -> bool:
    return reduction(step) == "product"


_made: Counter[tuple[int, ...]] = Counter()


def _new_group(ranks: tuple[int, ...]) -> Any:
    """A process group made by its members alone, whatever groups each of them has made before.

    torch names such a group after its ranks and the number of groups that this process knows. Where members have made
    different numbers of groups they would wait for each other under different names (pytorch/pytorch#173608). So it
    is named here, after its ranks and how many groups of just these have been made, which is the same on all of them.
    """
    name = "shardwise_" + hashlib.sha1(repr((ranks, _made[ranks])).encode()).hexdigest()
    _made[ranks] += 1
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda *_: name
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = original


_REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # divided afterwards: gloo has no average of every dtype
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this process uses for a mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _special(step: AllReduce | ReduceScatter) -> str | None:
    """The reduction, where what travels is not the value itself: extrema and norms."""
    op = reduction(step)
    return op if op in ("min", "max") or norm_order(op) is not None else None


# Process groups lose a NaN in a minimum or maximum, depending on which rank has it; torch never does. So extrema of
# floats travel as integers in the same order, with NaN at the end that wins.
_ORDERED = {torch.float64: (torch.int64, 63), torch.float32: (torch.int32, 31)}


def _as_reducible(local: torch.Tensor, special: str | None) -> torch.Tensor:
    """`local` as process groups can reduce it: itself, wider, as powers, or as integers that keep its order."""
    order = None if special is None else norm_order(special)
    if order is not None:
        return powers_of(local, order)
    if special is None or not local.is_floating_point():
        wide = _WIDENED.get(local.dtype)
        return local if wide is None else local.to(wide)
    floats = local if local.dtype in _ORDERED else local.float()
    kind, shift = _ORDERED[floats.dtype]
    limits = torch.iinfo(kind)
    bits = floats.contiguous().view(kind)
    ordered = bits ^ ((bits >> shift) & limits.max)
    return ordered.masked_fill_(floats.isnan(), limits.max if special == "max" else limits.min)


def _from_reducible(total: torch.Tensor, dtype: torch.dtype, special: str | None) -> torch.Tensor:
    """The reduced value in the dtype that it came in."""
    order = None if special is None else norm_order(special)
    if order is not None:
        return norm_from_powers(total, order, dtype)
    if special is None or not dtype.is_floating_point:
        return total if total.dtype is dtype else total.to(dtype)
    floats = torch.float64 if dtype is torch.float64 else torch.float32
    kind, shift = _ORDERED[floats]
    return (total ^ ((total >> shift) & torch.iinfo(kind).max)).view(floats).to(dtype)


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as process groups can carry it: itself, or its bytes."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def _after(work: Any, result: torch.Tensor) -> Wait:
    """Waits for `work`, which fills `result`."""

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def _of_this_world(make: Callable[[], Callable[[torch.Tensor], T]]) -> Callable[[torch.Tensor], T]:
    """What `make` makes, and makes anew in another world: ranks and groups are those of a world."""
    world, made = dist.group.WORLD, make()

    def run(local: torch.Tensor) -> T:
        nonlocal world, made
        if dist.group.WORLD is not world:
            world, made = dist.group.WORLD, make()
        return made(local)

    return run


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


c10d = register(C10dFabric())
