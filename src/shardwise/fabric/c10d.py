"""The fabric of real machines: one rank a process, on torch.distributed (gloo, NCCL, MPI, and torch's fake backend).

Calls the process group's own methods with preallocated outputs. Knows nothing of operators or DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.errors import MeshError
from shardwise.fabric.base import BoundStep, Coordinate, Fabric, register
from shardwise.fabric.pieces import Box, choose_sender, distinct_blocks, divide_average, empty_block, local_step, overlap
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Step, reduction

__all__ = ["C10dFabric"]

Wait = Callable[[], torch.Tensor]
Start = Callable[[torch.Tensor], Wait]

# What process groups carry as it is. Anything else travels as bytes (copies) or is widened (reductions).
_CARRIED = {
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip
_WIDENED = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.bfloat16: torch.float32}


class C10dFabric(Fabric):
    """One rank in this process; the others are reached through process groups, made on first use."""

    name = "c10d"
    asynchronous = True

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Any] = {}
        self._world: Any = None

    # ---------------------------------------------------------------- who am I

    def rank(self) -> int:
        if not dist.is_initialized():
            raise MeshError(
                "no process group is up, so this process has no rank",
                hint="start the program with torchrun, or call torch.distributed.init_process_group first",
            )
        return dist.get_rank()

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
        rows = mesh.groups(axes)
        return rows[(rows == position).any(axis=1).argmax()].tolist()

    def group_of(self, ranks: Sequence[int]) -> Any:
        """The process group of these ranks; made on first use, by its members alone."""
        if self._world is not dist.group.WORLD:  # a new world: the old groups are gone with it
            self._groups.clear()
            self._world = dist.group.WORLD
        key = tuple(sorted(ranks))
        found = self._groups.get(key)
        if found is None:
            if key == tuple(range(dist.get_world_size())):
                found = dist.group.WORLD
            else:
                found = dist.new_group(list(key), use_local_synchronization=True)
            self._groups[key] = found
        return found

    def adopt(self, group: Any) -> None:
        """Use an existing process group for its ranks instead of making one."""
        self.group_of([self.rank()])  # drops groups of a former world
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
            raise MeshError(f"src_data_rank={source} is not in {mesh}", hint=f"it has the ranks 0 to {len(members) - 1}")
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
        said: list[Any] = [None] * mesh.size()
        if self.coordinate(mesh) is not None:
            dist.all_gather_object(said, facts, group=self.group(mesh, tuple(range(mesh.ndim))))
        return said

    # ---------------------------------------------------------------- steps

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
            case AllReduce():
                return self._all_reduce(step)
            case ReduceScatter():
                return self._reduce_scatter(step, coordinate)
            case AllToAll():
                return self._exchange(Exchange(step.before, step.after, step.over))
            case _:
                bound = self.bind(step)
                return lambda local: lambda: bound(local)

    def _nothing_to_send(self, step: Step) -> Start:
        """A tensor without elements: every rank knows, so none is called."""
        coordinate = self.coordinate(step.after.mesh)
        if coordinate is None:
            return lambda local: lambda: local
        return lambda local: lambda: empty_block(step.after, coordinate, local)

    def _group_blocks(self, step: AllGather | ReduceScatter, spec: DTensorSpec) -> tuple[Any, list[int], list[Any]]:
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
        plain = all(len(block.runs[dim]) == 1 for block in (*blocks, goal)) and order == list(range(n))
        whole = list(blocks[0].shape)
        whole[dim] = widest

        def assemble(buffer: torch.Tensor) -> torch.Tensor:
            parts = buffer.view(n, *whole)
            if plain and sizes == [widest] * n:
                if dim == 0:
                    return buffer.view(n * widest, *whole[1:])
                return parts.movedim(0, dim).reshape(*whole[:dim], n * widest, *whole[dim + 1 :])
            pieces = [parts[order[i]].narrow(dim, 0, sizes[i]) for i in range(n)]
            if plain:
                return torch.cat(pieces, dim)
            out = buffer.new_empty(goal.shape)
            for block, piece in zip(blocks, pieces, strict=True):
                for box in overlap(block, goal):
                    out[box.target].copy_(piece[box.source])
            return out

        def start(local: torch.Tensor) -> Wait:
            if local.shape[dim] < widest:
                local = _padded(local, dim, widest)
            sent = _as_carried(local.contiguous()).view(-1)
            buffer = sent.new_empty(n * sent.numel())
            work = group._allgather_base(buffer, sent)

            def wait() -> torch.Tensor:
                work.wait()
                return assemble(_as_dtype(buffer, local.dtype))

            return wait

        return start

    def _all_reduce(self, step: AllReduce) -> Start:
        group = self.group(step.before.mesh, step.over)
        op = _REDUCE_OPS[reduction(step)]

        def start(local: torch.Tensor) -> Wait:
            wide = _WIDENED.get(local.dtype)
            buffer = local.clone(memory_format=torch.contiguous_format) if wide is None else local.to(wide).contiguous()
            options = dist.AllreduceOptions()
            options.reduceOp = op
            work = group.allreduce([buffer], options)

            def wait() -> torch.Tensor:
                work.wait()
                total = divide_average(step, buffer)
                return total if wide is None else total.to(local.dtype)

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
        op = _REDUCE_OPS[reduction(step)]

        def pack(local: torch.Tensor) -> torch.Tensor:
            if even and dim == 0:
                return local.contiguous()
            if even:
                return local.unflatten(dim, (n, widest)).movedim(dim, 0).contiguous()
            packed = local.new_zeros((n, *whole))
            for i, parts in enumerate(boxes):
                for box in parts:
                    packed[order[i]][box.target].copy_(local[box.source])
            return packed

        def start(local: torch.Tensor) -> Wait:
            wide = _WIDENED.get(local.dtype)
            packed = pack(local if wide is None else local.to(wide))
            buffer = packed.new_empty(whole)
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            work = group._reduce_scatter_base(buffer.view(-1), packed.view(-1), options)

            def wait() -> torch.Tensor:
                work.wait()
                total = divide_average(step, buffer)
                if mine != widest:
                    total = total.narrow(dim, 0, mine).clone()
                return total if wide is None else total.to(local.dtype)

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

        sends: list[list[Box]] = [[] for _ in ranks]
        keeps: list[Box] = []
        if mine_before is not None:
            block = before.block(mine_before)
            holders = next(who for held, who in self._holders(before, ranks) if held is block or held == block)
            for rank in ranks:
                coordinate = after.mesh.coordinate_of(rank)
                if coordinate is not None and choose_sender(rank, holders) == me:
                    boxes = overlap(block, after.block(coordinate))
                    (keeps if rank == me else sends[in_group[rank]]).extend(boxes)
        receives: list[list[Box]] = [[] for _ in ranks]
        if mine_after is not None:
            target = after.block(mine_after)
            for held, who in self._holders(before, ranks):
                sender = choose_sender(me, who)
                if sender != me:
                    receives[in_group[sender]].extend(overlap(held, target))

        sent_sizes = [sum(box.numel for box in boxes) for boxes in sends]
        got_sizes = [sum(box.numel for box in boxes) for boxes in receives]
        sent_boxes = [box for boxes in sends for box in boxes]
        got_boxes = [box for boxes in receives for box in boxes]
        got_lengths = [box.numel for box in got_boxes]

        def start(local: torch.Tensor) -> Wait:
            flat = [local[box.source].reshape(-1) for box in sent_boxes]
            packed = torch.cat(flat) if flat else local.new_empty(0)
            buffer = packed.new_empty(sum(got_sizes))
            carried = _as_carried(buffer)
            scale = carried.element_size() and buffer.element_size() // carried.element_size()
            work = group.alltoall_base(
                carried, _as_carried(packed), [n * scale for n in got_sizes], [n * scale for n in sent_sizes]
            )

            def wait() -> torch.Tensor:
                work.wait()
                if mine_after is None:
                    return local.new_empty(0)
                out = empty_block(after, mine_after, local)
                for box in keeps:
                    out[box.target].copy_(local[box.source])
                for box, part in zip(got_boxes, buffer.split(got_lengths), strict=True):
                    out[box.target].copy_(part.view(box.shape))
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


_REDUCE_OPS = {
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


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as process groups can carry it: itself, or its bytes."""
    return tensor if tensor.dtype in _CARRIED else tensor.view(-1).view(torch.uint8)


def _as_dtype(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return buffer if buffer.dtype is dtype else buffer.view(dtype)


def _padded(local: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(local.shape)
    shape[dim] = size
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return padded


c10d = register(C10dFabric())
