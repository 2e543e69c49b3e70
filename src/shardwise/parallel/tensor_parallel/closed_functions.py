"""Closed functions: they use only their arguments, attributes of `self` and functions of torch, and have no effects.

A closed function may run several times without values, and does the same for the same arguments and attributes. It
cannot read a size, an index or a value of a tensor. The test reads bytecode, because running an open function would
already have effects. A function with an unknown instruction or name is open. Sample functions are tested first: if a
result is wrong on this version of Python, all functions count as open.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["closed_globals", "is_constant", "torch_functions"]

MAX_KEPT = 4096
_MISSING = object()
_MODULES = (torch, nn, F, math)
_BUILTINS = frozenset(("abs", "bool", "float", "int", "max", "min", "tuple"))
_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
# Attributes of tensors and torch that depend on no size, index or value, and on no state but the arguments.
_OF_TENSORS = (
    "abs add addmm baddbmm bmm clamp clamp_max clamp_min clone dim div dtype embedding exp float functional gelu half "
    "layer_norm linear log matmul mean mm mul ndim neg nn permute pi pow reciprocal relu rms_norm rsqrt sigmoid silu "
    "sqrt square sub sum t tanh to transpose type_as unsqueeze var"
)
_NAMES = _DTYPES.union(_OF_TENSORS.split())
_OWN = {(module, name): vars(module)[name] for module in _MODULES for name in _NAMES if name in vars(module)}
# Instructions without effects beyond local variables. No loops, subscripts, unpacking, closures, handlers, stores.
_WITHOUT_EFFECTS = (
    "BINARY_OP BUILD_LIST BUILD_TUPLE CACHE CALL CALL_KW COMPARE_OP CONTAINS_OP COPY EXTENDED_ARG IS_OP "
    "JUMP_FORWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP KW_NAMES LIST_EXTEND LOAD_ATTR LOAD_CONST LOAD_FAST "
    "LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL LOAD_METHOD "
    "LOAD_SMALL_INT NOP NOT_TAKEN POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE "
    "POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE POP_TOP PRECALL "
    "PUSH_NULL RESUME RETURN_CONST RETURN_VALUE STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST SWAP TO_BOOL "
    "UNARY_NEGATIVE UNARY_NOT"
)
_INSTRUCTIONS = frozenset(_WITHOUT_EFFECTS.split())


def closed_globals(function: Any) -> Mapping[str, Any] | None:
    """The global names of a closed method with their values, None for names of builtins; None for an open one.

    Example:
        >>> def double(self, x):
        ...     return torch.mul(x, 2)
        >>> def first(self, x):
        ...     return x[0]
        >>> list(closed_globals(double)), closed_globals(first)
        (['torch'], None)
    """
    names = _global_names(function) if _samples_are_right() else None
    if names is None:
        return None
    found = {name: function.__globals__.get(name, _MISSING) for name in names}
    if not all(name in _BUILTINS if value is _MISSING else _is_of_torch(value) for name, value in found.items()):
        return None
    return {name: None if value is _MISSING else value for name, value in found.items()}


def torch_functions(function: Any) -> list[tuple[types.ModuleType, str, Any]]:
    """The attributes of torch's modules that a closed function may read, with torch's own values.

    Example:
        >>> def gated(self, x):
        ...     return torch.mul(x, self.factor)
        >>> torch_functions(gated) == [(torch, "mul", torch.mul)]
        True
    """
    modules = [value for value in (closed_globals(function) or {}).values() if isinstance(value, types.ModuleType)]
    names = function.__code__.co_names
    return [(module, name, _OWN[module, name]) for module in modules for name in names if (module, name) in _OWN]


def is_constant(value: Any) -> bool:
    """Whether a value is immutable and compares by value."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


@functools.lru_cache(MAX_KEPT)
def _global_names(function: Any) -> frozenset[str] | None:
    """The global names that a function reads; None if it is open."""
    if not isinstance(function, types.FunctionType):
        return None
    code, defaults = function.__code__, (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if code.co_freevars or code.co_cellvars or not code.co_varnames or not all(map(is_constant, defaults)):
        return None
    if any(isinstance(each, types.CodeType) for each in code.co_consts):
        return None
    found: set[str] = set()
    loads_self = False  # whether the last instruction has loaded `self`
    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        variables = argument if isinstance(argument, tuple) else (argument,)
        if name not in _INSTRUCTIONS or instruction.argrepr == "[]":  # a subscript, since Python 3.14
            return None
        if name.startswith("STORE_FAST") and code.co_varnames[0] in variables:
            return None
        if name in ("LOAD_ATTR", "LOAD_METHOD") and not loads_self and argument not in _NAMES:
            return None
        if name == "LOAD_GLOBAL":
            found.add(str(argument))
        loads_self = name.startswith("LOAD_FAST") and variables[-1] == code.co_varnames[0]
    return frozenset(found)


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return value in _MODULES
    return any(value is getattr(module, name, _MISSING) for module in (torch, F) for name in _NAMES)


# ---------------------------------------------------------------- samples with known answers


class _Closed:
    """Each function is closed."""

    def linear(self: Any, x: Any) -> Any:
        return F.linear(x, self.weight, self.bias)

    def norm(self: Any, x: Any) -> Any:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype) if self.weight is not None else wide

    def branch(self: Any, x: Any, factor: Any = 2.0) -> Any:
        if (self.flag and not self.other) or x.dim() == 3:
            return -x * math.sqrt(factor)
        return self.inner(x)


class _Open:
    """Each function is open."""

    def subscript(self: Any, x: Any) -> Any:
        return x[0]

    def shape(self: Any, x: Any) -> Any:
        return x / x.size(0)

    def attribute(self: Any, x: Any) -> Any:
        self.count = x
        return x

    def item(self: Any, x: Any) -> Any:
        x[0] = 1
        return x

    def imported(self: Any, x: Any) -> Any:
        import math

        return x * math.pi

    def nested(self: Any, x: Any) -> Any:
        return (lambda: x)()

    def loop(self: Any, x: Any) -> Any:
        for _ in self.parts:
            x = x + 1
        return x

    def unpacked(self: Any, x: Any) -> Any:
        first, second = x
        return first + second

    def context(self: Any, x: Any) -> Any:
        with torch.no_grad():
            return x + 1

    def handler(self: Any, x: Any) -> Any:
        try:
            return x + 1
        except ValueError:
            return x

    def private(self: Any, x: Any) -> Any:
        return x.__dict__

    def default(self: Any, x: Any, options: Any = builtins) -> Any:
        return x if options else x + 1

    def another_self(self: Any, x: Any) -> Any:
        self = x
        return self.shape

    def removed(self: Any, x: Any) -> Any:
        del self.count
        return x


def _methods(owner: type) -> list[Any]:
    return [value for name, value in vars(owner).items() if not name.startswith("__")]


@functools.cache
def _samples_are_right() -> bool:
    return all(_global_names(each) is not None for each in _methods(_Closed)) and not any(
        _global_names(each) is not None for each in _methods(_Open)
    )
