"""The fabric protocol: binds steps to callables on locals and computes per-rank values.

A local is a rank's part of a DTensor: a tensor on c10d and dry, a `RankTensor` of N tensors on virtual. Code outside a
fabric may not depend on "my rank": it uses the `coordinates` of this process, and computes per-rank values with `build`
and `map`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from shardwise.core import mesh as mesh_module
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.errors import MeshError, ShardwiseError, UnsupportedError
from shardwise.fabric.stage_link import StageLink
from shardwise.plan.route import Route
from shardwise.plan.state_transfer import StateTransfer
from shardwise.plan.step import OwnerExchange, Rotate, RowExchange, Step
from shardwise.rules.owner_programs import Exchanging, Items

__all__ = [
    "BoundRows",
    "BoundStep",
    "Fabric",
    "LocalOperator",
    "OperatorRunner",
    "RunTransfer",
    "StartExchange",
    "advance",
    "check_counts",
    "device_of",
    "fabric_of",
    "fabrics",
    "found_errors",
    "nothing_of",
    "of_one_rank",
    "on_found",
    "on_later_world",
    "on_new_world",
    "raise_found",
    "rank_state",
    "report_found",
    "was_raised",
]

BoundStep = Callable[[torch.Tensor], torch.Tensor]
# Maps the locals of a row exchange's operands and the fill value to the locals of its results.
BoundRows = Callable[[Sequence[torch.Tensor], Any], list[torch.Tensor]]
# Returns a rank's program in an exchange by owner, given its coordinate and its locals.
StartExchange = Callable[[Coordinate, list[torch.Tensor]], Exchanging]
# Arguments: the locals of all tensors, their new locals, a function that receives the bytes of each finished bucket,
# and whether to return at once. Returns a function that waits.
RunTransfer = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], Callable[[int], object], bool], Callable[[], None]
]
# Maps the operator, the arguments of a call, and the locals that replace its DTensors to the results as locals.
OperatorRunner = Callable[[Any, tuple[Any, ...], Mapping[str, Any], list[torch.Tensor]], Any]


@runtime_checkable
class LocalOperator(Protocol):
    """An operator and the positions of locals in its arguments, as a fabric runs it on each rank of this process."""

    op: Any
    own: Sequence[Mapping[str, Any]]  # for each rank here the plain arguments that it replaces
    written: Sequence[tuple[int, str]]  # which locals it writes to, and the names of their arguments

    def arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call on one rank: its local tensors inserted, and its replaced plain arguments."""
        ...


