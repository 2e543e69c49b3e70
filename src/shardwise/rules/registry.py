"""The one table from operator to rule: `@rule`, and `register_sharding` for users' operators.

A rule maps a `Call` (global shapes and plain values) to the placements that one axis allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwise.core.layout import Segment, Window
from shardwise.core.mesh import Coordinate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.rules.engine import Factors, Pattern, factors_of, parse
from shardwise.rules.owner_programs import Program
from shardwise.torch_private import OpOverload, OpOverloadPacket

__all__ = [
    "Call",
    "Halo",
    "Rows",
    "Rule",
    "WindowPart",
    "decomposition",
    "find_rule",
    "layout_rule",
    "pattern_rule",
    "readers_of",
    "rule",
]


@dataclass(frozen=True, slots=True)
class Call:
    """The argument of rules: a call with its arguments by name (tensors as `TensorMeta`), operands and results."""

    op: OpOverload
    arguments: Mapping[str, Any]
    operands: tuple[TensorMeta, ...]
    results: tuple[TensorMeta, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or `default` if the operator has none of that name."""
        return self.arguments.get(name, default)

    @property
    def tensors(self) -> dict[str, TensorMeta]:
        """The operands by name, in their order, for an operator without lists of tensors."""
        given = ((argument.name, self.arguments.get(argument.name)) for argument in self.op._schema.arguments)
        return {name: value for name, value in given if isinstance(value, TensorMeta)}


# Tags of operators whose results, or the sizes of these, depend on values.
VALUE_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
# Arguments to replace on the rank at a coordinate, if plain arguments depend on the layout.
Localize = Callable[[Call, Sequence[DTensorSpec], Sequence[DTensorSpec], Coordinate], Mapping[str, Any]]
# For operators whose axes are not independent (views): the specs of operands and results.
Layouts = Callable[[Call, Sequence[DTensorSpec]], tuple[tuple[DTensorSpec, ...], tuple[DTensorSpec, ...]] | None]


@dataclass(frozen=True, slots=True)
class Rows:
    """The sources of the rows of results along one dim.

    Args:
        segments: rows and their sources; rows that no segment covers have the fill value.
        fill: the argument that is the fill value; None for zero.
        first: runs on each local before the exchange, with the local and the fill value: the operator along other dims.
        adds: whether several segments may have the same rows of a result, which are added up.
    """

    segments: tuple[Segment, ...]
    fill: str | None = None
    first: Callable[[torch.Tensor, Any], torch.Tensor] | None = None
    adds: bool = False


class WindowPart(NamedTuple):
    """The rows of a rank along a dim: those of the reference, and those of tensors with halos."""

    start: int
    length: int
    window: int  # the first row of the window, which may be outside of the tensor
    rows: int  # the number of rows of the window


@dataclass(frozen=True, slots=True)
class Halo:
    """How an operator runs if a window slides over a sharded dim.

    One tensor, the reference, splits the work. Operands of which a rank needs its window get halos before. Results of
    which a rank computes a window are added up over ranks after.

    Args:
        windows: by factor, the rows of tensors with halos that a row of the reference needs.
        local_op: runs on each rank instead of the operator, with the same arguments and `places`: by dim, the rows of
            the rank. It gets and returns windows of the tensors with halos.
        reads: the operands that get halos.
        adds: the results that are windows.
        reference: the operand that is the reference; None for the first result.
        fill: the value of padding.
        last: by result, a function called on each rank at the end, with the local of the result and those of operands,
            without halos.
    """

    windows: Mapping[str, Window]
    local_op: Callable[..., Any]
    reads: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    reference: int | None = None
    fill: Any = 0
    last: Mapping[int, Callable[..., torch.Tensor]] = field(default_factory=dict)


