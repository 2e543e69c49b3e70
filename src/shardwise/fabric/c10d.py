"""The fabric of real machines: one rank a process, on torch.distributed (gloo, NCCL, MPI, and torch's fake backend).

Calls the process group's own methods with preallocated outputs. Knows nothing of operators or DTensors.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core.mesh import DeviceMesh
from shardwise.core.symbolic import is_tracing, unrecorded
from shardwise.errors import MeshError, UnsupportedError
from shardwise.fabric.base import BoundStep, Coordinate, Fabric, register
from shardwise.fabric.packing import (
    Line,
    Parcels,
    as_carried,
    as_reducible,
    extremum_of,
    from_reducible,
    gathering,
    is_product,
    parcels,
    scattering,
    split_in_front,
    swapping,
)
from shardwise.fabric.pieces import average_divider, empty_block, local_step, reduce_tensors, slicer
from shardwise.fabric.recorded import is_recorded, recorded_exchange, recorded_step, recorded_unreduce
from shardwise.fabric.traffic import traffic
from shardwise.plan.route import Route
from shardwise.plan.step import AllGather, AllReduce, AllToAll, Exchange, ReduceScatter, Step, Unreduce, reduction

__all__ = ["C10dFabric"]

T = TypeVar("T")
Wait = Callable[[], torch.Tensor]
Start = Callable[[torch.Tensor], Wait]
_Tensor = torch.Tensor
_modes_active = torch._C._len_torch_dispatch_stack


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
        if is_tracing():
            raise UnsupportedError(
                f"a compiled program cannot send the values of rank {source} to the others",
                hint="pass src_data_rank=None where every rank has the whole tensor, or distribute it beforehand",
            )
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
            sends = [dist.P2POp(dist.isend, as_carried(block), rank, group) for rank, block in others if block.numel()]
            for work in dist.batch_isend_irecv(sends) if sends else ():
                work.wait()
            return own
        received = torch.empty_like(own)
        if received.numel():
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, as_carried(received), sender, group)]):
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
        if route.source.tensor_meta.is_symbolic:
            return self._recorded_route(route)
        return _of_this_world(lambda: bind(route), lambda: self._recorded_route(route))

    def start_route(self, route: Route) -> Start:
        bind = super().start_route
        return _of_this_world(lambda: bind(route))

    def _recorded_route(self, route: Route) -> BoundStep:
        with unrecorded():  # of sizes that are computed with, only those that operators get belong to the graph
            steps = [self._bind_recorded(step) for step in route.steps]
        return lambda local: reduce(lambda given, step: step(given), steps, local)

    def _bind_recorded(self, step: Step) -> BoundStep:
        """Like `bind`, but a collective becomes an operator in the graph of whoever traces."""
        mesh, shape = step.before.mesh, step.before.shape
        coordinate = self.coordinate(mesh)
        if isinstance(step, Unreduce) and coordinate is not None:
            return recorded_unreduce(step, coordinate)
        if step.collective is None or (not step.before.tensor_meta.is_symbolic and 0 in shape):
            return self.bind(step)
        if isinstance(step, Exchange):
            return self._exchange_recorded(step)
        if coordinate is None:
            return lambda local: local
        line = self._line(mesh, step.axes)
        made = recorded_step(step, line, self.group_of(line.ranks), coordinate)
        return made or self._exchange_recorded(Exchange(step.before, step.after, step.axes))

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
            case AllReduce() | ReduceScatter() if step.before.tensor_meta.dtype.is_complex and is_product(step):
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
        group, n = self.group_of(line.ranks), len(line.ranks)
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

    def _all_reduce(self, step: AllReduce) -> Start:
        group = self.group(step.before.mesh, step.over)
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE_OPS[reduction(step)]
        finish = average_divider(step)
        extremum = extremum_of(step)

        def start(local: torch.Tensor) -> Wait:
            buffer = as_reducible(local, extremum)
            if buffer is local or not buffer.is_contiguous():
                buffer = buffer.clone(memory_format=torch.contiguous_format)
            work = group.allreduce([buffer], options)

            def wait() -> torch.Tensor:
                work.wait()
                return from_reducible(buffer if finish is None else finish(buffer), local.dtype, extremum)

            return wait

        return start

    def _reduce_by_gathering(self, step: AllReduce | ReduceScatter, coordinate: Coordinate) -> Start:
        """A reduction that process groups lack: each rank gets all parts and reduces them itself."""
        group = self.group(step.before.mesh, step.over)
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

    def _reduce_scatter(self, step: ReduceScatter, coordinate: Coordinate) -> Start:
        line = self._line(step.before.mesh, step.over)
        group = self.group_of(line.ranks)
        part, pack, own = scattering(step, line, coordinate)
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE_OPS[reduction(step)]
        finish = average_divider(step)
        extremum = extremum_of(step)

        def start(local: torch.Tensor) -> Wait:
            packed = pack(as_reducible(local, extremum))
            buffer = packed.new_empty(part)
            work = group._reduce_scatter_base(buffer.view(-1), packed.view(-1), options)

            def wait() -> torch.Tensor:
                work.wait()
                return from_reducible(own(buffer if finish is None else finish(buffer)), local.dtype, extremum)

            return wait

        return start

    def _all_to_all(self, step: AllToAll, coordinate: Coordinate) -> Start | None:
        """Where all parts are of one size, in order and row-major; None where the general exchange must do it."""
        line = self._line(step.before.mesh, step.over)
        goal = swapping(step, line, coordinate)
        if goal is None:
            return None
        group, n, source_dim, target_dim = self.group_of(line.ranks), len(line.ranks), step.source_dim, step.target_dim

        def start(local: torch.Tensor) -> Wait:
            packed = split_in_front(local, target_dim, n)
            buffer = torch.empty_like(packed)
            work = group.alltoall_base(as_carried(buffer).view(-1), as_carried(packed).view(-1), [], [])

            def wait() -> torch.Tensor:
                work.wait()
                return buffer.movedim(0, source_dim).reshape(goal)

            return wait

        return start

    def _exchange(self, step: Exchange) -> Start:
        found = self._parcels(step)
        if found is None:
            return lambda local: lambda: local
        group, have, goods = found
        return _exchanger(step, group, have, goods)

    def _exchange_recorded(self, step: Exchange) -> BoundStep:
        fixed = step.before.tensor_meta.specialized()  # who lacks what is worked out in numbers
        found = self._parcels(Exchange(step.before.with_meta(fixed), step.after.with_meta(fixed), step.over))
        if found is None:
            return lambda local: local
        group, have, goods = found
        return recorded_exchange(goods, group, have, fixed.dtype)

    def _parcels(self, step: Exchange) -> tuple[Any, Coordinate | None, Parcels] | None:
        """Between whom an exchange goes on, and what this rank sends and gets; None where it takes no part."""
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
            return None
        me = ranks.index(self.rank())
        goods = parcels(step, me, traffic(before, after, ranks, me, having, wanting), wanting[me])
        return self.group_of(ranks), having[me], goods


def _exchanger(step: Exchange, group: Any, have: Coordinate | None, goods: Parcels) -> Start:
    """One all-to-all with uneven splits: the boxes of each receiver packed one after the other, and unpacked."""
    sent, got, sends = sum(goods.sent_sizes), sum(goods.got_sizes), goods.sends

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
            carried, as_carried(packed), [n * scale for n in goods.got_sizes], [n * scale for n in goods.sent_sizes]
        )

        def wait() -> torch.Tensor:
            work.wait()
            return goods.unpack(local, buffer)

        return wait

    return start


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
        with unrecorded():
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


def _after(work: Any, result: torch.Tensor) -> Wait:
    """Waits for `work`, which fills `result`."""

    def wait() -> torch.Tensor:
        work.wait()
        return result

    return wait


def _of_this_world(
    make: Callable[[], Callable[[torch.Tensor], T]], record: Callable[[], Callable[[torch.Tensor], T]] | None = None
) -> Callable[[torch.Tensor], T]:
    """What `make` makes, and makes anew in another world: ranks and groups are those of a world.

    What is traced goes the way that `record` makes, if it is given.
    """
    world, made = dist.group.WORLD, make()

    def run(local: torch.Tensor) -> T:
        nonlocal world, made
        if (local.__class__ is not _Tensor or _modes_active()) and record is not None and is_recorded(local):
            return record()(local)
        if dist.group.WORLD is not world:
            world, made = dist.group.WORLD, make()
        return made(local)

    return run


c10d = register(C10dFabric())
