"""The dry-run fabric: shapes and costs only, for any number of ranks.

A local is a meta tensor of the largest block. Each step is recorded with its bytes and modelled seconds. The bytes of
locals, and of tensors computed from them by plain operators, are tracked, with the kernels of the target device
(`target_kernels`).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.core.mesh import Coordinate, DeviceMesh, fabric_mode
from shardwise.core.mode_stack import ModeStack, mode_context
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import (
    BoundRows,
    BoundStep,
    Fabric,
    LocalOperator,
    OperatorRunner,
    RunTransfer,
    StartExchange,
    advance,
    check_source,
    register,
)
from shardwise.fabric.block_copies import empty_block, local_step
from shardwise.fabric.target_kernels import ALLOCATION, FUSED, WORKSPACE, workspace_of
from shardwise.plan.cost import current_cost_model
from shardwise.plan.route import Route, StepCost
from shardwise.plan.row_exchange import row_exchange_route
from shardwise.plan.state_transfer import StateTransfer
from shardwise.plan.step import Compact, Expand, OwnerExchange, Rotate, RowExchange, Step
from shardwise.rules.owner_programs import Items
from shardwise.rules.registry import VALUE_DEPENDENT
from shardwise.torch_private import (
    TorchDispatchMode,
    dispatch_mode_count,
    function_mode_count,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)

__all__ = ["DryFabric", "DryRun", "Following", "RecordedStep", "dry_run"]

# Operators that users call by another name, and methods that are no operators.
READS = {
    torch.ops.aten._local_scalar_dense.default: "item(), bool() or a number made of a tensor",
    torch.ops.aten._to_copy.default: "a copy to another device",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__dlpack__: "dlpack",
    torch.Tensor.__dlpack_device__: "dlpack",
}
NO_VALUES = (
    "use a form whose sizes are known (torch.where for x[mask], one_hot(ids, num_classes), "
    "repeat_interleave(..., output_size=n)), leave it out of the dry run, or run it on a virtual mesh"
)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a dry run, and its modelled cost for a rank."""

    step: Step
    cost: StepCost


