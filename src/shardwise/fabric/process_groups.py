"""Process groups of torch.distributed: the rank of this process, groups of ranks, and checks of what ranks issue.

The base of the fabric of real machines (`c10d`), which executes steps on these groups.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import hashlib
import itertools
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.core import mesh as mesh_module
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.symbolic import unrecorded
from shardwise.errors import AgreementError, MeshError
from shardwise.fabric.base import Fabric, fabrics, on_later_world, on_new_world, raise_found, report_found, was_raised
from shardwise.fabric.bounded_store import MARGIN, BoundedStore, address_of, run_bounded
from shardwise.fabric.digests import PlainCheck
from shardwise.fabric.lost_ranks import SHOWN, named_failures
from shardwise.fabric.packing import Line
from shardwise.fabric.rank_agreement import RankCheck, exit_with
from shardwise.fabric.rank_threads import rank_threads
from shardwise.fabric.stage_link import StageLink

__all__ = ["ProcessGroups", "take_meshes_as_groups"]

T = TypeVar("T")
_numbers = itertools.count()
LAST_PAUSE = 0.1  # seconds


class ProcessGroups(Fabric):
    """The rank of this process in its world, process groups made on first use, and checks that ranks do the same."""

    name = "c10d"

    def __init__(self) -> None:
        self._world: Any = None
        self._rank = 0
        self._parents: Any = None  # the world of the process that this one was forked from
        self._groups: dict[tuple[int, ...], Any] = {}
        self._used: weakref.WeakSet[Any] = weakref.WeakSet()  # the groups of this world and of former ones
        self._kept: list[Any] = []  # those of the parent of a forked process
        self._lines: dict[tuple[DeviceMesh, tuple[int, ...]], Line] = {}
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
        """Switch to the state of another rank thread (None: a new one). Returns the previous state.

        Each rank thread has its own name, so that its meshes and their caches are separate from those of other ranks.
        """
        former = vars(self)
        if state is None:
            state = vars(type(self)())
            name = state["name"] = f"{type(self).name}/{next(_numbers)}"
            fabrics[name] = mesh_module.hosts[name] = self
        object.__setattr__(self, "__dict__", state)
        return former

    # ---------------------------------------------------------------- the world and its groups

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
                "this process was forked from a rank (by a DataLoader with workers?) and is not a rank itself: the "
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
            for forget in on_later_world:
                forget()
        self._restart_check()
        return self._rank

    def held_by(self) -> int | None:
        return self.rank() if dist.is_initialized() and dist.group.WORLD is not self._parents else None

    def later_world(self) -> int:
        """How many worlds this process has left for the present one; 0 in the first."""
        if self._world is not distributed_c10d._world.default_pg:
            return self._worlds  # the present one was not noticed yet
        return self._worlds - 1 if self._worlds else 0

    def after_fork(self) -> None:
        """Forget the state of the parent of this process, which is not a rank until it joins a process group.

        Its groups are never freed: freeing a group waits for its threads, which a forked process does not have.
        """
        self._kept += self._used
        if dist.is_initialized():
            self._parents, self._world, self._check, self._plain = dist.group.WORLD, None, None, None
            self._forget()

    def _forget(self) -> None:
        # names of groups count from the start: other ranks of the new world may be new processes
        for forget in (self._groups.clear, self._made.clear, self._lines.clear, self._coordinates.clear, *on_new_world):
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

    def coordinates(self, mesh: DeviceMesh) -> list[Coordinate]:
        coordinate = self.coordinate(mesh)
        return [] if coordinate is None else [coordinate]

    def is_outside(self, mesh: DeviceMesh) -> bool:
        return self.coordinate(mesh) is None

    def make_groups(self, mesh: DeviceMesh) -> None:
        """Make the group of each axis now, on all ranks at once, so that a rank that ends later cannot leave a group
        half made.

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
                found = self._run_checked(key, f"a group is made for {use}", lambda: self.new_group(key))
            self._groups[key] = found
            self._used.add(found)
        return found

    def named_group(self, group: Any) -> tuple[str, Sequence[int]]:
        """A process group, or its name in torch, in the user's terms: the mesh axes, and the ranks."""
        if isinstance(group, str):
            group = distributed_c10d._resolve_process_group(cast("Any", group))
        ranks = sorted(dist.get_process_group_ranks(group))
        for (mesh, axes), line in self._lines.items():
            if line.group_ranks == ranks:
                return f"over {' x '.join(mesh.axis_name(axis) for axis in axes)}", ranks
        return f"in the group of ranks {', '.join(map(str, ranks[:SHOWN]))}", ranks

    def adopt(self, group: Any) -> None:
        """Use an existing process group for its ranks instead of making one."""
        self.rank()  # forgets the groups of a former world
        self._groups.setdefault(tuple(sorted(dist.get_process_group_ranks(group))), group)

    def new_group(self, ranks: tuple[int, ...], backend: str | None = None) -> Any:
        """A process group made by its members alone, independent of the groups that each of them made before.

        torch names such a group after its ranks and the number of groups in this process. If members have made
        different numbers of groups they would wait for each other under different names (pytorch/pytorch#173608). So it
        is named here, after its ranks and the number of groups made of exactly these ranks, which is the same on all of
        them.
        """
        name = "shardwise_" + hashlib.sha1(repr((ranks, self._made[ranks])).encode()).hexdigest()
        self._made[ranks] += 1
        original = distributed_c10d._hash_ranks_to_str
        distributed_c10d._hash_ranks_to_str = lambda *_: name

        def make() -> Any:
            with unrecorded():
                return dist.new_group(list(ranks), _timeout(), backend=backend, use_local_synchronization=True)

        try:
            if rank_threads() is not None:
                return make()
            where = address_of(distributed_c10d._get_default_store())
            return run_bounded(
                make, _patience() + MARGIN, f"one of the ranks, or the store of the process group{where},"
            )
        finally:
            distributed_c10d._hash_ranks_to_str = original

    def own_group(self, ranks: tuple[int, ...], use: str) -> Any:
        """A separate group, not used by meshes."""
        return named_failures(lambda: self.new_group(ranks), lambda: (f"making a group for {use}", ranks))()

    # ---------------------------------------------------------------- checks that ranks issue the same collectives

    def check_ranks_while(self, intervals: Sequence[float]) -> bool:
        """Compare ranks while intervals are set or if the environment requests it. Returns whether that changed."""
        wanted = bool(intervals) or self._always_checks
        if wanted == self._checks:
            return False
        self._checks, self._interval = wanted, intervals[0] if intervals else self._interval
        self._restart_check()
        return True

    def _restart_check(self) -> None:
        """Start or stop comparing the collectives that ranks issue. Bound routes are unchanged."""
        if self._check is not None:
            self._check.close()
            self._check = None
        # rank threads are compared by their groups
        if self._checks and dist.is_initialized() and dist.get_backend() != "fake" and rank_threads() is None:
            self._checked += 1
            store = _own_store(f"shardwise_check_{self._checked}", "comparing the collectives of ranks")
            _settle_before_destroying(self)
            self._check = RankCheck(store, dist.get_rank(), dist.get_world_size(), self._interval, self._leave_groups)

    # ---------------------------------------------------------------- plain tensors

    def plain_check(self, mesh: DeviceMesh) -> Callable[[str, Sequence[tuple[str, torch.Tensor]]], None] | None:
        if self.coordinate(mesh) is None or mesh.size() == 1 or dist.get_backend() == "fake":
            return None
        ranks = tuple(self._line(mesh, tuple(range(mesh.ndim))).group_ranks)

        def check(op: str, operands: Sequence[tuple[str, torch.Tensor]]) -> None:
            if self._plain is None:
                store = _own_store(f"shardwise_plain_{self._worlds}", "comparing plain tensors of ranks")
                threads = rank_threads()
                self._plain = PlainCheck(
                    store, self._rank, _PlainReport(), threads and threads.let_others_run, patience=_patience()
                )
            self._plain.use(ranks, op, operands)

        return check

    def settle_checks(self, ranks: Sequence[int] | None = None) -> None:
        """Finish the asynchronous comparisons. Raises the errors that they have found.

        Args:
            ranks: those that call it; all of the job by default.
        """
        among = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        self._comparisons[among] += 1  # also on a rank that compares nothing yet: counts must be equal on all ranks
        if self._plain is not None:
            self._plain.compare_posted(among, self._comparisons[among])
            raise_found()

    def end(self) -> None:
        """Called when the process ends: compare once more. An error that was not raised is printed and changes the exit
        status.

        A rank thread raises it.
        """
        try:
            self._end_plain()
        finally:
            if self._world is not None and rank_threads() is None:
                # gloo's threads need the interpreter's lock to release the tensors of their last collective. A thread
                # that gets it while the interpreter shuts down aborts the process, so give them time before.
                time.sleep(LAST_PAUSE)

    def _end_plain(self) -> None:
        if self._plain is None:
            return
        failing = getattr(sys, "last_value", None) is not None  # an exception ends the program
        # others must learn of a disagreement before this rank ends, possibly with the store
        self._plain.close(wait=bool(self._plain.verdict) or not failing)
        if self._plain.verdict and rank_threads() is None:
            exit_with(1)
        elif self._plain.verdict and not was_raised():
            raise_found()

    def _leave_groups(self, *others: Any) -> None:
        """Let the process end although collectives are in flight: destroying a group would wait for them."""
        for group in (dist.group.WORLD, *self._groups.values(), *others):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # so they are never destroyed

    def _run_checked(self, ranks: Sequence[int], text: str, function: Callable[[], T]) -> T:
        """Communication outside of steps."""
        if self._check is None:
            return named_failures(function, lambda: (text, ranks))()
        return self._check.run(function, tuple(sorted(ranks)), text)

    def checked(self, group: Any, text: str, function: Callable[[], T], compare: bool = True) -> T:
        """Communication of the ranks of a process group. If ranks are checked, they are compared first.

        Args:
            group: their process group. A group that meshes do not use has a separate sequence: another thread may use
            it, and nothing is compared before.
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
        """Compare the collectives of the ranks for the last time, if they are checked. Raises on all ranks."""
        if self._check is not None:
            self._check.compare_all(text)

    def end_check(self) -> None:
        """Stop checking in this world; compare for the last time, unless the program is failing."""
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
        group = self.own_group(ranks, "a pipeline") if len(ranks) > 1 and self.rank() in ranks else None
        name = f"shardwise_pipeline_{self._worlds}_{'_'.join(map(str, ranks))}_{number}"
        store = _own_store(name, "messages between the stages of a pipeline", ranks)
        stages = {rank: [n for n, mesh in enumerate(meshes) if rank in mesh.grid_ranks] for rank in ranks}
        return StageLink(group, store, functools.partial(self._leave_groups, group), stages)

    def note(self, mesh: DeviceMesh, text: Callable[[], str]) -> None:
        if self._check is not None and self.coordinate(mesh) is not None:
            self._check.enter(tuple(sorted(self._line(mesh, tuple(range(mesh.ndim))).ranks)), text())


def _own_store(prefix: str, use: str, ranks: Sequence[int] | None = None) -> Any:
    """The store of the world, on a separate connection: the program's connection may be waiting.

    Args:
        prefix: of its keys.
        use: what ranks use it for, for errors.
        ranks: those that use it; all of the job by default.
    """
    shared: Any = distributed_c10d._get_default_store()
    if rank_threads() is not None:  # another thread has no rank, and their store always answers
        return dist.PrefixStore(prefix, shared.clone())
    among, limit = range(dist.get_world_size()) if ranks is None else ranks, _patience()
    connect = functools.partial(run_bounded, shared.clone, limit, f"the store of the process group{address_of(shared)}")
    return BoundedStore(dist.PrefixStore(prefix, named_failures(connect, lambda: (use, among))()), limit, use, among)


def _timeout() -> datetime.timedelta | None:
    """The timeout of the world, which new groups do not inherit; None if unknown."""
    world: Any = dist.group.WORLD
    backends = {str(device): world._get_backend(device) for device in world._device_types}
    options = getattr(backends.get("cpu", next(iter(backends.values()), None)), "options", None)
    return getattr(options, "_timeout", None)


def _patience() -> float:
    """The timeout of the world in seconds, for calls without a timeout."""
    timeout = _timeout()
    return (distributed_c10d.default_pg_timeout if timeout is None else timeout).total_seconds()


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


def _settle_before_destroying(fabric: ProcessGroups) -> None:
    """While ranks are checked, compare them before process groups, and with them the store, are destroyed."""
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
