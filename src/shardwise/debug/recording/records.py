"""The record of one operator: caller, layouts of its operands, execution, collectives. Data only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.core.spec import DTensorSpec
from shardwise.dispatch.decision import Decision
from shardwise.plan.alternatives import rule_text
from shardwise.plan.cost import current_cost_model
from shardwise.plan.route import Route
from shardwise.plan.step import Step

__all__ = [
    "MoveRecord",
    "Operand",
    "Record",
    "SourceLine",
    "layouts_text",
    "moves_of_route",
    "operator_text",
    "scatter_move",
]


class SourceLine(NamedTuple):
    """A line of user code: file, line number, and function."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The line without folders: `model.py:12`."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.line else self.file

    @property
    def path(self) -> str:
        """The path of the file, relative to the working directory if it is below it."""
        below = os.getcwd() + os.sep
        return self.file.removeprefix(below)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


NO_LINE = SourceLine("", 0, "")


class Operand(NamedTuple):
    """A DTensor operand: its name in the schema, its spec, and its origin, if known."""

    name: str
    spec: DTensorSpec
    owner: str  # the parameter that it is or is a view of, "" for none
    made_by: int | None  # the index of the record that made it


class MoveRecord(NamedTuple):
    """One collective: kind, mesh axes, layouts before and after, bytes received by a rank, modelled seconds."""

    collective: str
    words: str
    axis: str  # the names of the axes, joined by x
    group: int  # number of ranks in a group
    before: DTensorSpec
    after: DTensorSpec
    received: float
    seconds: float


def moves_of_route(route: Route) -> tuple[MoveRecord, ...]:
    """The collectives of a route."""
    return tuple(
        MoveRecord(
            step.collective, step.describe(), *_group(step), step.before, step.after, cost.received, cost.seconds
        )
        for step, cost in zip(route.steps, route.costs, strict=True)
        if step.collective is not None
    )  # fmt: skip


def _group(step: Step) -> tuple[str, int]:
    mesh = step.before.mesh
    if not step.axes:  # between two meshes: all ranks of both
        return "between meshes", len({*mesh.grid_ranks, *step.after.mesh.grid_ranks})
    size = 1
    for axis in step.axes:
        size *= mesh.shape[axis]
    return " x ".join(mesh.axis_name(axis) for axis in step.axes), size


def scatter_move(spec: DTensorSpec) -> MoveRecord:
    """The scatter of `distribute_tensor`: each rank receives its block."""
    mesh = spec.mesh
    received = float(spec.local_bytes)
    seconds = current_cost_model().seconds(mesh, tuple(range(mesh.ndim)), received)
    axes = " x ".join(mesh.axis_name(axis) for axis in range(mesh.ndim))
    return MoveRecord("scatter", f"scatter over {axes}", axes, mesh.size(), spec, spec, received, seconds)


@dataclass(eq=False, slots=True)
class Record:
    """One operator, or one explicit redistribution.

    Args:
        index: its number in starting order.
        name: `aten.mm.default`, or `redistribute`, `full_tensor`, `to_local`, `from_local`, `distribute_tensor`.
        kind: "operator", or "explicit" for a redistribution that the user called.
        phase: "forward", "backward" or "recompute" (a checkpointed forward, run again in backward).
        where: the user's line; in backward the line of the forward operator whose gradient is computed.
        called: in backward the line that started backward.
        module: the path of the module in whose forward the (forward) operator ran.
        parent: the index of the operator whose decomposition it is part of.
        cause: in backward, the index of the forward record.
        operands: the DTensor operands.
        decision: how dispatch ran it; None for explicit redistributions.
    """

    index: int
    name: str
    kind: str
    phase: str
    where: SourceLine
    called: SourceLine
    module: str
    parent: int | None
    cause: int | None
    operands: tuple[Operand, ...]
    decision: Decision | None
    directly: bool = False  # called inside its own decomposition
    outputs: tuple[DTensorSpec, ...] = ()
    moves: list[MoveRecord] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)  # the routes of the moves, local steps included
    children: list[int] = field(default_factory=list)
    received_inside: float = 0.0  # bytes received by the operators of its decomposition
    error: str = ""
    started: float = 0.0
    ended: float = 0.0

    @property
    def way(self) -> str:
        """How it was run: "rule", "decomposed", "replicated operands", "asked for", ..."""
        if self.decision is None:
            return "asked for" if self.parent is None else "part of a decomposition"
        if self.decision.way == "decomposed" and (self.directly or not self.children):
            return "rule" if self.decision.sharding is not None else "replicated operands"
        return self.decision.way

    @property
    def rule(self) -> str:
        """Its rule and the row chosen on each axis: `mk,kn->mn; tp: R, S1 -> S1`; "" for none."""
        sharding = None if self.decision is None else self.decision.sharding
        if self.decision is None or sharding is None or not (self.way == "rule" or self.decision.why):
            return ""
        return rule_text(sharding) + (f"; {self.decision.why}" if self.decision.why else "")

    @property
    def collectives(self) -> int:
        """The number of collectives it issued itself, without the operators of its decomposition."""
        return len(self.moves)

    @property
    def received(self) -> float:
        """Bytes received by a rank."""
        return sum(move.received for move in self.moves)

    @property
    def seconds(self) -> float:
        """Modelled time of its communication."""
        return sum(move.seconds for move in self.moves)

    @property
    def wanted(self) -> tuple[DTensorSpec, ...]:
        """The specs that a rule, or replication of all operands, required of the operands."""
        decision = self.decision
        if decision is None or decision.signature is None:
            return ()
        if (self.way == "rule" or decision.why) and decision.sharding is not None:
            return decision.sharding.inputs
        return decision.signature.replicated_operands() if self.way == "replicated operands" else ()


def layouts_text(specs: Iterable[Any]) -> str:
    """Layouts in short notation; repeated ones once, with a count."""
    counts = Counter(str(spec) for spec in specs)
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counts.items())


def operator_text(name: str) -> str:
    """The name of an operator without its overload.

    Example:
        >>> operator_text("aten.mm.default"), operator_text("aten.sum.dim_IntList"), operator_text("redistribute")
        ('aten.mm', 'aten.sum', 'redistribute')
    """
    return ".".join(name.split(".")[:2])