@dataclass(eq=False)
class DryRun:
    """The bytes that a dry run would have moved, and its memory on the rank that holds the most.

    Example:
        >>> with dry_run() as run:
        ...     pass
        >>> run.bytes, run.collectives
        (0, Counter())
    """

    steps: list[RecordedStep] = field(default_factory=list)
    live_bytes: int = 0
    peak_bytes: int = 0
    device_type: str = "cpu"  # of the simulated ranks
    _storages: dict[int, int] = field(default_factory=dict, repr=False)
    _workspaces: set[Any] = field(default_factory=set, repr=False)

    @property
    def bytes(self) -> int:
        """Bytes that a rank received."""
        return round(sum(record.cost.received for record in self.steps))

    @property
    def seconds(self) -> float:
        """Modelled time of the communication."""
        return sum(record.cost.seconds for record in self.steps)

    @property
    def collectives(self) -> Counter[str]:
        """The number of collectives of each kind."""
        return Counter(record.step.collective for record in self.steps if record.step.collective is not None)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the memory of `tensor` for as long as its storage lives, in a variable or saved by autograd."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = 0
            weakref.finalize(storage, self._release, key)
            self._set_size(key, storage.nbytes())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` is counted."""
        return tensor.untyped_storage()._cdata in self._storages

    def hold_workspace(self, which: Any) -> None:
        """Count a workspace that a library allocates at its first use and does not free."""
        if which is not None and which not in self._workspaces and self.device_type == "cuda":
            self._workspaces.add(which)
            self._grow(WORKSPACE)

    def _set_size(self, key: int, size: int) -> None:
        if self.device_type == "cuda":
            size = -(-size // ALLOCATION) * ALLOCATION
        self._grow(size - self._storages[key])
        self._storages[key] = size

    def _grow(self, more: int) -> None:
        self.live_bytes += more
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._storages.pop(key)


class Following(TorchDispatchMode):
    """Counts the memory of tensors that operators on plain meta tensors compute from counted memory.

    Plain meta tensors that do not depend on counted ones are not counted: a model initialised on the meta device takes
    no real memory either.
    """

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run, self.live = run, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ for kind in types):  # pyright: ignore[reportAttributeAccessIssue]
            return NotImplemented  # the operators on its locals are dispatched here again
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if self.live and _needs_values(func, error, args):
                raise _without_values(func) from error
            raise
        run = self.run
        if self.live and any(tensor.is_meta and run.holds(tensor) for tensor in _tensors(args)):
            for tensor in _tensors((result,)):
                run.hold(tensor)
            run.hold_workspace(workspace_of(func))
        return result


class _Fused(TorchFunctionMode):
    """Calls the operators of the target device's fused kernels, and refuses methods that read values."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run, self.live = run, True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = FUSED.get(self.run.device_type, {}).get(func)
        if fused is not None and self.live and args and args[0].is_meta:
            result = fused(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func in READS and self.live and args[0].is_meta:
            raise _without_values(func)
        return func(*args, **(kwargs or {}))


def _needs_values(func: Any, error: RuntimeError, args: Any) -> bool:
    """Whether an operator failed because meta tensors have no values, or because it does not run on them."""
    if not any(tensor.is_meta for tensor in _tensors(args)):
        return False
    return isinstance(error, NotImplementedError) or not VALUE_DEPENDENT.isdisjoint(func.tags)


def _without_values(func: Any) -> UnsupportedError:
    if func in READS:
        problem = f"a dry run has no values, and {READS[func]} reads them"
    elif not VALUE_DEPENDENT.isdisjoint(func.tags):
        problem = f"a dry run has no values, and the result of {func}, or its size, depends on them"
    else:
        problem = f"a dry run cannot follow {func}, which torch does not run on meta tensors"
    return UnsupportedError(problem, hint=NO_VALUES)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class DryFabric(Fabric):
    """No rank runs; coordinate zero, which holds the most, represents all."""

    name = "dry"
    has_values = False

    def __init__(self) -> None:
        self.runs = ModeStack[DryRun]("dry run")

    def rank(self) -> int:
        return 0

    def coordinates(self, mesh: DeviceMesh) -> list[Coordinate]:
        return [(0,) * mesh.ndim]

    def build(self, mesh: DeviceMesh, make: Callable[[Coordinate], torch.Tensor]) -> torch.Tensor:
        for run in self.runs.values():
            run.device_type = mesh.device_type
        with torch.device("meta"):
            made = make((0,) * mesh.ndim)
        return self.track(made.to("meta"))

    def map(self, mesh: DeviceMesh, fn: Callable[..., torch.Tensor], *locals_: torch.Tensor) -> torch.Tensor:
        return self.track(fn((0,) * mesh.ndim, *locals_))

    def operator_runner(self, operator: LocalOperator, draws: bool) -> OperatorRunner:
        """On meta tensors, which are counted."""

        def run_dry(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
            new_args, new_kwargs = operator.arguments(args, kwargs, locals_, operator.own[0])
            if "device" in new_kwargs:
                new_kwargs["device"] = torch.device("meta")
            results = op(*new_args, **new_kwargs)
            for result in results if isinstance(results, tuple | list) else (results,):
                if isinstance(result, torch.Tensor):
                    self.track(result)
            return results

        return run_dry

    def parts(self, mesh: DeviceMesh, local: torch.Tensor) -> list[tuple[Coordinate, torch.Tensor]]:
        return [((0,) * mesh.ndim, local)]

    def scatter(
        self, mesh: DeviceMesh, blocks: Callable[[Coordinate], torch.Tensor], source: int | None
    ) -> torch.Tensor:
        check_source(mesh, source)
        return self.build(mesh, blocks)

    def agree(self, mesh: DeviceMesh, facts: Any, tensor: torch.Tensor) -> list[Any]:
        return [facts]

    def bind(self, step: Step) -> BoundStep:
        coordinate = (0,) * step.after.mesh.ndim
        if isinstance(step, Compact | Expand):
            run: Any = local_step(step, coordinate)
            return lambda local: self.track(run(local))
        return lambda local: self.track(empty_block(step.after, coordinate, local))

    def bind_transfer(self, transfer: StateTransfer, route: Route) -> tuple[RunTransfer, int]:
        def record_transfer(
            locals_: Sequence[torch.Tensor],
            results: Sequence[torch.Tensor],
            report: Callable[[int], object],
            in_background: bool,
        ) -> Callable[[], None]:
            self.record(route)
            return lambda: None

        return record_transfer, 0

    def bind_rows(self, step: RowExchange, communicates: bool) -> BoundRows:
        records = [RecordedStep(step, cost) for cost in row_exchange_route(step).costs]

        def record_row_exchange(locals_: Sequence[torch.Tensor], fill: Any) -> list[torch.Tensor]:
            for dry_run in self.runs.values():
                dry_run.steps.extend(records)
            return [self.track(empty_block(spec, (0,) * spec.mesh.ndim, locals_[0])) for spec in step.results]

        return record_row_exchange

    def start_rotation(self, step: Rotate) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        def start(flat: torch.Tensor) -> Callable[[], torch.Tensor]:
            arriving = self.track(torch.empty_like(flat))
            return lambda: arriving

        return start

    def record(self, route: Route) -> None:
        """Record the steps of a route that is carried out step by step."""
        records = [RecordedStep(*pair) for pair in zip(route.steps, route.costs, strict=True)]
        for dry_run in self.runs.values():
            dry_run.steps.extend(records)

    def exchange_by_owner(
        self, step: OwnerExchange, start: StartExchange, locals_: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Assumes that every rank sends equally many items to each rank: as many are received as sent."""
        mesh = step.before.mesh
        members = math.prod(mesh.shape[axis] for axis in step.over)
        program = start((0,) * mesh.ndim, list(locals_))
        sent, results = advance(program, None)
        while sent is not None:
            arrived = tuple(self.track(torch.empty_like(tensor)) for tensor in sent.tensors)
            held = sum(tensor.nbytes for tensor in arrived)
            sizes = 0 if sent.arriving is not None else 8 * members
            received = (held + sizes) * (members - 1) / members
            record = RecordedStep(
                step, StepCost(received, current_cost_model().seconds(mesh, step.over, received), held)
            )
            for dry_run in self.runs.values():
                dry_run.steps.append(record)
            sent, results = advance(program, Items(arrived, (), ()))
        return [self.track(result) for result in results]

    def track(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a local in every active dry run."""
        for run in self.runs.values():
            run.hold(tensor)
        return tensor

    def bind_route(self, route: Route) -> BoundStep:
        run = super().bind_route(route)
        records = [RecordedStep(*pair) for pair in zip(route.steps, route.costs, strict=True)]

        def recorded(local: torch.Tensor) -> torch.Tensor:
            for dry_run in self.runs.values():
                dry_run.steps.extend(records)
            return run(local)

        return recorded


dry = register(DryFabric())


@contextlib.contextmanager
def _torch_mode(mode: Any, stack: Any) -> Iterator[None]:
    """Inside, `mode` is on torch's stack for such modes. If contexts end out of order, only this mode is removed.

    Args:
        mode: the mode.
        stack: torch's functions for the stack: its length, push, pop.
    """
    size, push, pop = stack
    push(mode)
    try:
        yield
    finally:
        mode.live = False  # on whichever stack it remains: a context may be left on another thread
        above = []
        while size():
            top = pop()
            if top is mode:
                break
            above.append(top)
        for other in reversed(above):
            push(other)


_DISPATCH_MODES = (dispatch_mode_count, push_dispatch_mode, pop_dispatch_mode)
_FUNCTION_MODES = (function_mode_count, push_function_mode, pop_function_mode)


@mode_context
def dry_run() -> Iterator[DryRun]:
    """Meshes made inside, by this thread, are dry: nothing is computed or sent, but everything is recorded.

    `peak_bytes` is the peak memory of the rank that holds the most: locals, tensors computed from them, and those that
    autograd saves. On a mesh of "cuda" ranks fused kernels are taken as a GPU would take them, allocations are rounded
    as its allocator rounds them, and the workspace of its matrix products is counted.

    Example:
        >>> with dry_run() as run:
        ...     mesh = DeviceMesh("cpu", range(16384))
        >>> mesh.fabric
        'dry'
    """
    with (
        dry.runs.holding(DryRun()) as run,
        fabric_mode.holding(dry.name),
        _torch_mode(Following(run), _DISPATCH_MODES),
        _torch_mode(_Fused(run), _FUNCTION_MODES),
    ):
        yield run
