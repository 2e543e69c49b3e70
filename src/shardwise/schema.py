"""The schema of an operator, and the position of a tensor in a call.

Read once for each operator.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.rules.registry import Rule, find_rule
from shardwise.torch_private import OpOverload

__all__ = [
    "NUMBERS",
    "UNREAD",
    "OpInfo",
    "Reader",
    "Slot",
    "forget_infos",
    "functional_of",
    "infos",
    "op_info",
]


class _Unread:
    """The reader of a number that no rule reads. Rules get it in place of the number, and cannot compute with it."""

    def __call__(self, value: Any) -> None:
        """Nothing of the value is in the key of a call."""

    def _refuse(self, *others: Any) -> Any:
        raise AssertionError("a rule uses a number that is not among its `reads`, and not in the key of the call")

    __bool__ = __int__ = __float__ = __index__ = __neg__ = __abs__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__


UNREAD = _Unread()
NUMBERS = {int, float, bool, complex}
Reader = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class OpInfo:
    """The properties of an operator for dispatch, read once from its schema."""

    op: OpOverload
    kernel: Callable[..., Any]  # the function that the operator calls: the same without a Python frame
    rule: Rule | None
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    unread: frozenset[str]  # arguments whose value no rule reads: only their type is in the key
    reads: tuple[Reader, ...]  # how each argument enters the key: None for its value
    writes: tuple[str, ...]  # arguments written to
    outs: tuple[str, ...]  # those of them that are keyword-only: out=
    is_view: bool
    pointwise: bool
    draws: bool  # whether it draws random numbers, by its tags
    returns: tuple[str, ...]  # the type of each result
    returned: tuple[str | None, ...]  # for each result the written argument that it is, None for a new one

    @classmethod
    def of(cls, op: OpOverload) -> OpInfo:
        """The properties of `op`."""
        return op_info(op)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name, defaults included."""
        bound = dict(self.defaults)
        bound.update(zip(self.names, args, strict=False))
        bound.update(kwargs)
        return bound


# Modules that fill the registry when they are imported; a later layer adds its own.
RULE_MODULES = ["shardwise.rules.all"]


@functools.cache
def load_rules() -> None:
    """Fill the registry. Done when the first operator runs, which keeps `import shardwise` short."""
    for name in RULE_MODULES:
        importlib.import_module(name)


infos: dict[int, OpInfo] = {}  # by id: OpOverload hashes in Python, and operators are never freed


def op_info(op: OpOverload) -> OpInfo:
    info = infos.get(id(op))
    if info is None:
        info = infos[id(op)] = _read(op)
    return info


def forget_infos() -> None:
    """Read schemas and rules again at their next use, because a rule has changed."""
    infos.clear()


def _read(op: OpOverload) -> OpInfo:
    load_rules()
    schema = op._schema
    rule = find_rule(op)
    reads = rule.reads if rule is not None else {}
    arguments = schema.arguments
    writes = tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return OpInfo(
        op=op,
        kernel=getattr(op, "_op", op),
        rule=rule,
        names=tuple(a.name for a in arguments),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        unread=frozenset(a.name for a in arguments if _is_value(str(a.type)) and a.name not in reads),
        reads=tuple([reads.get(a.name, UNREAD) if _is_value(str(a.type)) else None for a in arguments]),
        writes=writes,
        outs=tuple(a.name for a in arguments if a.kwarg_only and a.name in writes),
        is_view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        pointwise=torch.Tag.pointwise in op.tags,
        draws=torch.Tag.nondeterministic_seeded in op.tags,
        returns=tuple(str(r.type) for r in schema.returns),
        returned=tuple(_written_argument(r, arguments) for r in schema.returns),
    )


def _written_argument(result: Any, arguments: Sequence[Any]) -> str | None:
    if result.alias_info is None or not result.alias_info.is_write:
        return None
    wanted = result.alias_info.before_set
    return next(a.name for a in arguments if a.alias_info is not None and a.alias_info.before_set == wanted)


def _is_value(kind: str) -> bool:
    """Whether an argument of this type is a number to compute with, not one that determines the shape of the result."""
    # a Tensor argument may be given a Python number
    return kind.removeprefix("Optional[").removeprefix("List[").rstrip("]") in ("number", "float", "Tensor")


@functools.cache
def functional_of(op: OpOverload) -> OpOverload | None:
    """The operator that returns a new tensor instead of writing to an argument: `add_.Tensor` -> `add.Tensor`."""
    info = OpInfo.of(op)
    namespace, _, name = op._schema.name.partition("::")
    base = name if info.outs else name.removesuffix("_")
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in info.outs]
    for known in (base, f"{base}_functional"):
        packet = getattr(getattr(torch.ops, namespace), known, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            arguments = [(a.name, str(a.type)) for a in candidate._schema.arguments]
            if arguments == wanted and not OpInfo.of(candidate).writes:
                return candidate
    return None


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one tensor operand: `args[index]` or `kwargs[name]`, for lists with the `item` in the list."""

    index: int | None
    name: str
    item: int | None

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = args[self.index] if self.index is not None else kwargs[self.name]
        return value if self.item is None else value[self.item]

    def put(self, args: list[Any], kwargs: dict[str, Any], value: Any) -> None:
        if self.item is not None:
            items = args[self.index] if self.index is not None else kwargs[self.name]
            if not isinstance(items, _Copied):
                items = _Copied(items)
            items[self.item] = value
            value = items
        if self.index is not None:
            args[self.index] = value
        else:
            kwargs[self.name] = value


class _Copied(list):
    """A copy of an argument list, which may be written to."""
