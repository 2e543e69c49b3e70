"""States as nested dicts, lists and tuples: their values by dotted names, and the same state with other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["named_values", "with_values"]


def named_values(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a state with their names.

    Example:
        >>> list(named_values({"a": 1, "b": {"c": [2, 3]}}))
        [('a', 1), ('b.c.0', 2), ('b.c.1', 3)]
    """
    for name, value in _items(state):
        path = f"{prefix}.{name}" if prefix else str(name)
        if _items(value) is None:
            yield path, value
        else:
            yield from named_values(value, path)


def with_values(state: Any, replace: Callable[[str, Any], Any], prefix: str = "") -> Any:
    """The same state, every value of which is `replace(name, value)`.

    Example:
        >>> with_values({"a": 1, "b": (2, 3)}, lambda name, value: f"{name}={value}")
        {'a': 'a=1', 'b': ('b.0=2', 'b.1=3')}
    """
    items = _items(state)
    if items is None:
        return replace(prefix, state)
    made = [(name, with_values(value, replace, f"{prefix}.{name}" if prefix else str(name))) for name, value in items]
    return dict(made) if isinstance(state, Mapping) else type(state)(value for _, value in made)


def _items(state: Any) -> Any:
    """The names and values of a dict, list or tuple; None for any other value."""
    if isinstance(state, Mapping):
        return state.items()
    return list(enumerate(state)) if type(state) in (list, tuple) else None
