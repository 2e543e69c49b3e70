"""What is kept of one operator: who called it, how its tensors lay, how it was run, what moved.

Data only. Knows neither how it was recorded nor how it is shown.
"""

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

__all__ = ["Move", "Operand", "Record", "Where", "layouts_text", "moves_of_route", "scatter_move"]


class Where(NamedTuple):
    """A line of the user's: file, line, and the function it stands in."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """The line without the folders: `model.py:12`."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.line else self.file

    @property
    def path(self) -> str:
        """The file from where the program was started, if it lies below that."""
        below = os.getcwd() + os.sep
        return self.file.removeprefix(below)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


NOWHERE = Where("", 0, "")


class Operand(NamedTuple):
    """A tensor given to an operator: its name in the schema, how it lies, and whose it is, if that is known."""

    name: str
    spec: DTensorSpec
    owner: str  # the parameter that it is or is a view of, "" for none
    made_by: int | None  # the record that it came out of


class Move(NamedTuple):
    """One collective: what it was, over which axes, from which layout to which, bytes that a rank received, seconds."""

    collective: str
    words: str
    axis: str  # the names of the axes, joined by x
    group: int  # how many ranks talk to each other
    before: DTensorSpec
    after: DTensorSpec
    received: float
    seconds: float


def moves_of_route(route: Route) -> tuple[Move, ...]:
    """The collectives of a route."""
    return tuple(
        Move(
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


def scatter_move(spec: DTensorSpec) -> Move:
    """What `distribute_tensor` sends: to each rank its block."""
    mesh = spec.mesh
    received = float(spec.local_bytes)
    seconds = current_cost_model().seconds(mesh, tuple(range(mesh.ndim)), received)
    axes = " x ".join(mesh.axis_name(axis) for axis in range(mesh.ndim))
    return Move("scatter", f"scatter over {axes}", axes, mesh.size(), spec, spec, received, seconds)


@dataclass(eq=False, slots=True)
class Record:
    """One operator, or one move that was asked for by name.

    Args:
        index: its number in the order of starting.
        name: `aten.mm.default`, or `redistribute`, `full_tensor`, `to_local`, `from_local`, `distribute_tensor`.
        kind: "operator", or "explicit" for what was asked for by name.
        phase: "forward", "backward" or "recompute" (of a checkpointed forward, in backward).
        where: the user's line; in backward that of the operator in forward whose gradient is computed.
        called: in backward the line that started it.
        module: the path of the module whose forward is running, or was when the operator in forward ran.
        parent: the record that it is a part of: an operator that is computed from others.
        cause: in backward, the record in forward.
        operands: the tensors given.
        decision: how it was run; None for moves.
    """

    index: int
    name: str
    kind: str
    phase: str
    where: Where
    called: Where
    module: str
    parent: int | None
    cause: int | None
    operands: tuple[Operand, ...]
    decision: Decision | None
    directly: bool = False  # inside its own decomposition
    outputs: tuple[DTensorSpec, ...] = ()
    moves: list[Move] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)  # which the moves are of, with the local steps between them
    children: list[int] = field(default_factory=list)
    received_inside: float = 0.0  # by those that it is computed from
    error: str = ""
    started: float = 0.0
    ended: float = 0.0

    @property
    def way(self) -> str:
        """How it was run, in a word."""
        if self.decision is None:
            return "asked for" if self.parent is None else "part of a decomposition"
        if self.decision.way == "decomposed" and (self.directly or not self.children):
            return "rule" if self.decision.sharding is not None else "whole tensors"
        return self.decision.way

    @property
    def rule(self) -> str:
        """The rule that it went by and the row taken on each axis: `mk,kn->mn; tp: R, S1 -> S1`; "" for none."""
        sharding = None if self.decision is None else self.decision.sharding
        if self.decision is None or sharding is None or not (self.way == "rule" or self.decision.why):
            return ""
        return rule_text(sharding) + (f"; {self.decision.why}" if self.decision.why else "")

    @property
    def collectives(self) -> int:
        """How many collectives it issued itself; those of its parts are theirs."""
        return len(self.moves)

    @property
    def received(self) -> float:
        """Bytes that a rank received."""
        return sum(move.received for move in self.moves)

    @property
    def seconds(self) -> float:
        """Modelled time of its communication."""
        return sum(move.seconds for move in self.moves)

    @property
    def wanted(self) -> tuple[DTensorSpec, ...]:
        """How the operands had to lie, where a rule or whole tensors asked for something."""
        decision = self.decision
        if decision is None or decision.signature is None:
            return ()
        if (self.way == "rule" or decision.why) and decision.sharding is not None:
            return decision.sharding.inputs
        return decision.signature.with_whole_operands() if self.way == "whole tensors" else ()


def layouts_text(specs: Iterable[Any]) -> str:
    """Layouts in short notation; equal ones once, with their number: those of a list of parameters are many."""
    counts = Counter(str(spec) for spec in specs)
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in counts.items())
