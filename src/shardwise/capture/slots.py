"""The contents of containers: read, compared, and put back."""

from __future__ import annotations

import collections
import operator
import types
from contextvars import ContextVar
from typing import Any

__all__ = ["MISSING", "OF_CLASSES", "Slots", "cell_contents"]

MISSING: Any = object()
OF_CLASSES = ("__", "_abc_")  # names that Python itself keeps in classes


class Slots:
    """The contents of one container: read, compared by identity, and written back.

    Args:
        holder: a dict, list, set or class, a cell, a variable of a context, or an object with slots.
        path: how it was reached.
        names: those that count, of a dict or an object; None for all of them.
        caches: names of a dict that do not count.
    """

    __slots__ = ("before", "caches", "holder", "names", "path")

    def __init__(
        self, holder: Any, path: str, names: tuple[str, ...] | None = None, caches: tuple[str, ...] = ()
    ) -> None:
        self.holder = holder
        self.path = path
        self.names = names
        self.caches = caches
        self.before = self.now()

    def now(self) -> Any:
        """A copy of the contents."""
        holder = self.holder
        if self.names is not None:
            if isinstance(holder, dict):
                return {name: holder.get(name, MISSING) for name in self.names}
            return {name: getattr(holder, name, MISSING) for name in self.names}
        if isinstance(holder, types.CellType):
            return {"": cell_contents(holder)}
        if isinstance(holder, ContextVar):
            return {"": holder.get(MISSING)}
        if isinstance(holder, type):
            return {name: item for name, item in vars(holder).items() if not name.startswith(OF_CLASSES)}
        if isinstance(holder, dict):
            if self.caches:
                return {name: value for name, value in holder.items() if name not in self.caches}
            return dict(holder)
        if isinstance(holder, set):
            return set(holder)
        return list(holder)

    def is_same(self, after: Any) -> bool:
        """Whether contents are those of before, object by object and in the same order."""
        before = self.before
        if isinstance(before, set):
            return before == after
        if len(before) != len(after):
            return False
        if isinstance(before, dict):
            same_keys = all(
                a is b or (a.__class__ is b.__class__ is str and a == b) for a, b in zip(before, after, strict=False)
            )
            return same_keys and all(map(operator.is_, before.values(), after.values()))
        return all(map(operator.is_, before, after))

    def put(self, contents: Any) -> None:
        """Make these the contents."""
        holder = self.holder
        if isinstance(holder, types.CellType):
            if contents[""] is not MISSING:
                holder.cell_contents = contents[""]
        elif isinstance(holder, ContextVar):
            if contents[""] is not MISSING:  # one that had no value cannot be put back: it has no token of that moment
                holder.set(contents[""])
        elif isinstance(holder, type):
            now = self.now()
            for name in now.keys() - contents.keys():
                delattr(holder, name)
            for name, item in contents.items():
                if now.get(name, MISSING) is not item:
                    setattr(holder, name, item)
        elif self.names is not None and isinstance(holder, dict):
            holder.update({name: value for name, value in contents.items() if value is not MISSING})
        elif self.names is not None:
            for name, value in contents.items():
                if value is not MISSING:
                    object.__setattr__(holder, name, value)  # of frozen ones, too
                elif hasattr(holder, name):
                    object.__delattr__(holder, name)
        elif self.caches:
            for name in self.now().keys() - contents.keys():
                del holder[name]
            holder.update(contents)
        elif isinstance(holder, list):
            holder[:] = contents
        elif isinstance(holder, collections.deque):
            holder.clear()
            holder.extend(contents)
        else:
            holder.clear()
            holder.update(contents)


def cell_contents(cell: types.CellType) -> Any:
    """The value of a closure cell; MISSING if the name is not bound."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
