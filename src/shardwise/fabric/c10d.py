"""The fabric of real machines: one rank a process, on torch.distributed (gloo, NCCL, MPI, and torch's fake backend).

Calls the process group's own methods with preallocated outputs.
"""

from __future__ import annotations

import atexit
import ctypes
import datetime
import functools
import hashlib
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core import mesh as mesh_module
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.symbolic import is_tracing, unrecorded
from shardwise.errors import AgreementError, MeshError, UnsupportedError
from shardwise.fabric.base import (
    BoundRows,
    BoundStep,
    Fabric,
    RunTransfer,
    StartExchange,
    advance,
    check_source,
    fabrics,
    on_new_world,
    raise_found,
    rank_state,
    register,
    report_found,
    was_raised,
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
from shardwise.fabric.digests import PlainCheck
from shardwise.fabric.encoding import as_carried
from shardwise.fabric.exchange_plan import traffic
from shardwise.fabric.line_packing import line_parcels
from shardwise.fabric.lost_ranks import lost_rank_error, named_failures
from shardwise.fabric.packing import Line, Parcels, parcels
from shardwise.fabric.rank_agreement import CheckedGroup, RankCheck, exit_with
from shardwise.fabric.rank_threads import rank_threads
from shardwise.fabric.row_packing import row_parcels
from shardwise.fabric.stage_link import StageLink
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
from shardwise.torch_private import dispatch_mode_count

__all__ = ["C10dFabric", "c10d", "new_group", "take_meshes_as_groups"]

T = TypeVar("T")
_Tensor = torch.Tensor


class C10dFabric(Fabric):
    """One rank in this process; the others are reached through process groups, made on first use."""

    name = "c10d"
    asynchronous = True
    one_rank = True

    def __init__(self) -> None:
        self._world: Any = None
        self._rank = 0
        self._parents: Any = None  # the world of the process that this one was forked from
        self._groups: dict[tuple[int, ...], Any] = {}
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()  # the groups of this world and of former ones
        self._kept: list[Any] = []  # those of the parent of a forked process
        self._lines: dict[tuple[DeviceMesh, tuple[int, ...]], Line] = {}
        self._owners: dict[tuple[DeviceMesh, tuple[int, ...]], Any] = {}  # the groups of exchanges by owner
        self._lanes: dict[tuple[int, ...], TransferLane] = {}
        self._coordinates: dict[DeviceMesh, Coordinate | None] = {}
        self._interval = float(os.environ.get("SHARDWISE_CHECK_INTERVAL", "1"))
        self._checks = self._always_checks = os.environ.get("SHARDWISE_CHECK", "0") not in ("", "0")
        self._check: RankCheck | None = None
        self._checked = 0  # how often it was begun, on every rank alike
        self._worlds = 0
        self._plain: PlainCheck | None = None
        self._comparisons = Counter[tuple[int, ...]]()
        self._made: Counter[tuple[int, ...]] = Counter()  # how many groups of these ranks

    def exchange(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Take the state of another rank thread, None: of a new one. Returns the former state.

        Each has a name of its own, so that its meshes, and all that is kept for them, are not those of another rank.
        """
        former = vars(self)
        if state is None:
            state = vars(C10dFabric())
            name = state["name"] = f"{C10dFabric.name}/{next(_numbers)}"
            fabrics[name] = mesh_module.hosts[name] = self
        object.__setattr__(self, "__dict__", state)
        return former

    # ---------------------------------------------------------------- who am I

    def rank(self) -> int:
        if self._world is not None and self._world is distributed_c10d._world.default_pg:
            return self._rank
        if not dist.is_initialized():
            raise MeshError(
                "no process group is up, so this process has no rank",
                hint="start the program with torchrun, or call torch.distributed.init_process_group first",
            )
        if dist.group.WORLD is self._parents:
            raise MeshError(
                "this process was forked from a rank (by a DataLoader with workers?) and is none itself: the "
                "connections of its process groups belong to its parent",
                hint="take plain tensors into it: full_tensor() or to_local() before it is forked",
            )
        former, self._world, self._rank = self._world, dist.group.WORLD, dist.get_rank()
        self._worlds += 1
        if self._plain is not None:
            self._plain.close(wait=False)
            self._plain = None
        self._comparisons.clear()
        if former is not None:
            self._forget()
        self._restart_check()
        return self._rank

    def held_by(self) -> int | None:
        return self.rank() if dist.is_initialized() and dist.group.WORLD is not self._parents else None

    def after_fork(self) -> None:
        """Forget the state of the parent of this process, which is not a rank until it joins a process group.

        Its groups are kept: a group waits for its threads when it is freed, and a forked process has none of them.
        """
        self._kept += self._used
        if dist.is_initialized():
            self._parents, self._world, self._check, self._plain = dist.group.WORLD, None, None, None
            self._forget()

    def _forget(self) -> None:
        for forget in (
            self._groups.clear, self._lines.clear, self._owners.clear, self._lanes.clear, self._coordinates.clear,
            *on_new_world,
        ):  # fmt: skip
            forget()

    def coordinate(self, mesh: DeviceMesh) -> Coordinate | None:
        """This rank's coordinate, None outside the mesh."""
        if self._world is None or self._world is not distributed_c10d._world.default_pg:
            self.rank()  # forgets the coordinates of a former world
        try:
            return self._coordinates[mesh]
        except KeyError:
            found = self._coordinates[mesh] = mesh.coordinate_of(self.rank())
            return found

    def make_groups(self, mesh: DeviceMesh) -> None:
        """Make the group of each axis now, on all ranks at once: a rank that ends later leaves none half made.

        Groups over several axes are made on first use.
        """
        if self.coordinate(mesh) is None or rank_threads() is not None or dist.get_backend() == "fake":
            return
        for axis, size in enumerate(mesh.shape):
            if size > 1:
                self.group_of(self._line(mesh, (axis,)).ranks, f"axis {mesh.axis_name(axis)!r} of {mesh}")

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        return self.group_of(self._line(mesh, axes).ranks)

    def names_in_graphs(self, mesh: DeviceMesh) -> tuple[Any, ...]:
        names = []
        if self.coordinate(mesh) is not None:
            wide = [axis for axis, size in enumerate(mesh.shape) if size > 1]
            sets = itertools.chain.from_iterable(itertools.combinations(wide, n + 1) for n in range(len(wide)))
            names = [self.group(mesh, axes).group_name for axes in sets]
        return self.rank(), dist.get_world_size(), *names

    def _line(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Line:
        position = mesh.position_of(self.rank())
        if position is None:
            raise MeshError(f"rank {self.rank()} is not in {mesh}")
        found = self._lines.get((mesh, axes))
        if found is None:
            members = mesh.group_through(axes, position)
            ranks = [mesh.grid_ranks[i] for i in members]
            coordinates = mesh.coordinates[members]
            by_rank = np.argsort(ranks)
            order = np.argsort(by_rank)  # the rank of each in the group, which numbers them in the order of the world
            in_order = bool((order[:-1] < order[1:]).all())
            found = Line(ranks, coordinates, order.tolist(), in_order, sorted(ranks), coordinates[by_rank])
            self._lines[mesh, axes] = found
        return found

    def group_of(self, ranks: Sequence[int], use: str = "a program's own use") -> Any:
        """The process group of these ranks; made on first use, by its members alone."""
        self.rank()  # forgets the groups of a former world
        key = tuple(sorted(ranks))
        found = self._groups.get(key)
        if found is None:
            if key == tuple(range(dist.get_world_size())):
                found = dist.group.WORLD
            else:
                found = self._run_checked(key, f"a group is made for {use}", lambda: new_group(key))
            self._groups[key] = found
            self._used.add(found)
        return found

    def check_ranks_while(self, intervals: Sequence[float]) -> bool:
        """Compare while there are intervals, or if the environment requests it. Returns whether that has changed."""
        wanted = bool(intervals) or self._always_checks
        if wanted == self._checks:
            return False
        self._checks, self._interval = wanted, intervals[0] if intervals else self._interval
        self._restart_check()
        return True

    def _restart_check(self) -> None:
        """Compare the collectives that ranks issue, or no longer. Routes that are bound stay as they are."""
        if self._check is not None:
            self._check.close()
            self._check = None
        # rank threads are compared by their groups
        if self._checks and dist.is_initialized() and dist.get_backend() != "fake" and rank_threads() is None:
            self._checked += 1
            store = _own_store(f"shardwise_check_{self._checked}")
            _settle_before_destroying(self)
            self._check = RankCheck(store, dist.get_rank(), dist.get_world_size(), self._interval, self._leave_groups)

    # ---------------------------------------------------------------- plain tensors

    def plain_check(self, mesh: DeviceMesh) -> Callable[[str, Sequence[tuple[str, torch.Tensor]]], None] | None:
        if self.coordinate(mesh) is None or mesh.size() == 1 or dist.get_backend() == "fake":
            return None
        ranks = tuple(self._line(mesh, tuple(range(mesh.ndim))).group_ranks)

        def check(op: str, operands: Sequence[tuple[str, torch.Tensor]]) -> None:
            if self._plain is None:
                store = _own_store(f"shardwise_plain_{self._worlds}")
                threads = rank_threads()
                self._plain = PlainCheck(store, self._rank, _PlainReport(), threads and threads.let_others_run)
            self._plain.use(ranks, op, operands)

        return check

    def settle_checks(self, ranks: Sequence[int] | None = None) -> None:
        """Finish the asynchronous comparisons. Raises the errors that they have found.

        Args:
            ranks: those that call it; all of the job by default.
        """
        among = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        self._comparisons[among] += 1  # also on a rank that compares nothing yet: all count alike
        if self._plain is not None:
            self._plain.compare_posted(among, self._comparisons[among])
            raise_found()

    def end(self) -> None:
        """The process ends: compare once more. An error that was not raised is printed, and changes the exit status.

        A rank thread raises it.
        """
        if self._plain is None:
            return
        failing = getattr(sys, "last_value", None) is not None  # an exception ends the program
        # others must hear of a disagreement before this rank goes, maybe with the store
        self._plain.close(wait=bool(self._plain.verdict) or not failing)
        if self._plain.verdict and rank_threads() is None:
            exit_with(1)
        elif self._plain.verdict and not was_raised():
            raise_found()

    def _leave_groups(self, *others: Any) -> None:
        """Let the process end although collectives are in flight: groups wait for these when they are taken down."""
        for group in (dist.group.WORLD, *self._groups.values(), *others):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # so they are never taken down

    def _carrier(self, ranks: Sequence[int], step: Step) -> Any:
        """Executes a step among these ranks: their group, which logs its collectives if ranks are checked."""
        if self._check is None:
            return self.group_of(ranks)
        text = f"{step.describe()} of {step.before}"
        return CheckedGroup(self._check, self.group_of(ranks, text), tuple(sorted(ranks)), text)

    def _run_checked(self, ranks: Sequence[int], text: str, function: Callable[[], T]) -> T:
        """Communication outside of steps."""
        if self._check is None:
            return named_failures(function, lambda: (text, ranks))()
        return self._check.run(function, tuple(sorted(ranks)), text)

    def checked(self, group: Any, text: str, function: Callable[[], T], compare: bool = True) -> T:
        """Communication of the ranks of a process group. If ranks are checked, they are compared first.

        Args:
            group: their process group. One that meshes do not use has a sequence of its own: it may be used by
                another thread, and nothing is compared before.
            text: a description, the same on all ranks.
            function: does it.
            compare: whether to compare before; otherwise they are compared at the next look.
        """
        if self._check is None:
            return named_failures(function, lambda: (text, dist.get_process_group_ranks(group)))()
        known = group is dist.group.WORLD or any(group is one for one in self._groups.values())
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if known and compare:
            self._check.meet(ranks, text)
        return self._check.run(function, ranks, text, "" if known else "another group")

    def settle_check(self, text: str) -> None:
        """Compare for the last time the collectives of the ranks, if they are checked. Raises on all of them."""
        if self._check is not None:
            self._check.compare_all(text)

    def end_check(self) -> None:
        """Check no longer in this world; compare for the last time, unless the program is failing."""
        check, self._check = self._check, None
        if check is None:
            return
        error = sys.exc_info()[1]
        if error is not None:
            check.fail(error)
        try:
            check.compare_all("the end of the process groups")
        finally:
            check.close()

    def stage_link(self, meshes: Sequence[DeviceMesh]) -> StageLink | None:
        ranks = tuple(sorted({rank for mesh in meshes for rank in mesh.grid_ranks}))
        number = self._made[ranks]
        group = _own_group(ranks, "a pipeline") if len(ranks) > 1 and self.rank() in ranks else None
        store = _own_store(f"shardwise_pipeline_{self._worlds}_{'_'.join(map(str, ranks))}_{number}")
        stages = {rank: [n for n, mesh in enumerate(meshes) if rank in mesh.grid_ranks] for rank in ranks}
        return StageLink(group, store, functools.partial(self._leave_groups, group), stages)

    def note(self, mesh: DeviceMesh, text: Callable[[], str]) -> None:
        if self._check is not None and self.coordinate(mesh) is not None:
            self._check.enter(tuple(sorted(self._line(mesh, tuple(range(mesh.ndim))).ranks)), text())

    def adopt(self, group: Any) -> None:
        """Use an existing process group for its ranks instead of making one."""
        self.rank()  # forgets the groups of a former world
        self._groups.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)

    # ---------------------------------------------------------------- values of this rank

    def coordinates(self, mesh: DeviceMesh) -> list[Coordinate]:
        coordinate = self.coordinate(mesh)
        return [] if coordinate is None else [coordinate]

    def is_outside(self, mesh: DeviceMesh) -> bool:
        return self.coordinate(mesh) is None

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
        self._run_checked(ranks, "ranks compare", lambda: dist.all_gather_object(said, facts, group=group))
        return said

    # ---------------------------------------------------------------- steps

    def bind_route(self, route: Route) -> BoundStep:
        bind = super().bind_route
        if route.source.tensor_meta.is_symbolic:
            return self._recorded_route(route)
        return _of_this_world(lambda: bind(route), lambda: self._recorded_route(route), route)

    def start_route(self, route: Route) -> Start:
        bind = super().start_route
        return _of_this_world(lambda: bind(route), None, route)

    def raise_named(self, error: RuntimeError, step: Step) -> None:
        named = lost_rank_error(error, f"{step.describe()} of {step.before}", self._ranks_of(step))
        if named is not None:
            raise named from error

    def _ranks_of(self, step: Step) -> Sequence[int]:
        mesh = step.before.mesh
        return mesh.grid_ranks if self.coordinate(mesh) is None else self._line(mesh, step.axes).ranks

    def _recorded_route(self, route: Route) -> BoundStep:
        with unrecorded():  # of sizes that are computed with, only those that operators get belong to the graph
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
        if lane is None:  # one order of messages between two ranks: a group of its own, and one transfer at a time
            lane = self._lanes[ranks] = TransferLane(_own_group(ranks, "a transfer") if len(ranks) > 1 else None)
        # CUDA has streams for it; rank threads take turns
        can_wait = rank_threads() is None and all(mesh.device_type == "cpu" for mesh in transfer.meshes)

        def start_transfer(
            locals_: Sequence[torch.Tensor],
            results: Sequence[torch.Tensor],
            report: Callable[[int], object],
            in_background: bool,
        ) -> Callable[[], None]:
            def run() -> None:
                move = functools.partial(lane.move, own, locals_, results, report)
                self.checked(lane.group, route.steps[0].describe(), move) if lane.group is not None else move()

            return lane.start(run, in_background and can_wait)

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
        sent, results = advance(program, None)
        while sent is not None:
            try:
                got = exchange_items(step, group, line, sent)
            except RuntimeError as error:
                self.raise_named(error, step)
                raise
            sent, results = advance(program, got)
        return results

    def _nothing_to_send(self, step: Step) -> Start:
        """A tensor without elements: all ranks know that, so there is no communication."""
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


def _own_store(prefix: str) -> Any:
    """The store of the world, on a connection of its own: the program's may be waiting."""
    shared: Any = distributed_c10d._get_default_store()
    return dist.PrefixStore(prefix, shared.clone())


class _PlainReport:
    """Where the thread of a check reports a disagreement."""

    def __init__(self) -> None:
        self._error: AgreementError | None = None

    def found(self, text: str) -> None:
        """Let the program raise it."""
        self._error = AgreementError(
            text,
            hint="make it the same on every rank, by one seed or a broadcast; DTensor.from_local(tensor, mesh, "
            "placements) if each rank holds a part of a tensor; plain_tensors('replicate') if they may differ",
        )
        report_found(self._error)

    def was_raised(self) -> bool:
        return was_raised()

    def show(self) -> None:
        """Print it, for a program that waits in a collective and cannot raise."""
        sys.stderr.write(f"{type(self._error).__module__}.{type(self._error).__name__}: {self._error}\n")
        sys.stderr.flush()


def _finish(operations: list[dist.P2POp]) -> None:
    """Send and receive."""
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _is_product(step: AllReduce | ReduceScatter) -> bool:
    return reduction(step) == "product"


def _settle_before_destroying(fabric: C10dFabric) -> None:
    """While ranks are checked, compare them before process groups are destroyed: the store goes with them."""
    original = distributed_c10d.destroy_process_group
    if hasattr(original, "_compares_ranks"):
        return

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            fabric.end_check()
        original(group)

    setattr(destroy_process_group, "_compares_ranks", True)  # noqa: B010  # pyright knows no attributes of functions
    dist.destroy_process_group = distributed_c10d.destroy_process_group = destroy_process_group


def new_group(ranks: tuple[int, ...], backend: str | None = None) -> Any:
    """A process group made by its members alone, whatever groups each of them has made before.

    torch names such a group after its ranks and the number of groups in this process. If members have made
    different numbers of groups they would wait for each other under different names (pytorch/pytorch#173608). So it
    is named here, after its ranks and how many groups of just these have been made, which is the same on all of them.
    """
    name = "shardwise_" + hashlib.sha1(repr((ranks, c10d._made[ranks])).encode()).hexdigest()
    c10d._made[ranks] += 1
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda *_: name
    try:
        with unrecorded():
            return dist.new_group(list(ranks), _timeout(), backend=backend, use_local_synchronization=True)
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _own_group(ranks: tuple[int, ...], use: str) -> Any:
    """A group beside those of meshes."""
    return named_failures(lambda: new_group(ranks), lambda: (f"making a group for {use}", ranks))()


def _timeout() -> datetime.timedelta | None:
    """The timeout of the world, which new groups do not take over; None if it is not known."""
    world: Any = dist.group.WORLD
    backends = {str(device): world._get_backend(device) for device in world._device_types}
    options = getattr(backends.get("cpu", next(iter(backends.values()), None)), "options", None)
    return getattr(options, "_timeout", None)


def _of_this_world(
    make: Callable[[], Callable[[torch.Tensor], T]],
    record: Callable[[], Callable[[torch.Tensor], T]] | None = None,
    route: Route | None = None,
) -> Callable[[torch.Tensor], T]:
    """The result of `make`, made again in another world: ranks and groups belong to a world.

    Traced calls use the result of `record`, if it is given. Failures are named after the collective of `route`.
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


def take_meshes_as_groups(functional_collectives: Any) -> None:
    """Let torch's functional collectives take a DeviceMesh, or a mesh and an axis, in place of a process group.

    Args:
        functional_collectives: the module `torch.distributed._functional_collectives`.
    """
    for name in ("_resolve_group", "_resolve_group_name"):
        if (original := getattr(functional_collectives, name, None)) is not None:
            setattr(functional_collectives, name, _with_meshes(original))


def _with_meshes(resolve: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resolve)
    def resolve_group(group: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(group, DeviceMesh):
            group = group.get_group()
        elif isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
            group = group[0].get_group(group[1])
        return resolve(group, *args, **kwargs)

    return resolve_group


_numbers = itertools.count()
c10d = register(C10dFabric())
rank_state.append(c10d.exchange)
os.register_at_fork(after_in_child=c10d.after_fork)
atexit.register(c10d.end)
