"""Whether dicts have changed since some moment, for hundreds of them in one call.

Python gives a dict another version with each change. The guards of torch's compiler compare versions in C++, at a
fraction of the time that comparing the contents takes.
"""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from shardwise.capture.slots import MISSING
from shardwise.torch_private import dict_version, guard_managers

__all__ = ["DictVersions", "Table", "dict_of_class", "names_of", "table_of", "versions_are_right"]

_CHUNK = 64  # a guard manager looks through its children when one is added


class Table(NamedTuple):
    """The contents of a dict at some moment, or of some of its names."""

    held: Mapping[Any, Any]
    owner: Any  # the object whose attributes these are, or None
    kind: Any  # its class
    keys: Sequence[Any]
    values: list[Any]
    is_whole: bool  # False: other names than `keys` may change

    def is_same(self) -> bool:
        """Whether it holds the same objects in the same order, and is still the dict of its owner."""
        held, owner, kind, keys, values, is_whole = self
        if not is_whole:
            return all(map(operator.is_, map(held.get, keys, repeat(MISSING)), values))
        if owner is not None and (owner.__class__ is not kind or vars(owner) is not held):
            return False
        if len(held) != len(keys) or not all(map(operator.is_, held.values(), values)):
            return False
        return all(
            now is was or (now.__class__ is was.__class__ is str and now == was)
            for now, was in zip(held, keys, strict=True)
        )


def table_of(held: Mapping[Any, Any], owner: Any = None) -> Table:
    """The contents of a dict now."""
    return Table(held, owner, owner.__class__, list(held), list(held.values()), True)


def names_of(held: Mapping[Any, Any], names: Sequence[str]) -> Table:
    """The values of some names of a dict now, which it may also lack."""
    return Table(held, None, None, names, [held.get(name, MISSING) for name in names], False)


def dict_of_class(kind: type) -> Mapping[str, Any]:
    """The dict behind the read-only attributes of a class; those themselves where Python does not give it."""
    found = gc.get_referents(vars(kind))
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else vars(kind)


class DictVersions:
    """The versions of dicts, and of the attributes and classes of objects.

    Args:
        tables: the dicts, not those of classes that Python keeps to itself.

    Example:
        >>> options = {"width": 4}
        >>> versions = DictVersions([table_of(options)])
        >>> versions.hold()
        True
        >>> options["width"] = 5
        >>> versions.hold(), versions.changed()
        (False, {0})
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._numbers = [dict_version(table.held) for table in tables]
        new_root, plain = guard_managers()
        self._root = new_root()
        self._chunks: list[list[Any]] = []
        for at, (held, owner, kind, *_) in enumerate(tables):
            value = held if owner is None else owner
            if at % _CHUNK == 0:
                self._chunks.append([])
            chunk = self._chunks[-1]
            chunk.append(value)
            outer = self._root.list_getitem_manager(len(self._chunks) - 1, "", chunk, plain)
            guards = outer.list_getitem_manager(len(chunk) - 1, "", value, plain)
            if owner is not None:
                guards.add_type_match_guard(id(kind), [], None)
                guards = guards.get_generic_dict_manager("", held, plain)
            guards.add_dict_version_guard(held, [], None)

    def hold(self) -> bool:
        """Whether nothing has changed. Also false if a value was put in again in place of itself."""
        return self._root.check(self._chunks)

    def changed(self) -> set[int]:
        """The positions of the dicts that were changed."""
        pairs = zip(self._tables, self._numbers, strict=True)
        return {at for at, (table, was) in enumerate(pairs) if dict_version(table.held) != was}


# ---------------------------------------------------------------- whether this Python does so


@functools.cache
def versions_are_right() -> bool:
    """Whether every kind of change gives a dict another version here, and nothing else does. Tried once a process."""
    probe = _Probe()
    for change in _CHANGES:
        for number in range(_SPECIALIZED):
            probe.width = number
        held = vars(probe)
        versions = DictVersions([table_of(held, probe)])
        if not versions.hold() or versions.changed():
            return False
        change(probe)
        if versions.hold() or (vars(probe) is held and not versions.changed()):
            return False
    return True


class _Probe:
    """An object with one attribute."""

    width: int


_SPECIALIZED = 64  # after fewer assignments the interpreter has replaced their instruction by a quicker one


def _assign_often(probe: _Probe) -> None:
    for _ in range(_SPECIALIZED):
        probe.width = -1


_CHANGES: tuple[Callable[[_Probe], object], ...] = (
    _assign_often,
    lambda probe: setattr(probe, "height", 1),
    lambda probe: delattr(probe, "width"),
    lambda probe: vars(probe).update(width=-1),
    lambda probe: vars(probe).pop("width"),
    lambda probe: vars(probe).setdefault("depth", 1),
    lambda probe: vars(probe).popitem(),
    lambda probe: vars(probe).clear(),
    lambda probe: setattr(probe, "__dict__", {"width": -1}),
)
