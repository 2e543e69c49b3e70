"""Events: operators and moves of DTensors for listeners, and the user's line that caused them.

An `Event` is a list of listeners, empty if nothing is observed: the test costs one look at a list. An `Interception`
puts functions around a method of a class; without any, the class has its own method, at no cost.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

__all__ = [
    "LIBRARIES",
    "Event",
    "Interception",
    "decision_made",
    "is_library_file",
    "route_started",
    "scatter_started",
    "tensor_entered",
    "tensor_moved",
    "unobserved",
    "user_frame",
    "user_line",
]


_quiet = threading.local()


@contextlib.contextmanager
def _set_quiet(quiet: bool) -> Iterator[None]:
    before = getattr(_quiet, "on", False)
    _quiet.on = quiet
    try:
        yield
    finally:
        _quiet.on = before


def unobserved() -> contextlib.AbstractContextManager[None]:
    """Inside, listeners receive no events of this thread: the library probes operators.

    Example:
        >>> with tensor_entered.collected() as found, unobserved():
        ...     tensor_entered.notify(1)
        >>> found
        []
    """
    return _set_quiet(True)


class Event(list[Callable[..., None]]):
    """The listeners of one kind of event, called in order."""

    def notify(self, *facts: Any) -> None:
        """Call every listener. A listener that raises prevents the announced action."""
        if getattr(_quiet, "on", False):
            return
        for listener in tuple(self):
            listener(*facts)

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[Any]]:
        """Collect the facts of this thread inside the context, also if `unobserved` is around it.

        Example:
            >>> with tensor_entered.collected() as found:
            ...     tensor_entered.notify(1)
            >>> found
            [1]
        """
        thread, found = threading.get_ident(), []

        def note(fact: Any) -> None:
            if threading.get_ident() == thread:
                found.append(fact)

        self.append(note)
        try:
            with _set_quiet(False):
                yield found
        finally:
            self.remove(note)


route_started = Event()  # a route that communicates is about to run: the route
scatter_started = Event()  # one rank is about to send the others their blocks of a tensor: its spec
decision_made = Event()  # a new signature was resolved: its `Decision`
tensor_moved = Event()  # a DTensor was redistributed: the source and the result
tensor_entered = Event()  # a DTensor was made from a plain tensor: the DTensor


class Interception:
    """Functions around one method of a class, on every thread: `around(run, *args, **kwargs)`, the first outermost.

    Args:
        owner: the class.
        name: its method.
    """

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name, self.original = owner, name, owner.__dict__[name]
        self.function: Callable[..., Any] = getattr(self.original, "__func__", self.original)
        self.is_active = False  # whether anything is put around the method
        self._around: list[Callable[..., Any]] = []

    def add(self, around: Callable[..., Any], *, outermost: bool = False) -> None:
        """Put a function around the method."""
        self._around.insert(0 if outermost else len(self._around), around)
        self._put()

    def remove(self, around: Callable[..., Any]) -> None:
        """Remove a function."""
        self._around.remove(around)
        self._put()

    def _put(self) -> None:
        method: Any = self.original
        self.is_active = bool(self._around)
        if self.is_active:

            @functools.wraps(self.function)
            def intercepted(*args: Any, **kwargs: Any) -> Any:
                return self._run(tuple(self._around), *args, **kwargs)

            kind = type(self.original)
            method = kind(intercepted) if kind in (classmethod, staticmethod) else intercepted
        setattr(self.owner, self.name, method)

    def _run(self, around: tuple[Callable[..., Any], ...], *args: Any, **kwargs: Any) -> Any:
        if not around or getattr(_quiet, "on", False):
            return self.function(*args, **kwargs)
        return around[0](functools.partial(self._run, around[1:]), *args, **kwargs)


# ---------------------------------------------------------------- the user's line

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEMO = os.path.join(_OURS, "demo") + os.sep
LIBRARIES = (_OURS, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, "<")


@functools.lru_cache(maxsize=65536)  # asked for each frame of the stack, for each operator that is recorded
def is_library_file(filename: str) -> bool:
    """Whether a file belongs to this library or to torch, or was made at run time. The demo counts as user code."""
    return filename.startswith(LIBRARIES) and not filename.startswith(_DEMO)


def user_frame(frame: FrameType | None = None, passing: Callable[[FrameType], None] | None = None) -> FrameType | None:
    """The innermost frame of user code; None on a thread without any, such as autograd's.

    Args:
        frame: where to begin; the caller by default.
        passing: called with each frame of a library before it.
    """
    found = frame if frame is not None else sys._getframe(1)
    while found is not None and (is_library_file(found.f_code.co_filename) or _is_generated(found)):
        if passing is not None:
            passing(found)
        found = found.f_back
    return found


def _is_generated(frame: FrameType) -> bool:
    """Whether a compiler has written this code: a file of any name, a module of torch's."""
    return str(frame.f_globals.get("__name__")).startswith("torch._inductor.")


def user_line(frame: FrameType | None = None) -> str:
    """The running line of user code, as `file:line`; "backward" if there is none."""
    found = user_frame(frame if frame is not None else sys._getframe(1))
    return "backward" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"
