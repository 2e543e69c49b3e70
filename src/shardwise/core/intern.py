"""Hash-consing: equal values are one object, so equality is identity and the hash is that of the pointer."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch

from shardwise.core.opaque import ConstantMeta
from shardwise.core.symbolic import has_symbols, known_value, named

__all__ = ["Interned", "pool_size"]

# One pool for all classes. Weak, so that layouts of sizes seen once are freed. Backward runs on other
# threads, so creation is locked, re-entrantly: a value may be derived from others. A hit is not:
# WeakValueDictionary.get is safe to race.
_pool: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
_lock = threading.RLock()


class Interned(metaclass=ConstantMeta):
    """Base of the immutable data classes: `a == b` exactly when `a is b`.

    A subclass lists its fields in `_fields` (also in `__slots__`), normalizes its arguments in `__new__` and
    ends with `return cls._intern(*fields)`. Other slots have values derived from the fields, computed in `_derive` or
    on first use.
    """

    __slots__ = ("__weakref__",)
    _fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def _intern(cls, *values: Any) -> Self:
        key = (cls, *values)
        try:
            found = _pool.get(key)
        except TypeError:  # symbolic sizes cannot be hashed; their names can
            values = tuple([_known_values(value) for value in values])
            key = (cls, *named(values))
            found = _pool.get(key)
        if found is None:
            with _lock:
                found = _pool.get(key)
                if found is None:
                    found = object.__new__(cls)
                    for name, value in zip(cls._fields, values, strict=True):
                        object.__setattr__(found, name, value)
                    found._derive()
                    _pool[key] = found
        return found

    def _derive(self) -> None:
        """Fill the slots that follow from the fields."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}; make a new one instead")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, name) for name in self._fields)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """Source code that rebuilds this value, and the values of the names in it; called by torch's compiler."""
        make, arguments = self.__reduce__()
        meanings: dict[str, Any] = {make.__name__: make}
        return f"{make.__name__}({', '.join([_in_code(value, meanings) for value in arguments])})", meanings


def _known_values(value: Any) -> Any:
    """A sequence of sizes with plain numbers for symbolic sizes of known value."""
    if isinstance(value, tuple | list) and has_symbols(value):
        return type(value)([known_value(size) for size in value])
    return value


def _in_code(value: Any, meanings: dict[str, Any]) -> str:
    if isinstance(value, Interned):
        text, more = value.__fx_repr__()
        meanings.update(more)
        return text
    if isinstance(value, torch.dtype):
        meanings["torch"] = torch
        return repr(value)
    if isinstance(value, tuple | list):
        items = [_in_code(item, meanings) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    return repr(value)


def pool_size() -> int:
    """The number of interned values that are alive.

    Example:
        >>> pool_size() >= 0
        True
    """
    return len(_pool)