class Fabric(ABC):
    """Runs the ranks of a mesh: one (c10d), all (virtual), or none (dry)."""

    name: str
    asynchronous: bool = False  # whether a collective can be left in flight
    has_values: bool = True  # whether locals hold numbers; without, operators run on meta tensors
    many_ranks: bool = False  # whether a local holds the tensors of many ranks, as a `RankTensor`
    one_rank: bool = False  # whether a local is one tensor with values, that of one rank

    @abstractmethod
    def rank(self) -> int:
        """The rank of this process."""

    def later_world(self) -> int:
        """How many worlds of process groups were destroyed before the present one. Compiled code is of one world."""
        return 0

    def held_by(self) -> int | None:
        """The rank whose locals are in this process; None if it has the locals of all ranks or of none."""
        return None

    def group(self, mesh: DeviceMesh, axes: tuple[int, ...]) -> Any:
        """The process group of this rank along `axes`."""
        raise UnsupportedError(
            f"{mesh} has no process groups: it runs on the {self.name} fabric",
            hint="use DTensor operations, which communicate on every fabric; process groups exist under torchrun",
        )

    def names_in_graphs(self, mesh: DeviceMesh) -> tuple[Any, ...]:
        """The names of this process and its groups on the mesh in graphs. All groups exist afterwards."""
        return ()

    @abstractmethod
    def coordinates(self, mesh: DeviceMesh) -> list[Coordinate]:
        """The coordinates of the ranks that run in this process; none outside the mesh."""

    def is_outside(self, mesh: DeviceMesh) -> bool:
        """Whether no rank of the mesh runs in this process."""
        return False

    @abstractmethod
    def build(self, mesh: DeviceMesh, make: Callable[[Coordinate], torch.Tensor]) -> torch.Tensor:
        """The local made of `make(coordinate)` for each rank here; an empty one on ranks outside the mesh."""

    def spread(self, mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
        """A plain tensor that every rank has, as a local of the mesh. If it has values, it shares their memory."""
        return self.build(mesh, lambda coordinate: tensor)

    @abstractmethod
    def map(self, mesh: DeviceMesh, fn: Callable[..., torch.Tensor], *locals_: torch.Tensor) -> torch.Tensor:
        """The local made of `fn(coordinate, *tensors)` for each rank here."""

    def map_operator(
        self, mesh: DeviceMesh, op: Any, fn: Callable[[torch.Tensor], torch.Tensor], local: torch.Tensor
    ) -> torch.Tensor:
        """The local made of `fn(tensor)`, which calls `op`, for each rank here; equal tensors have equal results."""
        return self.map(mesh, lambda _, tensor: fn(tensor), local)

    def is_local(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be used as a local. A plain tensor cannot if locals hold the tensors of many ranks."""
        return True

    def on_each(self, op: Callable[..., Any], operands: int) -> Callable[..., Any] | None:
        """`op` on each rank here, its first `operands` arguments locals; None: only an `operator_runner` runs it."""
        return op

    def operator_runner(self, operator: LocalOperator, draws: bool) -> OperatorRunner:
        """A function that runs an operator on each rank here. `draws`: random numbers, the same on all ranks."""

        def run_here(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
            new_args, new_kwargs = operator.arguments(args, kwargs, locals_, operator.own[0])
            return op(*new_args, **new_kwargs)

        return run_here

    @abstractmethod
    def parts(self, mesh: DeviceMesh, local: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
        """The tensors in `local` with the coordinates of their ranks."""

    @abstractmethod
    def bind(self, step: Step) -> BoundStep:
        """A callable that executes `step` on a local."""

    @abstractmethod
    def bind_transfer(self, transfer: StateTransfer, route: Route) -> tuple[RunTransfer, int]:
        """A callable that executes a transfer, and the bytes that it will report. `route` is what gets recorded.

        Transfers between the same ranks run one after the other, in the order in which they are started.
        """

    @abstractmethod
    def bind_rows(self, step: RowExchange, communicates: bool) -> BoundRows:
        """A callable that executes a row exchange. It does not communicate if no rank lacks rows."""

    @abstractmethod
    def start_rotation(self, step: Rotate) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        """A callable that sends a flat buffer of blocks and returns a function that waits for the received buffer.

        The received buffer is only read. On ranks that need nothing it is empty.
        """

    @abstractmethod
    def exchange_by_owner(
        self, step: OwnerExchange, start: StartExchange, locals_: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the program `start(coordinate, locals)` of each rank in this process; returns the results."""

    @abstractmethod
    def scatter(
        self, mesh: DeviceMesh, blocks: Callable[[Coordinate], torch.Tensor], source: int | None
    ) -> torch.Tensor:
        """Each rank's block as a local. The rank `source` sends the blocks; if None, each rank makes its own."""

    @abstractmethod
    def agree(self, mesh: DeviceMesh, facts: Any, tensor: torch.Tensor) -> list[Any]:
        """The facts of each rank of the mesh, in grid order; the same list on every rank."""

    def stage_link(self, meshes: Sequence[DeviceMesh]) -> StageLink | None:
        """The connections between the ranks of these meshes; None where all of them are in this process."""
        return None

    def note(self, mesh: DeviceMesh, text: Callable[[], str]) -> None:  # noqa: B027  # most compare nothing
        """Note a text that must be the same on all ranks of a mesh, if ranks are being checked."""

    def record(self, route: Route) -> None:  # noqa: B027  # most record nothing
        """Record the steps of a route that is executed step by step."""

    def plain_check(self, mesh: DeviceMesh) -> Callable[[str, Sequence[tuple[str, torch.Tensor]]], None] | None:
        """A check of the plain tensors that an operator takes as replicated on the mesh: `check(operator, operands)`.

        None where ranks cannot differ.
        """
        return None

    def start(self, step: Step) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        """Like `bind`, but the callable returns at once with a function that waits. Only if `asynchronous`."""
        raise UnsupportedError(f"the {self.name} fabric has no asynchronous steps")

    def bind_route(self, route: Route) -> BoundStep:
        """The callable that executes a route."""
        bound = tuple(self.bind(step) for step in route.steps)
        if len(bound) == 1:
            return bound[0]

        def run_route(local: torch.Tensor) -> torch.Tensor:
            for step in bound:
                local = step(local)
            return local

        return run_route

    def raise_named(self, error: RuntimeError, step: Step) -> None:
        """Raise a failure of communication in the user's terms, if it is one."""
        return

    def start_route(self, route: Route) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        """Like `bind_route`, with the last collective left in flight: the result waits for it and finishes."""
        last = max(i for i, step in enumerate(route.steps) if step.collective is not None)
        before = [self.bind(step) for step in route.steps[:last]]
        begin = self.start(route.steps[last])
        after = [self.bind(step) for step in route.steps[last + 1 :]]

        def start(local: torch.Tensor) -> Callable[[], torch.Tensor]:
            for step in before:
                local = step(local)
            wait = begin(local)

            def finish() -> torch.Tensor:
                try:
                    result = wait()
                except RuntimeError as error:
                    self.raise_named(error, route.steps[last])
                    raise
                for step in after:
                    result = step(result)
                return result

            return finish

        return start


def check_counts(step: OwnerExchange, counts: Sequence[int]) -> None:
    """Raise on every rank of the exchange if one rank has an index that is out of range."""
    if any(count < 0 for count in counts):
        size = step.before.shape[step.dim]
        raise IndexError(f"an index is out of range for dim {step.dim} of size {size} of {step.before}")


def advance(program: Exchanging, arrived: Items | None) -> tuple[Items | None, list[torch.Tensor]]:
    """The next items that a program sends, given the received ones; at its end None and the results.

    Without communication there is no waiting: what a program does meanwhile it does now.
    """
    try:
        items = next(program) if arrived is None else program.send(arrived)
        if items.meanwhile is not None:
            items.meanwhile()
        return items, []
    except StopIteration as end:
        return None, list(end.value)


def check_source(mesh: DeviceMesh, source: int | None) -> None:
    """Refuse a source of data that is not a rank of the mesh."""
    if source is not None and not 0 <= source < mesh.size():
        raise MeshError(f"src_data_rank={source} is not in {mesh}", hint=f"it has the ranks 0 to {mesh.size() - 1}")


# Called when this process has joined another world: they drop everything that depends on the ranks of the previous one.
on_new_world: list[Callable[[], object]] = []
on_later_world: list[Callable[[], object]] = []  # the same, but not in a forked process, which has joined none

# Module state that depends on the rank of this process. If ranks are threads of one process, it is exchanged when they
# take turns: `exchange(state)` sets the state of one rank (None for a new rank) and returns the state of the previous
# one.
rank_state: list[Callable[[Any], Any]] = []

Container = TypeVar("Container", bound="dict[Any, Any] | list[Any] | set[Any]")


def of_one_rank(container: Container) -> Container:
    """`container`, whose contents belong to a rank: see `rank_state`.

    Example:
        >>> pending = of_one_rank([1])
        >>> rank_state.pop()(None), pending
        ([1], [])
    """

    def exchange(state: Any) -> Any:
        former = container.copy()
        container.clear()
        if isinstance(container, list):
            container.extend(state or ())
        else:
            container.update(state or ())
        return former

    rank_state.append(exchange)
    return container


def nothing_of(spec: DTensorSpec) -> torch.Tensor:
    """The local of a rank outside the mesh: no elements, or one zero for a tensor of no dims."""
    make = torch.empty if spec.ndim else torch.zeros
    return make((0,) if spec.ndim else (), dtype=spec.tensor_meta.dtype, device=device_of(spec.mesh))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device that this process uses for a mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


# Errors found by a background thread of a fabric. `raise_found` raises them; `report_found` empties the caches that
# would skip it.
found_errors: list[ShardwiseError] = of_one_rank([])
on_found: list[Callable[[], object]] = []
_raised: list[bool] = of_one_rank([])


def report_found(error: ShardwiseError) -> None:
    """Let the next operator or collective on any thread raise this error."""
    found_errors.append(error)
    for forget in on_found:
        forget()


def raise_found() -> None:
    """Raise errors that were found asynchronously. Called at the first look-up of an operator or a route."""
    if found_errors:
        _raised.append(True)
        raise type(found_errors[0])(found_errors[0].problem, hint=found_errors[0].hint)


def was_raised() -> bool:
    """Whether the error was raised in the program."""
    return bool(_raised)


on_new_world += [found_errors.clear, _raised.clear]


AnyFabric = TypeVar("AnyFabric", bound=Fabric)
fabrics: dict[str, Fabric] = {}


def register(fabric: AnyFabric) -> AnyFabric:
    """Register a fabric under its name."""
    fabrics[fabric.name] = fabric
    mesh_module.hosts[fabric.name] = fabric
    return fabric


def fabric_of(mesh: DeviceMesh) -> Fabric:
    """The fabric that runs `mesh`."""
    return fabrics[mesh.fabric]
