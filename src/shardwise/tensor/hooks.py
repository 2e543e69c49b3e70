"""Who looks at what happens to DTensors: a watcher is told of all of it, a recorder stands before every operator.

The class is known only as what has a `__torch_dispatch__`, which is replaced while somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from shardwise.errors import UnsupportedError

__all__ = ["Watcher", "entered", "record", "unrecorded", "watch", "watchable", "watcher"]


@runtime_checkable
class Watcher(Protocol):
    """Whoever looks at all that happens to DTensors."""

    def operator(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
        """An operator is called: `run(op, args, kwargs)` carries it out."""
        ...

    def moved(self, source: Any, result: Any) -> None:
        """A DTensor was laid out otherwise."""
        ...

    def entered(self, tensor: Any) -> None:
        """A DTensor was made of what is no DTensor."""
        ...


class _Watched(NamedTuple):
    """The class that is looked at, its own dispatch, and what runs an operator."""

    tensor_class: Any
    ordinary: Any
    run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


_AnyTensor = TypeVar("_AnyTensor")
_watched: _Watched
watcher: Watcher | None = None  # who looks now; read by those who have something to tell
_recorder: Callable[..., Any] | None = None


def watchable(tensor_class: type, run: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
    """Let operators on this class be looked at: `run(op, args, kwargs)` carries one out."""
    global _watched
    _watched = _Watched(tensor_class, tensor_class.__dict__["__torch_dispatch__"], run)


def _watched_dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    if watcher is None:  # it has gone since, while another thread came here
        return _watched.run(func, args, kwargs or {})
    return watcher.operator(func, args, kwargs or {}, _watched.run)


def watch(by: Watcher | None) -> None:
    """From now on let this watcher look, in every thread; None: nobody. Operators pay nothing while nobody does."""
    global watcher
    if by is not None and watcher is not None:
        raise UnsupportedError("DTensors are watched already", hint="leave the first parity() before a second one")
    watcher = by
    _put_dispatch()


def record(recorder: Callable[..., Any] | None) -> None:
    """From now on operators go to `recorder(cls, func, types, args, kwargs)`, in every thread; None: as they did.

    It stands before whoever watches, and runs them by `unrecorded`.
    """
    global _recorder
    _recorder = recorder
    _put_dispatch()


def unrecorded(func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    """Run an operator as if nobody recorded."""
    below = _watched.ordinary.__func__ if watcher is None else _watched_dispatch
    return below(_watched.tensor_class, func, types, args, kwargs)


def is_observed() -> bool:
    """Whether somebody is told of every operator."""
    return watcher is not None or _recorder is not None


def _put_dispatch() -> None:
    above = _recorder or (None if watcher is None else _watched_dispatch)
    _watched.tensor_class.__torch_dispatch__ = _watched.ordinary if above is None else classmethod(above)


def entered(tensor: _AnyTensor) -> _AnyTensor:
    """`tensor`, of which whoever watches is told that it was made of what is no DTensor."""
    if watcher is not None:
        watcher.entered(tensor)
    return tensor
