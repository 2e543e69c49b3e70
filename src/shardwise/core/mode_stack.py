"""Modes: values that are active between entering a context and leaving it.

An entry belongs to the thread, or the asyncio task, that made it, and to every backward that it starts, on any thread
of autograd: torch copies its thread-local objects to those threads. Leaving a context ends its own entry, at any depth
of the stack and on any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from shardwise.errors import UnsupportedError
from shardwise.torch_private import has_thread_object, keep_thread_object, thread_object

__all__ = ["Entry", "ModeContext", "ModeStack", "entries_in_force", "live_entries", "mode_context"]

T = TypeVar("T")
Given = ParamSpec("Given")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_KEY = "shardwise_modes"


def _counts_references() -> bool:
    """Whether torch counts its reference to a stashed object. Old versions do not, but release one at the end."""
    probe = object()
    before = sys.getrefcount(probe)
    keep_thread_object("shardwise_probe", probe)
    counts = sys.getrefcount(probe) > before
    if not counts:
        _keep(probe)
    return counts


def _keep(value: object) -> None:
    """Add a reference to `value`, which torch will release."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_COUNTED = _counts_references()


class Entry(Generic[T]):
    """One entry of one mode: active until it is left."""

    __slots__ = ("live", "mode", "value")

    def __init__(self, mode: ModeStack[T], value: T) -> None:
        self.mode, self.value, self.live = mode, value, True


Entries = tuple[Entry[Any], ...]


class _Stashed(NamedTuple):
    """The entries of a thread, stored for the threads of its backward."""

    thread: int
    entries: Entries  # all that are active on it
    base: Entries  # those that it inherited from another


_entered: ContextVar[Entries] = ContextVar("shardwise_modes", default=())
live_entries: dict[Entry[Any], None] = {}  # on all threads, in the order in which they were entered


def _base(thread: int) -> Entries:
    """The entries that this thread inherits from the one whose backward it runs."""
    if not has_thread_object(_KEY):
        return ()
    stashed: _Stashed = thread_object(_KEY)
    return stashed.base if stashed.thread == thread else stashed.entries


def entries_in_force() -> list[Entry[Any]]:
    """The active entries of all modes, the innermost last.

    Example:
        >>> entries_in_force()
        []
    """
    if not live_entries:
        return []
    return [entry for entry in (*_base(threading.get_ident()), *_entered.get()) if entry.live]


def _put(entries: Entries) -> None:
    """Make these the entries of this thread or task."""
    thread = threading.get_ident()
    base = tuple([entry for entry in _base(thread) if entry.live])
    _entered.set(entries)
    stashed = _Stashed(thread, (*base, *entries), base)
    if not _COUNTED:
        _keep(stashed)
    keep_thread_object(_KEY, stashed)


class ModeStack(Generic[T]):
    """The entries of one mode, each with a value.

    Example:
        >>> colour = ModeStack[str]("colour")
        >>> red, blue = colour.enter("red"), colour.enter("blue")
        >>> colour.leave(red)
        >>> colour.values()
        ['blue']
        >>> colour.leave(blue)
        >>> colour.values()
        []
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"ModeStack({self.name!r})"

    def enter(self, value: T) -> Entry[T]:
        """Put an entry on top, for this thread or task and the backward it starts."""
        entry = Entry(self, value)
        live_entries[entry] = None
        _put((*[other for other in _entered.get() if other.live], entry))
        return entry

    def leave(self, entry: Entry[T]) -> None:
        """End this entry; others are unchanged."""
        entry.live = False
        live_entries.pop(entry, None)
        _put(tuple([other for other in _entered.get() if other.live]))

    @contextlib.contextmanager
    def holding(self, value: T) -> Iterator[T]:
        """Inside, `value` is active."""
        entry = self.enter(value)
        try:
            yield value
        finally:
            self.leave(entry)

    def values(self) -> list[T]:
        """The active values, the innermost last."""
        return [entry.value for entry in entries_in_force() if entry.mode is self] if live_entries else []

    def values_anywhere(self) -> list[T]:
        """The values that are active on any thread, in the order in which they were entered."""
        return [entry.value for entry in tuple(live_entries) if entry.mode is self]


# ---------------------------------------------------------------- contexts

_opened: ContextVar[tuple[tuple[Any, Any], ...]] = ContextVar("shardwise_contexts", default=())  # with their managers


def _uncompiled(function: AnyFunction) -> AnyFunction:
    """Break the graph at this function: a compiler that simulates a mode would trace the code inside without it."""
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]  # of torch.compiler.disable
    function._torchdynamo_disable_msg = "modes of Shardwise are entered outside of compiled code"  # pyright: ignore[reportFunctionMemberAccess]
    return function


class ModeContext(Generic[T]):
    """A context that can be entered any number of times, also before it is left, and that decorates functions.

    `_run` is written as for `contextlib.contextmanager`.
    """

    def _run(self) -> Generator[T, None, None]:
        raise NotImplementedError

    @_uncompiled
    def __enter__(self) -> T:
        manager = contextlib.contextmanager(self._run)()
        value = manager.__enter__()
        self.__dict__.setdefault("_open", []).append(manager)
        _opened.set((*_opened.get(), (self, manager)))
        return value

    @_uncompiled
    def __exit__(self, *error: Any) -> bool | None:
        # the last one opened on this thread; one that was entered on another thread or task is in the list of that one
        still = self.__dict__.get("_open", [])
        here = [manager for context, manager in _opened.get() if context is self and manager in still]
        if not still:
            raise RuntimeError(f"{self!r} is left, but was not entered")
        manager = (here or still)[-1]
        still.remove(manager)
        _opened.set(tuple([pair for pair in _opened.get() if pair[1] is not manager]))
        return manager.__exit__(*error)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """`function`, whose body runs inside this context."""
        if inspect.isasyncgenfunction(function):
            raise UnsupportedError(f"{function} cannot be decorated with a mode", hint="use the mode inside, by `with`")
        if inspect.iscoroutinefunction(function):
            inside = self._around_coroutine(function)
        elif inspect.isgeneratorfunction(function):
            inside = self._around_generator(function)
        else:
            inside = self._around_call(function)
        return functools.wraps(function)(inside)  # pyright: ignore[reportReturnType]

    def _around_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside

    def _around_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return (yield from function(*args, **kwargs))

        return inside

    def _around_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return inside


class _OfFunction(ModeContext[T]):
    def __init__(self, function: Callable[..., Iterator[T]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    def __repr__(self) -> str:
        return f"{self._function.__name__}()"

    def _run(self) -> Generator[T, None, None]:
        yield from self._function(*self._args, **self._kwargs)


def mode_context(function: Callable[Given, Iterator[T]]) -> Callable[Given, ModeContext[T]]:
    """As `contextlib.contextmanager`, for modes: see ModeContext.

    Example:
        >>> colour = ModeStack[str]("colour")
        >>> @mode_context
        ... def painted(value):
        ...     with colour.holding(value):
        ...         yield
        >>> red = painted("red")
        >>> with red, red:
        ...     colour.values()
        ['red', 'red']
        >>> red(colour.values)()
        ['red']
    """

    @_uncompiled
    def context(*args: Any, **kwargs: Any) -> Any:
        return _OfFunction(function, args, kwargs)

    functools.update_wrapper(context, function)
    context.__annotations__ = {**function.__annotations__, "return": ModeContext}  # the generator's is not its own
    return context
