"""The fabric of real processes: one rank each, on torch.distributed (gloo, NCCL, MPI, and torch's fake backend).

Calls the process group's own methods with preallocated outputs.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.symbolic import unrecorded
from shardwise.core.tracing import is_tracing
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import (
    BoundRows,
    BoundStep,
    RunTransfer,
    StartExchange,
    check_source,
    rank_state,
    register,
)
from shardwise.fabric.block_copies import empty_block, local_step
from shardwise.fabric.collectives import (
    Rotation,
    Start,
    all_gather,
    all_reduce,
    all_to_all,
    exchange,
    exchange_items,
    exchange_rows,
    reduce_by_gathering,
    reduce_scatter,
    rotate,
)
from shardwise.fabric.encoding import as_carried
from shardwise.fabric.exchange_plan import traffic
from shardwise.fabric.line_packing import line_parcels
from shardwise.fabric.lost_ranks import lost_rank_error
from shardwise.fabric.packing import Line, Parcels, parcels
from shardwise.fabric.piece_pipeline import run_in_pieces
from shardwise.fabric.process_groups import ProcessGroups
from shardwise.fabric.rank_agreement import CheckedGroup
from shardwise.fabric.rank_threads import rank_threads
from shardwise.fabric.row_packing import row_parcels
from shardwise.fabric.state_messages import rank_transfer
from shardwise.fabric.traced_collectives import (
    is_recorded,
    recorded_exchange,
    recorded_rotation,
    recorded_rows,
    recorded_step,
    recorded_unreduce,
)
from shardwise.fabric.transfer_lane import TransferLane
from shardwise.plan.route import Route
from shardwise.plan.route_pieces import Pieces, piece_of
from shardwise.plan.state_transfer import StateTransfer
from shardwise.plan.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    OwnerExchange,
    ReduceScatter,
    Rotate,
    RowExchange,
    Step,
    Unreduce,
    reduction,
)
from shardwise.rules.owner_programs import Items
from shardwise.torch_private import dispatch_mode_count

__all__ = ["C10dFabric", "c10d"]

T = TypeVar("T")
_Tensor = torch.Tensor


class C10dFabric(ProcessGroups):
    """One rank in this process; the others are reached through process groups."""

    asynchronous = True
    one_rank = True

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[tuple[DeviceMesh, tuple[int, ...]], Any] = {}  # the groups of exchanges by owner
        self._lanes: dict[tuple[int, ...], TransferLane] = {}

    def _forget(self) -> None:
        self._owners.clear()
        self._lanes.clear()
        super()._forget()

    # ---------------------------------------------------------------- values of this rank

    def build(self, mesh: DeviceMesh, make: Callable[[Coordinate], torch.Tensor]) -> torch.Tensor:
        coordinate = self.coordinate(mesh)
        if coordinate is not None:
            return make(coordinate)
        first = make((0,) * mesh.ndim)  # for its dtype and device
        return first.new_empty(0) if first.dim() else first.new_zeros(())

    def map(self, mesh: DeviceMesh, fn: Callable[..., torch.Tensor], *locals_: torch.Tensor) -> torch.Tensor:
        coordinate = self.coordinate(mesh)
        return locals_[0] if coordinate is None else fn(coordinate, *locals_)

    def parts(self, mesh: DeviceMesh, local: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
        return [(coordinate, local) for coordinate in self.coordinates(mesh)]

    def scatter(
        self, mesh: DeviceMesh, blocks: Callable[[Coordinate], torch.Tensor], source: int | None
    ) -> torch.Tensor:
        coordinate = self.coordinate(mesh)
        if coordinate is None or source is None:
            return self.build(mesh, blocks)
        if is_tracing():
            raise UnsupportedError(
                f"a compiled program cannot send the values of rank {source} to the others",
                hint="pass src_data_rank=None if every rank has the full tensor, or distribute it beforehand",
            )
        line = self._line(mesh, tuple(range(mesh.ndim)))
        ranks, coordinates = line.ranks, map(tuple, line.coordinates.tolist())
        group = self.group_of(ranks)
        check_source(mesh, source)
        own = blocks(coordinate).contiguous()
        sender = ranks[source]
        if len(ranks) == 1:
            return own
        text = f"scatter from rank {sender} over {mesh}"
        if self.rank() == sender:
            others = [
                (rank, blocks(at).contiguous()) for rank, at in zip(ranks, coordinates, strict=True) if rank != sender
            ]
            sends = [dist.P2POp(dist.isend, as_carried(block), rank, group) for rank, block in others if block.numel()]
            self._run_checked(ranks, text, lambda: _finish(sends))
            return own
        received = torch.empty_like(own)
        receives = [dist.P2POp(dist.irecv, as_carried(received), sender, group)] if received.numel() else []
        self._run_checked(ranks, text, lambda: _finish(receives))
        return received

    def agree(self, mesh: DeviceMesh, facts: Any, tensor: torch.Tensor) -> list[Any]:
        if self.coordinate(mesh) is None:
            return []
        group = self.group(mesh, tuple(range(mesh.ndim)))
        if dist.get_backend(group) == "fake":  # no other rank exists
            return [facts] * mesh.size()
        said: list[Any] = [None] * mesh.size()
        ranks = self._line(mesh, tuple(range(mesh.ndim))).ranks

        def gather() -> None:
            dist.all_gather_object(said, facts, group=group)

        self._run_checked(ranks, "ranks compare", lambda: _unrecorded_call(gather, mesh.device_type))
        return said

    # ---------------------------------------------------------------- steps

    def bind_route(self, route: Route) -> BoundStep:
        bind = super().bind_route
        if route.source.tensor_meta.is_symbolic:
            return self._recorded_route(route)
        make = functools.partial(self._in_pieces, route, route.pieces) if route.pieces else lambda: bind(route)
        return _of_this_world(make, lambda: self._recorded_route(route), route)

    def start_route(self, route: Route) -> Start:
        bind = super().start_route
        return _of_this_world(lambda: bind(route), None, route)

    def _in_pieces(self, route: Route, pieces: Pieces) -> BoundStep:
        if self.coordinate(route.source.mesh) is None:
            return lambda local: local
        steps = [
            replace(step, before=piece_of(step.before, pieces), after=piece_of(step.after, pieces))
            for step in route.steps
        ]
        return run_in_pieces([self._start_any(step) for step in steps], pieces)

    def _start_any(self, step: Step) -> Start:
        """A callable that starts a step; a local step is done at once."""
        if step.collective is not None:
            return self.start(step)
        run = self.bind(step)

        def start(local: torch.Tensor) -> Callable[[], torch.Tensor]:
            result = run(local)
            return lambda: result

        return start

    def raise_named(self, error: RuntimeError, step: Step) -> None:
        named = lost_rank_error(error, f"{step.describe()} of {step.before}", self._ranks_of(step))
        if named is not None:
            raise named from error

    def _ranks_of(self, step: Step) -> Sequence[int]:
        mesh = step.before.mesh
        return mesh.grid_ranks if self.coordinate(mesh) is None else self._line(mesh, step.axes).ranks

    def _recorded_route(self, route: Route) -> BoundStep:
        with unrecorded():  # of the computed sizes, only those passed to operators belong to the graph
            steps = [self._bind_recorded(step) for step in route.steps]
        return lambda local: reduce(lambda given, step: step(given), steps, local)

    def _bind_recorded(self, step: Step) -> BoundStep:
        """Like `bind`, but a collective becomes an operator in the graph of the tracer."""
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

    def _carrier(self, ranks: Sequence[int], step: Step) -> Any:
        """Executes a step among these ranks: their group, which logs its collectives if ranks are checked."""
        if self._check is None:
            return self.group_of(ranks)
        text = f"{step.describe()} of {step.before}"
        return CheckedGroup(self._check, self.group_of(ranks, text), tuple(sorted(ranks)), text)

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
        line = self._line(step.before.mesh, step.axes)
        group = self._carrier(line.ranks, step)
        match step:
            case AllGather():
                return all_gather(step, line, group, coordinate)
            case AllReduce() | ReduceScatter() if step.before.tensor_meta.dtype.is_complex and _is_product(step):
                return reduce_by_gathering(step, group, coordinate)
            case AllReduce():
                return all_reduce(step, group)
            case ReduceScatter():
                return reduce_scatter(step, line, group, coordinate)
            case AllToAll():
                general = Exchange(step.before, step.after, step.over)
                return all_to_all(step, line, group, coordinate) or self._exchange(general)
            case _:
                raise AssertionError(f"{step.describe()}: not a collective")

    def bind_transfer(self, transfer: StateTransfer, route: Route) -> tuple[RunTransfer, int]:
        ranks = tuple(transfer.ranks)
        if self.rank() not in ranks:
            return lambda *_: lambda: None, 0
        own = rank_transfer(transfer, self.rank())
        lane = self._lanes.get(ranks)
        if lane is None:  # a separate group and one transfer at a time keep messages between two ranks in order
            lane = self._lanes[ranks] = TransferLane(self.own_group(ranks, "a transfer") if len(ranks) > 1 else None)
        # CUDA has streams for it; rank threads take turns
        can_wait = rank_threads() is None and all(mesh.device_type == "cpu" for mesh in transfer.meshes)

        def start_transfer(
            locals_: Sequence[torch.Tensor],
            results: Sequence[torch.Tensor],
            report: Callable[[int], object],
            in_background: bool,
        ) -> Callable[[], None]:
            def transfer_state() -> None:
                move = functools.partial(lane.move, own, locals_, results, report)
                self.checked(lane.group, route.steps[0].describe(), move) if lane.group is not None else move()

            return lane.start(transfer_state, in_background and can_wait)

        return start_transfer, own.sent + own.received

    def bind_rows(self, step: RowExchange, communicates: bool) -> BoundRows:
        mesh = step.before.mesh
        if self.coordinate(mesh) is None:
            return lambda locals_, fill: [locals_[0] for _ in step.results]
        line = self._line(mesh, step.over)
        own = row_parcels(step, line.group_ranks.index(self.rank()), line.group_coordinates)
        if not communicates:
            return lambda locals_, fill: own.unpack(locals_, locals_[0].new_empty(0), fill)
        run, world = exchange_rows(self._carrier(line.ranks, step), own), dist.group.WORLD

        def rows(locals_: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
            nonlocal run, world
            if (locals_[0].__class__ is not _Tensor or dispatch_mode_count()) and is_recorded(locals_[0]):
                return recorded_rows(own, self.group_of(line.ranks))(locals_, fill)
            if dist.group.WORLD is not world:
                run, world = exchange_rows(self._carrier(line.ranks, step), own), dist.group.WORLD
            try:
                return run(locals_, fill)
            except RuntimeError as error:
                self.raise_named(error, step)
                raise

        return rows

    def start_rotation(self, step: Rotate) -> Start:
        mesh = step.before.mesh
        coordinate = self.coordinate(mesh)
        if coordinate is None:
            return lambda flat: lambda: flat
        line = self._line(mesh, step.over)
        me, count = line.ranks.index(self.rank()), len(line.ranks)
        target, source = (me + step.distance) % count, (me - step.distance) % count
        receiver, sender = (tuple(line.coordinates[at].tolist()) for at in (target, source))
        sent = step.elements(coordinate, receiver) if step.wanted[target] else 0
        got = step.elements(sender, coordinate) if step.wanted[me] else 0
        rotation = Rotation(count, line.order[me], line.order[target], line.order[source], sent, got)
        return _of_this_world(
            lambda: rotate(self._carrier(line.ranks, step), rotation),
            lambda: recorded_rotation(rotation, self.group_of(line.ranks), step.distance),
        )

    def exchange_by_owner(
        self, step: OwnerExchange, start: StartExchange, locals_: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        mesh = step.before.mesh
        coordinate = self.coordinate(mesh)
        assert coordinate is not None, "a rank outside the mesh has nothing to exchange"
        line, group = self._lines.get((mesh, step.over)), self._owners.get((mesh, step.over))
        if line is None or group is None or self._check is not None:
            line = self._line(mesh, step.over)
            group = self._carrier(line.ranks, step)
            if self._check is None:
                self._owners[mesh, step.over] = group
        program = start(coordinate, list(locals_))
        try:
            sent = next(program)
            while True:
                sent = program.send(self._exchanged(step, group, line, sent))
        except StopIteration as end:
            return list(end.value)

    def _exchanged(self, step: OwnerExchange, group: Any, line: Line, sent: Items) -> Items:
        try:
            return exchange_items(step, group, line, sent)
        except RuntimeError as error:
            self.raise_named(error, step)
            raise

    def _nothing_to_send(self, step: Step) -> Start:
        """A tensor without elements. All ranks know this, so there is no communication."""
        coordinate = self.coordinate(step.after.mesh)
        if coordinate is None:
            return lambda local: lambda: local
        return lambda local: lambda: empty_block(step.after, coordinate, local)

    def _exchange(self, step: Exchange) -> Start:
        if step.change is not None:
            have = self.coordinate(step.before.mesh)
            line = None if have is None else self._line(step.before.mesh, step.over)
            if have is None or line is None:
                return lambda local: lambda: local
            if line.in_order:
                return exchange(step, self._carrier(line.ranks, step), have, line_parcels(step, step.change, have))
        found = self._parcels(step)
        if found is None:
            return lambda local: lambda: local
        ranks, have, own = found
        return exchange(step, self._carrier(ranks, step), have, own)

    def _exchange_recorded(self, step: Exchange) -> BoundStep:
        fixed = step.before.tensor_meta.specialized()  # missing boxes are computed in numbers
        found = self._parcels(Exchange(step.before.with_meta(fixed), step.after.with_meta(fixed), step.over))
        if found is None:
            return lambda local: local
        ranks, have, own = found
        return recorded_exchange(own, self.group_of(ranks), have, fixed.dtype)

    def _parcels(self, step: Exchange) -> tuple[list[int], Coordinate | None, Parcels] | None:
        """The ranks of an exchange, and what this rank sends and receives; None if it takes no part."""
        before, after = step.before, step.after
        if before.mesh is not after.mesh:
            ranks = sorted({*before.mesh.grid_ranks, *after.mesh.grid_ranks})
            having, wanting = (spec.mesh.coordinates_of(ranks) for spec in (before, after))
        elif self.coordinate(before.mesh) is not None:
            line = self._line(before.mesh, step.over)
            ranks, having, wanting = line.group_ranks, line.group_coordinates, line.group_coordinates
        else:
            return None
        if self.rank() not in ranks:
            return None
        me = ranks.index(self.rank())
        moved = traffic(before, after, ranks, me, having, wanting)
        have, want = self.coordinate(before.mesh), self.coordinate(after.mesh)
        return ranks, have, parcels(step, len(ranks), me, moved, want)


def _finish(operations: list[dist.P2POp]) -> None:
    """Send and receive."""
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _is_product(step: AllReduce | ReduceScatter) -> bool:
    return reduction(step) == "product"


def _of_this_world(
    make: Callable[[], Callable[[torch.Tensor], T]],
    record: Callable[[], Callable[[torch.Tensor], T]] | None = None,
    route: Route | None = None,
) -> Callable[[torch.Tensor], T]:
    """The result of `make`, computed again in each new world, because ranks and groups belong to a world.

    Traced calls use the result of `record`, if given. Failures are named after the collective of `route`.
    """
    world, made = dist.group.WORLD, make()

    def check_world_first(local: torch.Tensor) -> T:
        nonlocal world, made
        if (local.__class__ is not _Tensor or dispatch_mode_count()) and record is not None and is_recorded(local):
            return record()(local)
        if distributed_c10d._world.default_pg is not world:
            world, made = dist.group.WORLD, make()
        try:
            return made(local)
        except RuntimeError as error:
            for step in () if route is None else route.steps:
                if step.collective is not None:
                    c10d.raise_named(error, step)
            raise

    return check_world_first


c10d = register(C10dFabric())
rank_state.append(c10d.exchange)
os.register_at_fork(after_in_child=c10d.after_fork)
atexit.register(c10d.end)


def _unrecorded_call(function: Callable[[], None], device_type: str) -> None:
    """Call a function that communicates and is no part of the program: while one is recorded, in a separate thread.

    Tracers and captured functions see the operators of their own thread alone. In a tracing thread torch also calls
    collectives with Python's lock held, and gloo's threads wait for that lock while holding one of theirs. Ranks that
    are threads have no such threads.
    """
    if rank_threads() is not None or not (is_tracing() or dispatch_mode_count()):
        function()
        return
    device = None if device_type == "cpu" else torch.get_device_module(device_type)
    current = None if device is None else device.current_device()

    def call() -> None:
        if device is not None:  # each thread has its own
            device.set_device(current)
        function()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()
