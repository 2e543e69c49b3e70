"""The fabric of real machines: one rank a process, on torch.distributed (gloo, NCCL, MPI, and torch's fake backend).

Calls the process group's own methods with preallocated outputs. Knows nothing of operators or DTensors.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core.layout import Block, dense_strides
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.errors import MeshError
from shardwise.fabric.base import BoundStep, Coordinate, Fabric, register
from shardwise.fabric.pieces import (
    Box,
    average_divider,
    choose_sender,
    distinct_blocks,
    empty_block,
    fill_from,
    local_step,
    overlap,
    reduce_tensors,
    slicer,
)
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


class C10dFabric(Fabric):
    """One rank in this process; the others are reached through process groups, made on first use."""

    name = "c10d"
    asynchronous = True

    def __init__(self) -> None:
        self._world: Any = None
        self._rank = 0
        self._groups: dict[tuple[int, ...], Any] = {}
        self._members_of: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}

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
        self._members_of.clear()
        return self._rank

    def coordinate(self, mesh: DeviceMesh) -> Coordinate | None:
        """This rank's coordinate, None outside the mesh."""
        return mesh.coordinate_of(self.rank())

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        return self.group_of([mesh.grid_ranks[i] for i in self._members(mesh, axes)])

    def _members(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> list[int]:
        """The grid positions of my group along `axes`, in the order of their coordinates."""
        position = mesh.position_of(self.rank())
        if position is None:
            raise MeshError(f"rank {self.rank()} is not in {mesh}")
        found = self._members_of.get((mesh, axes))
        if found is None:
            rows = mesh.groups(axes)
            found = self._members_of[mesh, axes] = rows[(rows == position).any(axis=1).argmax()].tolist()
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
        members = self._members(mesh, tuple(range(mesh.ndim)))
        if not 0 <= source < len(members):
            raise MeshError(
                f"src_data_rank={source} is not in {mesh}", hint=f"it has the ranks 0 to {len(members) - 1}"
            )
        group = self.group(mesh, tuple(range(mesh.ndim)))
        ranks = [mesh.grid_ranks[i] for i in members]
        own = blocks(coordinate).contiguous()
        sender = ranks[source]
        if len(ranks) == 1:
            return own
        if self.rank() == sender:
            others = [
                (rank, blocks(tuple(mesh.coordinates[position].tolist())).contiguous())
                for rank, position in zip(ranks, members, strict=True)
                if rank != sender
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

    def _group_blocks(
        self, step: AllGather | AllToAll | ReduceScatter, spec: DTensorSpec
    ) -> tuple[Any, list[int], list[Block]]:
        """The group of a step, the order of its ranks by coordinate, and the block of `spec` that each has."""
        members = self._members(step.before.mesh, step.over)
        ranks = [step.before.mesh.grid_ranks[i] for i in members]
        in_group = sorted(ranks)
        order = [in_group.index(rank) for rank in ranks]  # group rank of the i-th by coordinate
        blocks = [spec.block(spec.mesh.coordinates[i].tolist()) for i in members]
        return self.group_of(ranks), order, blocks

    def _all_gather(self, step: AllGather, coordinate: Coordinate) -> Start:
        group, order, blocks = self._group_blocks(step, step.before)
        dim, n = step.dim, len(blocks)
        sizes = [block.shape[dim] for block in blocks]
        widest = max(sizes)
        goal = step.after.block(coordinate)
        in_order = order == list(range(n)) and _follow_each_other(blocks, goal, dim)
        even = in_order and sizes == [widest] * n
        whole = list(blocks[0].shape)
        whole[dim] = widest

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
        options.reduceOp = _REDUCE_OPS[reduction(step)]
        finish = average_divider(step)
        extremum = _extremum(step)

        def start(local: torch.Tensor) -> Wait:
            buffer = _as_reducible(local, extremum)
            if buffer is local or not buffer.is_contiguous():
                buffer = buffer.clone(memory_format=torch.contiguous_format)
            work = group.allreduce([buffer], options)

            def wait() -> torch.Tensor:
                work.wait()
                return _from_reducible(buffer if finish is None else finish(buffer), local.dtype, extremum)

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
        group, order, blocks = self._group_blocks(step, step.after)
        source = step.before.block(coordinate)
        dim, n = step.dim, len(blocks)
        sizes = [block.shape[dim] for block in blocks]
        widest = max(sizes)
        whole = list(source.shape)
        whole[dim] = widest
        even = sizes == [widest] * n and order == list(range(n)) and len(source.runs[dim]) == 1
        boxes = [overlap(source, block) for block in blocks]
        mine = step.after.local_shape(coordinate)[dim]
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[reduction(step)]
        finish = average_divider(step)
        extremum = _extremum(step)

        def pack(local: torch.Tensor) -> torch.Tensor:
            if even:
                return _split_in_front(local, dim, n)
            packed = local.new_zeros((n, *whole))
            for i, parts in enumerate(boxes):
                fill_from(packed[order[i]], local, parts)
            return packed

        def start(local: torch.Tensor) -> Wait:
            packed = pack(_as_reducible(local, extremum))
            buffer = packed.new_empty(whole)
            work = group._reduce_scatter_base(buffer.view(-1), packed.view(-1), options)

            def wait() -> torch.Tensor:
                work.wait()
                total = buffer if finish is None else finish(buffer)
                if mine != widest:
                    total = total.narrow(dim, 0, mine).clone()
                return _from_reducible(total, local.dtype, extremum)

            return wait

        return start

    def _all_to_all(self, step: AllToAll, coordinate: Coordinate) -> Start | None:
        """Where all parts are of one size, in order and row-major; None where the general exchange must do it."""
        group, order, blocks = self._group_blocks(step, step.before)
        n, source_dim, target_dim = len(blocks), step.source_dim, step.target_dim
        shape = list(blocks[0].shape)
        alike = all(list(block.shape) == shape and len(block.runs[target_dim]) == 1 for block in blocks)
        alike = alike and _follow_each_other(blocks, step.after.block(coordinate), source_dim)
        row_major = step.after.tensor_meta.stride == dense_strides(step.after.shape)
        if not alike or not row_major or order != list(range(n)) or shape[target_dim] % n:
            return None
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
        me = self.rank()
        ranks = self._exchange_ranks(step)
        if me not in ranks:
            return lambda local: lambda: local
        group = self.group_of(ranks)
        in_group = {rank: i for i, rank in enumerate(sorted(ranks))}
        mine_before, mine_after = before.mesh.coordinate_of(me), after.mesh.coordinate_of(me)
        all_holders = self._holders(before, ranks)

        sends: list[list[Box]] = [[] for _ in ranks]
        keeps: list[Box] = []
        if mine_before is not None:
            block = before.block(mine_before)
            holders = next(who for held, who in all_holders if held is block or held == block)
            for rank in ranks:
                if choose_sender(rank, holders) == me:
                    coordinate = after.mesh.coordinate_of(rank)
                    boxes = () if coordinate is None else overlap(block, after.block(coordinate))
                    (keeps if rank == me else sends[in_group[rank]]).extend(boxes)
        receives: list[list[Box]] = [[] for _ in ranks]
        if mine_after is not None:
            target = after.block(mine_after)
            for held, who in all_holders:
                sender = choose_sender(me, who)
                if sender != me:
                    receives[in_group[sender]].extend(overlap(held, target))

        sent_sizes = [sum(box.numel for box in boxes) for boxes in sends]
        got_sizes = [sum(box.numel for box in boxes) for boxes in receives]
        if any(got_sizes) and not any(sent_sizes):
            # torch's fake backend takes no empty input, so one element goes from this rank to itself
            sent_sizes[in_group[me]] = got_sizes[in_group[me]] = 1
        sent, sent_boxes = sum(sent_sizes), _placed(sends, sent_sizes)
        got, got_boxes = sum(got_sizes), _placed(receives, got_sizes)

        def start(local: torch.Tensor) -> Wait:
            if mine_before is None:  # a rank outside held nothing, of no dtype in particular
                local = local.new_empty(0, dtype=before.tensor_meta.dtype)
            packed, buffer = local.new_empty(sent), local.new_empty(got)
            for box, at, length in sent_boxes:
                packed.narrow(0, at, length).view(box.shape).copy_(local[box.source])
            carried = _as_carried(buffer)
            scale = buffer.element_size() // carried.element_size()
            work = group.alltoall_base(
                carried, _as_carried(packed), [n * scale for n in got_sizes], [n * scale for n in sent_sizes]
            )

            def wait() -> torch.Tensor:
                work.wait()
                if mine_after is None:
                    return local.new_empty(0)
                out = empty_block(after, mine_after, local)
                fill_from(out, local, keeps)
                for box, at, length in got_boxes:
                    out[box.target].copy_(buffer.narrow(0, at, length).view(box.shape))
                return out

            return wait

        return start

    def _exchange_ranks(self, step: Exchange) -> list[int]:
        mesh = step.before.mesh
        if mesh is not step.after.mesh:
            return sorted({*mesh.grid_ranks, *step.after.mesh.grid_ranks})
        if mesh.position_of(self.rank()) is None:
            return []
        return [mesh.grid_ranks[i] for i in self._members(mesh, step.over)]

    def _holders(self, spec: DTensorSpec, ranks: Sequence[int]) -> list[tuple[Any, list[int]]]:
        mesh = spec.mesh
        positions = [p for p in map(mesh.position_of, ranks) if p is not None]
        return distinct_blocks(spec, positions, lambda position: mesh.grid_ranks[position])


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


def _extremum(step: AllReduce | ReduceScatter) -> str | None:
    op = reduction(step)
    return op if op in ("min", "max") else None


# Process groups lose a NaN in a minimum or maximum, depending on which rank has it; torch never does. So extrema of
# floats travel as integers in the same order, with NaN at the end that wins.
_ORDERED = {torch.float64: (torch.int64, 63), torch.float32: (torch.int32, 31)}


def _as_reducible(local: torch.Tensor, extremum: str | None) -> torch.Tensor:
    """`local` as process groups can reduce it: itself, wider, or as integers that keep its order."""
    if extremum is None or not local.is_floating_point():
        wide = _WIDENED.get(local.dtype)
        return local if wide is None else local.to(wide)
    floats = local if local.dtype in _ORDERED else local.float()
    kind, shift = _ORDERED[floats.dtype]
    limits = torch.iinfo(kind)
    bits = floats.contiguous().view(kind)
    ordered = bits ^ ((bits >> shift) & limits.max)
    return ordered.masked_fill_(floats.isnan(), limits.max if extremum == "max" else limits.min)


def _from_reducible(total: torch.Tensor, dtype: torch.dtype, extremum: str | None) -> torch.Tensor:
    """The reduced value in the dtype that it came in."""
    if extremum is None or not dtype.is_floating_point:
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


def _placed(boxes: Sequence[Sequence[Box]], sizes: Sequence[int]) -> list[tuple[Box, int, int]]:
    """Each box with its place and length in a flat buffer in which the ranks have parts of `sizes`."""
    placed = []
    begin = 0
    for of_rank, size in zip(boxes, sizes, strict=True):
        at = begin
        for box in of_rank:
            placed.append((box, at, box.numel))
            at += box.numel
        begin += size
    return placed


def _padded(local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = size
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return padded


c10d = register(C10dFabric())
