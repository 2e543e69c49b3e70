"""Custom operators of scripts whose ranks are threads of one process.

torch has one table of operators for a process. A name that is defined again ends the earlier operator in C++, and a
rank that still calls it would crash. So the first rank that defines a name makes the operator for all, and a call runs
the function that the calling rank has given: the kernels, the formulas of autograd and vmap, the shapes of results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.errors import UnsupportedError

__all__ = ["operators_of_ranks"]

Function = Callable[..., Any]
Key = tuple[str, object]  # an operator, and which of its functions


class _Functions:
    """The functions that ranks have given to their operators."""

    def __init__(self, running: Callable[[], int | None]) -> None:
        self._running: Callable[[], int | None] = running
        self._given: dict[Key, dict[int | None, Function]] = {}

    def of_ranks(self, name: str, kind: object, fn: Function) -> Function:
        """Take the running rank's function; returns one that calls that of the rank that calls it."""
        self._given.setdefault((name, kind), {})[self._running()] = fn

        def of_rank(*args: Any, **kwargs: Any) -> Any:
            return self._chosen(name, kind)(*args, **kwargs)

        named = functools.update_wrapper(of_rank, fn)
        del named.__dict__["__wrapped__"]  # torch keeps this function after the program has ended
        return named

    def has(self, name: str, kind: object) -> bool:
        """Whether a rank has given this function."""
        return (name, kind) in self._given

    def forget(self, name: str) -> None:
        """Drop what the running rank has given to an operator, which it defines again."""
        for (owner, _), own in self._given.items():
            if owner == name:
                own.pop(self._running(), None)

    def _chosen(self, name: str, kind: object) -> Function:
        own, rank = self._given.get((name, kind), {}), self._running()
        if rank in own:
            return own[rank]
        if len(own) == 1 and rank not in self._given.get((name, "kernel"), {}):
            return next(iter(own.values()))  # modules that ranks share define it once
        if not own:
            raise UnsupportedError(
                f"the operator {name} was defined by a program that has ended",
                hint="define it again where it is used now",
            )
        raise UnsupportedError(
            f"the operator {name}: rank {rank} has not given it a function ({kind}), and ranks {sorted(own, key=str)} "
            "have",
            hint="ranks that are threads share their operators: define it alike on each",
        )

    def end(self) -> None:
        """Drop the functions of the program, which would keep its variables alive; those of shared modules stay."""
        self._running = lambda: None
        for own in self._given.values():
            left = [fn for fn in own.values() if _is_of_live_module(fn)]
            own.clear()
            own.update(dict.fromkeys([None], left[0]) if left else {})


def _is_of_live_module(fn: Function) -> bool:
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    return module is not None and getattr(fn, "__globals__", None) is vars(module)


@contextlib.contextmanager
def operators_of_ranks(running: Callable[[], int | None]) -> Iterator[None]:
    """Let ranks define the same operators with `torch.library`. `running()`: the rank that runs now."""
    functions = _Functions(running)
    made: dict[str, tuple[str, Any]] = {}  # by name: what it was defined as, and the operator
    before = {name: getattr(torch.library, name) for name in ("custom_op", "triton_op", "impl")}
    torch.library.custom_op = functools.partial(_custom_op, functions, made, before["custom_op"])
    torch.library.triton_op = functools.partial(_custom_op, functions, made, before["triton_op"])
    torch.library.impl = functools.partial(_impl, functions, before["impl"])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.library, name, value)
        functions.end()


def _custom_op(
    functions: _Functions,
    made: dict[str, tuple[str, Any]],
    define: Function,
    name: str,
    fn: Function | None = None,
    /,
    *,
    mutates_args: Any,
    **options: Any,
) -> Any:
    """`torch.library.custom_op` or `triton_op` on the running rank."""
    if fn is None:
        return functools.partial(_custom_op, functions, made, define, name, mutates_args=mutates_args, **options)
    options = {option: value for option, value in options.items() if value is not None}
    schema = options.get("schema")
    form = schema or torch.library.infer_schema(fn, mutates_args=mutates_args, tags=options.get("tags", ()))
    if left := {option: value for option, value in options.items() if option != "schema"}:
        form = f"{form} with {left}"
    if made.setdefault(name, (form, None))[0] != form:
        raise UnsupportedError(
            f"custom operator {name}: defined as {made[name][0]} before, and as {form} now",
            hint="ranks that are threads share their operators: define it alike on each, and once",
        )
    functions.forget(name)
    kernel: Any = functions.of_ranks(name, "kernel", fn)
    if made[name][1] is None:
        if schema is None:
            kernel.__signature__ = inspect.signature(fn, eval_str=True)  # torch infers the schema from it
        operator = define(name, kernel, mutates_args=mutates_args, **options)
        _register_for_each_rank(functions, name, operator)
        made[name] = form, operator
    return made[name][1]


def _register_for_each_rank(functions: _Functions, name: str, operator: Any) -> None:
    """Let what a rank registers at an operator be of this rank alone."""
    autograd, fake, kernel = operator.register_autograd, operator.register_fake, operator.register_kernel
    dispatch, vmap = operator.register_torch_dispatch, operator.register_vmap

    def register_autograd(backward: Function, /, *, setup_context: Function | None = None) -> None:
        context = setup_context or (lambda *args, **kwargs: None)
        autograd(
            functions.of_ranks(name, "backward", backward),
            setup_context=functions.of_ranks(name, "setup_context", context),
        )

    def register_fake(fn: Function, /) -> Function:
        fake(functions.of_ranks(name, "fake", fn))
        return fn

    def register_kernel(device_types: Any, fn: Function | None = None, /) -> Function:
        if fn is None:
            return functools.partial(register_kernel, device_types)
        for device_type in _each(device_types):
            kernel(device_type, functions.of_ranks(name, f"kernel of {device_type}", fn))
        return fn

    def register_torch_dispatch(kind: type, fn: Function | None = None, /) -> Function:
        if fn is None:
            return functools.partial(register_torch_dispatch, kind)
        dispatch(kind, functions.of_ranks(name, kind, fn))
        return fn

    def register_vmap(fn: Function | None = None, /) -> Function:
        if fn is None:
            return register_vmap
        vmap(functions.of_ranks(name, "vmap", fn))
        return fn

    for function in (register_autograd, register_fake, register_kernel, register_torch_dispatch, register_vmap):
        setattr(operator, function.__name__, function)


def _impl(functions: _Functions, register: Function, op: Any, types: Any, func: Any = None, *, lib: Any = None) -> Any:
    """`torch.library.impl` on the running rank: the kernel of an operator that is defined by its schema."""
    if not isinstance(op, str):  # the form of a library, in which torch refuses a second kernel
        return register(op, types) if func is None else register(op, types, func)
    if func is None:
        return functools.partial(_impl, functions, register, op, types, lib=lib)
    for device_type in _each(types):
        kind = f"implementation for {device_type}"
        is_new = not functions.has(op, kind)
        kernel = functions.of_ranks(op, kind, func)
        if is_new:
            register(op, device_type, kernel, lib=lib)
    return None


def _each(types: Any) -> tuple[Any, ...]:
    return (types,) if types is None or isinstance(types, str) else tuple(types)