def _no_factors(call: Call) -> None:
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The layouts that an operator allows.

    Args:
        factors: the factors of a call, or None if the rule does not cover it (the operator is then decomposed or run
            replicated).
        layouts: instead of factors, for operators whose axes are not independent.
        localize: arguments to be replaced on each rank (sizes, offsets).
        reads: arguments of type Scalar or float that the rule reads, each with a function (such as `is_zero`) whose
            value is part of the dispatch key. Other numbers are not.
        local_op: runs on the locals instead of the operator, with the same arguments.
        meta_op: runs on meta tensors for the shape of the result, if torch's meta kernel refuses arguments that kernels
            accept, or returns another shape.
        rows: for a call and a dim whose factor is exchanged, the sources of the rows of results.
        halo: for a call, how it runs with its exchanged factors sharded; None if it cannot.
        algorithms: by name, the factors of other algorithms for the operator, which dispatch implements.
        program: the program of a rank if an owned row of the factors is chosen.
        by_groups: whether it multiplies each group of rows by a matrix of that group. The gradient of the matrices,
            also a product by groups, takes their layout.
        gathering_node: the autograd node of the operator, if its formula needs an unsharded dim. Operators before it
            then do not shard that dim, to avoid another all-gather.
    """

    factors: Callable[[Call], Factors | None] = _no_factors
    layouts: Layouts | None = None
    localize: Localize | None = None
    reads: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    local_op: Callable[..., Any] | None = None
    meta_op: Callable[..., Any] | None = None
    rows: Callable[[Call, int], Rows] | None = None
    halo: Callable[[Call], Halo | None] | None = None
    algorithms: Mapping[str, Callable[[Call], Factors | None]] = field(default_factory=dict)
    program: Program | None = None
    by_groups: bool = False
    gathering_node: str = ""

    def factors_by(self, algorithm: str, call: Call) -> Factors | None:
        """The factors of a call with one of `algorithms`; "" is the operator itself."""
        return self.algorithms[algorithm](call) if algorithm else self.factors(call)


RULES: dict[OpOverload, Rule] = {}
USERS_RULES: set[OpOverload] = set()  # operators with a rule by the user


def rule(
    *ops: Any,
    localize: Localize | None = None,
    reads: Sequence[str] | Mapping[str, Callable[[Any], Any]] = (),
    local_op: Callable[..., Any] | None = None,
    meta_op: Callable[..., Any] | None = None,
    rows: Callable[[Call, int], Rows] | None = None,
    halo: Callable[[Call], Halo | None] | None = None,
    algorithms: Mapping[str, Callable[[Call], Factors | None]] | None = None,
    program: Program | None = None,
    by_groups: bool = False,
    gathering_node: str = "",
) -> Callable:
    """Declare the rule of some operators: a decorator of the function that gives a call's factors.

    An operator packet (`aten.sum`) means all of its overloads.
    """

    def declare(factors: Callable[[Call], Factors | None]) -> Callable:
        made = Rule(
            factors, None, localize, readers_of(reads), local_op, meta_op, rows, halo, algorithms or {}, program,
            by_groups, gathering_node,
        )  # fmt: skip
        declare_rule(made, *ops)
        return factors

    return declare


def is_zero(value: Any) -> bool:
    """Whether a number that a rule reads is zero: the property that many rules need."""
    return value == 0


def readers_of(reads: Sequence[str] | Mapping[str, Callable[[Any], Any]]) -> Mapping[str, Callable[[Any], Any]]:
    """By argument the function whose value is in the dispatch key; of arguments that are only named, the value."""
    return reads if isinstance(reads, Mapping) else dict.fromkeys(reads, lambda value: value)


def layout_rule(
    *ops: Any,
    localize: Localize | None = None,
    reads: Sequence[str] = (),
    local_op: Callable[..., Any] | None = None,
    meta_op: Callable[..., Any] | None = None,
) -> Callable:
    """Declare a rule that considers all axes at once."""

    def declare(layouts: Layouts) -> Layouts:
        own = Rule(layouts=layouts, localize=localize, reads=readers_of(reads), local_op=local_op, meta_op=meta_op)
        declare_rule(own, *ops)
        return layouts

    return declare


def declare_rule(made: Rule, *ops: Any, replace: bool = False) -> None:
    """Register a rule for operators without one; with `replace`, also for others."""
    for op in overloads(ops):
        assert replace or op not in RULES, f"{op} has a rule already"
        RULES[op] = made
        if replace:
            USERS_RULES.add(op)


def pattern_rule(text: str, *ops: Any, localize: Localize | None = None, **more: Any) -> None:
    """Declare the rule of some operators by a rule string."""
    pattern = parse(text)
    rule(*ops, localize=localize)(lambda call: pattern_factors(pattern, call, **more))


def pattern_factors(pattern: Pattern, call: Call, **more: Any) -> Factors:
    """The factors of a call by a pattern."""
    return factors_of(pattern, [m.shape for m in call.operands], [m.shape for m in call.results], **more)


def overloads(ops: Sequence[Any]) -> list[OpOverload]:
    """The operators, with packets replaced by their overloads."""
    found: list[OpOverload] = []
    for op in ops:
        if isinstance(op, OpOverloadPacket):
            found.extend(getattr(op, name) for name in op.overloads())
        else:
            found.append(op)
    return found


# Decompositions on DTensors: used if the operator has no rule, or its rule would communicate.
DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {}
# The number of reductions along sharded dims of a decomposition: its cost, compared with moving the operands.
REDUCTIONS: dict[OpOverload, int] = {}


def decomposition(*ops: Any, reductions: int | None = None) -> Callable:
    """Declare how operators are computed from others. The decorated function gets the operator's arguments.

    Args:
        ops: the operators.
        reductions: the number of small collectives along dims that the rule does not shard. By default the
            decomposition is used whenever the rule would communicate.
    """

    def declare(compute: Callable[..., Any]) -> Callable:
        for op in overloads(ops):
            assert op not in DECOMPOSITIONS, f"{op} has a decomposition already"
            DECOMPOSITIONS[op] = compute
            if reductions is not None:
                REDUCTIONS[op] = reductions
        return compute

    return declare


# The rule of operators that torch tags as pointwise; set by rules/pointwise.
default_pointwise: list[Rule] = []


def find_rule(op: OpOverload) -> Rule | None:
    """The rule of `op`: its own, or the default if torch tags it as pointwise."""
    found = RULES.get(op)
    if found is None and default_pointwise and torch.Tag.pointwise in op.tags:
        return default_pointwise[0]
    return found
