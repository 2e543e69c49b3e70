"""Everything that a function can read: objects reachable from it and its arguments, as a key, tensors and containers.

A program is valid for one key. Tensors are in it by their metadata and layout, other values by value, and objects
without a value by identity. An object that can be neither compared nor identified is listed as a problem, and refused.
"""

from __future__ import annotations

import abc
import collections
import enum
import functools
import gc
import io
import os
import random
import re
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.capture.program_code import (
    attributes_of,
    imported_by,
    is_own_code,
    is_program_code,
    is_standard,
    names_of_code,
)
from shardwise.capture.slots import MISSING, OF_CLASSES, Slots, cell_contents
from shardwise.core.cache import BoundedCache
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import Fabric
from shardwise.fabric.rank_tensor import RankTensor, is_of_ranks, parts_of
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import REMEMBERED
from shardwise.torch_private import OpOverload, OpOverloadPacket

__all__ = ["MAKING_STATES", "Reachable", "global_hooks", "storage_key"]

MAX_OBJECTS = 500_000
MAKING_STATES = ("amsgrad", "centered", "momentum")  # hyperparameters that decide which states an optimizer has
_BY_VALUE: frozenset[type] = frozenset({
    type(None), bool, int, str, bytes, type(...), type(NotImplemented), object, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
})  # fmt: skip
_BY_IDENTITY = (
    DeviceMesh, DTensorSpec, Fabric, Placement, OpOverload, OpOverloadPacket,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.ClassMethodDescriptorType, types.CodeType, type(threading.Lock()), type(threading.RLock()), re.Pattern,
    torch.ScriptObject, torch.finfo, torch.iinfo, types.UnionType, types.GenericAlias,
)  # fmt: skip


def global_hooks() -> list[dict[Any, Any]]:
    """Hooks of all modules and of all optimizers."""
    tables = [*vars(nn_module).items(), *register_optimizer_step_pre_hook.__globals__.items()]
    return [table for name, table in tables if name.startswith("_global_") and isinstance(table, dict)]


def _value_or_default(variable: ContextVar[Any]) -> Any:
    """The value of a ContextVar, or what it was made with; None if it has neither."""
    try:
        return variable.get()
    except LookupError:
        return None


@runtime_checkable
class Stepped(Protocol):
    """An object that changes in a step and is afterwards as before, but for some attributes: a data parallel module's.

    A dict with `between_steps` is known by its contents.
    """

    def between_steps(self) -> Iterable[tuple[Any, tuple[str, ...]]]:
        """Objects with the names of those attributes that a step depends on; all others are caches."""
        ...

    def why_unsettled(self) -> str | None:
        """Why nothing can be recorded from here."""
        ...

    def settle(self) -> None:
        """Drop caches."""
        ...

    def abandon(self) -> None:
        """Give up a step that has failed."""
        ...


class Reachable:
    """All that was reached from some values.

    Args:
        codes: the code of the program that has run so far; other functions are not followed.
            Without `known`, containers and objects are in the key by identity as well.
        tuned: whether the hyperparameters of an optimizer are read when its step runs, and not before.
        known: the objects that have been reached already.
    """

    def __init__(
        self,
        codes: Mapping[types.CodeType, None],
        tuned: Callable[[Any], bool],
        known: Reachable | None = None,
    ) -> None:
        self.by_identity = known is None  # arguments are other containers on each call
        self.codes = codes
        self.tuned = tuned
        self.parts: list[Any] = []  # of the key
        self.tensors: list[torch.Tensor] = []
        self.slots: list[Slots] = []
        self.problems: list[str] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.stepped: list[Stepped] = []
        self.functions: list[types.FunctionType] = []
        self.objects: list[Any] = []
        self.slotted: list[tuple[Any, tuple[str, ...]]] = []  # objects with attributes outside of a dict
        self.generators: list[torch.Generator] = []
        self.cached: list[tuple[Any, int]] = []  # cached functions, each with how often it has run
        self.classes: list[type] = []  # those whose dicts were looked at
        self.states: set[int] = set()  # positions of tensors that only the step of an optimizer uses
        self.known = known
        self._names: frozenset[str] | None = None
        self._module_names: dict[types.ModuleType, frozenset[str]] = {}
        self._memories: dict[int, int] = {}  # of tensors, by their storages
        self._looked_up: list[tuple[dict[str, Any], frozenset[str]]] = []  # global names, also those of builtins
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that identities stay those of the same objects

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of everything that a program depends on."""
        return tuple(self.parts)

    def knows(self, value: Any) -> bool:
        """Whether an object was reached."""
        return id(value) in self._seen

    def position(self, tensor: Any) -> int | None:
        """Where a tensor is among those reached, counted from the first of the known ones."""
        first = self.known.count if self.known is not None else 0
        if self.known is not None and (at := self.known.position(tensor)) is not None:
            return at
        at = self._seen.get(id(tensor))
        return None if at is None or not isinstance(tensor, torch.Tensor) else first + at

    def memory(self, part: torch.Tensor) -> int:
        """A number that tensors in the same memory have in common."""
        storage = storage_key(part)
        if self.known is not None and (found := self.known._memories.get(storage)) is not None:
            return found
        first = len(self.known._memories) if self.known is not None else 0
        return self._memories.setdefault(storage, first + len(self._memories))

    @property
    def count(self) -> int:
        """How many tensors were reached."""
        return len(self.tensors)

    def global_names(self) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
        """Each dict of globals with the names that code looks up in it, whether they are there or not."""
        found: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for slots in self.slots:
            if slots.names is not None and isinstance(slots.holder, dict):
                found.setdefault(id(slots.holder), (slots.holder, set()))[1].update(slots.names)
        for values, names in self._looked_up:
            found[id(values)][1].update(names - _OF_MODULES)
        return [(values, tuple(sorted(names))) for values, names in found.values()]

    def visit(self, value: Any, path: str) -> None:
        """Follow a value."""
        kind = value.__class__
        parts = self.parts
        if kind in _BY_VALUE:
            parts.append(kind)
            parts.append(value)
        elif kind is float:
            parts.append(value.hex())
        elif kind is complex:
            parts.append((value.real.hex(), value.imag.hex()))
        elif kind is slice or kind is range:  # equal ranges may have other ends
            parts.append(kind)
            for end in (value.start, value.stop, value.step):
                self.visit(end, path)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif isinstance(value, tuple):  # named ones and sizes, too
            parts.append((kind, len(value)))
            for at, item in enumerate(value):
                self.visit(item, f"{path}[{at}]")
            if kind is not tuple and getattr(value, "__dict__", None) and not self._again(value):
                self._attributes(value, path)
        elif isinstance(value, _NUMPY_SCALAR):
            parts.append((kind, value.tobytes()))
        elif not self._again(value):
            if isinstance(value, _VALUES):  # a class derived from one: its value is not among its attributes
                self.visit(_plain_value(value), path)
            self._object(value, kind, path)

    def _again(self, value: Any) -> bool:
        """Whether an object was reached before; from now on it was."""
        if self.known is not None and (at := self.known._seen.get(id(value))) is not None:
            self.parts.append(("known", at))
            return True
        at = self._seen.get(id(value))
        if at is None:
            self._seen[id(value)] = len(self._kept)
            self._kept.append(value)
            if self.by_identity:
                self.parts.append(id(value))
            if len(self._kept) > MAX_OBJECTS:
                self.problems.append(f"{MAX_OBJECTS:,} objects")
            return False
        self.parts.append(("again", at))
        return True

    def _object(self, value: Any, kind: type, path: str) -> None:
        """Follow an object that was not reached before."""
        if len(self._kept) > MAX_OBJECTS:
            return
        followed = (
            self._of_the_library(value, kind, path)
            or self._container(value, kind, path)
            or self._callable(value, path)
            or self._with_state(value, path)
        )
        if followed:
            return
        if isinstance(value, _BY_IDENTITY) or kind is object:  # an object without a class of its own is a mark
            self._identity(value)
        elif isinstance(value, types.MappingProxyType):
            self.problems.append(f"{path}, a {kind.__name__}")
        elif (base := _base_in_c(kind)) is not None and base is not kind:
            self.problems.append(f"{path}, of a class derived from {base.__module__}.{base.__qualname__}")
        elif base is None and (hasattr(value, "__dict__") or _slot_names(kind)):
            self._attributes(value, path)
        else:
            self.problems.append(f"{path}, of the type {kind.__module__}.{kind.__qualname__}")

    def _of_the_library(self, value: Any, kind: type, path: str) -> bool:
        """Objects that say themselves what of them is read; whether this is one."""
        if isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, path)
        elif getattr(kind, "is_captured", False):  # it may call one, whose state is not its own
            self.visit(value.function, path)
        elif kind is BoundedCache:  # the contents of a cache change no value
            self._identity(value)
        elif hasattr(kind, "between_steps") and not isinstance(value, dict):
            self._stepped(value, path)
        else:
            return False
        return True

    def _container(self, value: Any, kind: type, path: str) -> bool:
        """Dicts, lists and sets, with attributes where a class has been derived; whether this is one."""
        if isinstance(value, dict):
            self.parts.append((kind, len(value)))
            self.slots.append(Slots(value, path))
            for name, item in value.items():
                shown = repr(name) if isinstance(name, str | int) else f"<{type(name).__name__}>"
                self.visit(name, f"{path}: key {shown}")
                self.visit(item, f"{path}[{shown}]")
            if isinstance(value, collections.defaultdict):
                self.slotted.append((value, ("default_factory",)))
                self.visit(value.default_factory, f"{path}.default_factory")
            if kind not in _PLAIN_DICTS and not hasattr(kind, "between_steps"):
                self._attributes(value, path)
        elif isinstance(value, list | collections.deque):
            self.parts.append((kind, len(value)))
            self.slots.append(Slots(value, path))
            for at, item in enumerate(value):
                self.visit(item, f"{path}[{at}]")
            if kind not in (list, collections.deque):
                self._attributes(value, path)
        elif isinstance(value, set | frozenset):
            self._set(value, kind, path)
        else:
            return False
        return True

    def _callable(self, value: Any, path: str) -> bool:
        """Functions in any wrapping, and classes; whether this is one."""
        if isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self.parts.append("method")
            self.visit(value.__func__, f"{path}.__func__")
            self.visit(value.__self__, f"{path}.__self__")
        elif isinstance(value, functools.partial):
            self.parts.append("partial")
            self.visit(value.func, f"{path}.func")
            self.visit(value.args, f"{path}.args")
            self.visit(value.keywords, f"{path}.keywords")
            self._attributes(value, path)
        elif isinstance(value, type):
            self._class(value, path)
        elif isinstance(value, _CACHED):
            self._identity(value)
            self._results(value, path)
            self._cached(value.__wrapped__, path)
            self._attributes(value, path)
        elif isinstance(value, staticmethod | classmethod):
            self.visit(value.__func__, path)
        elif isinstance(value, property):
            self.parts.append("property")
            for accessor in (value.fget, value.fset):
                self.visit(accessor, path)
            if value.__class__ is not property:
                self._attributes(value, path)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self._identity(value)
            owner = value.__self__
            if not isinstance(owner, types.ModuleType | type | None) and not _is_of_torch(owner):
                self.visit(owner, f"{path}.__self__")
        else:
            return False
        return True

    def _with_state(self, value: Any, path: str) -> bool:
        """Objects by identity with a state that is no attribute; whether this is one."""
        if isinstance(value, weakref.ref):
            self._identity(value)
            self.visit(value(), f"{path}()")
        elif isinstance(value, types.ModuleType):
            self._module(value, self._attribute_names(), path)
        elif isinstance(value, ContextVar):  # its value here and now
            self._identity(value)
            self.slots.append(Slots(value, path))
            self.parts.append(value.get(MISSING) is MISSING)
            self.visit(_value_or_default(value), f"{path}.get()")
        elif isinstance(value, enum.Enum):
            self._identity(value)
            self._attributes(value, path)
        elif isinstance(value, torch.Generator):  # its state is one of those that a step changes
            self._identity(value)
            self.generators.append(value)
        else:
            return False
        return True

    def _identity(self, value: Any) -> None:
        self.parts.append(id(value))

    def _set(self, value: Any, kind: type, path: str) -> None:
        if isinstance(value, set):
            self.slots.append(Slots(value, path))
        self.parts.append((kind, len(value)))
        for item in value:  # in the order in which the function meets them
            self.visit(item, f"an item of {path}")
        if kind not in (set, frozenset):
            self._attributes(value, path)

    def _attributes(self, value: Any, path: str) -> None:
        kind = value.__class__
        self.parts.append("object")
        self.objects.append(value)
        self.visit(kind, f"type({path})")
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self.parts.append(len(held))
            self.slots.append(Slots(held, path))
            for name, item in held.items():
                self.parts.append(name)
                self.visit(item, f"{path}.{name}")
        names = _slot_names(kind)
        if names:
            self.slotted.append((value, names))
            self.slots.append(Slots(value, path, names))
        for name in names:
            self.visit(getattr(value, name, None), f"{path}.{name}")

    def _class(self, value: type, path: str) -> None:
        """A class by identity; for a class of the program also the contents of its dictionary."""
        self._identity(value)
        if type(value) not in _METACLASSES:
            self.visit(type(value), f"type({path})")
        for base in value.__mro__:
            if base is not value:
                self.visit(base, f"{path}.{base.__name__}")
            elif _is_program_class(base):
                self.classes.append(value)
                self.slots.append(Slots(value, path))
                for name, item in list(vars(base).items()):
                    is_own = not name.startswith(OF_CLASSES) or item.__class__ in _NUMBERS_AND_TEXT
                    if isinstance(item, types.FunctionType) or is_own:
                        self.parts.append(name)
                        if _is_descriptor_in_c(item):
                            self._identity(item)
                        else:
                            self.visit(item, f"{path}.{name}")
            elif not base.__flags__ & _IMMUTABLE:
                self._library_class(base, path)

    def _library_class(self, value: type, path: str) -> None:
        """What a program may have put into a class of a library: its `forward`, and attributes by the names in code."""
        held = vars(value)
        self.classes.append(value)
        if isinstance(forward := held.get("forward"), types.FunctionType):
            self._identity(forward)
        for name in sorted(self._attribute_names() & held.keys()):
            item = held[name]
            if item.__class__ in _DATA or (
                isinstance(item, types.FunctionType) and is_program_code(item.__code__.co_filename)
            ):
                self.parts.append(name)
                self.visit(item, f"{path}.{name}")

    def _results(self, value: Any, path: str) -> None:
        """What a cached function of the program keeps: it is read instead of computed, and can change by itself."""
        code = getattr(value.__wrapped__, "__code__", None)
        if code is not None and (is_own_code(code.co_filename) or not is_program_code(code.co_filename)):
            return
        found = results_of_cache(value)
        if found is None:
            self.problems.append(f"{path}, whose results cannot be seen")
            return
        entries, results = found
        misses = value.cache_info().misses  # an entry of a full cache is used again for another result
        self.cached.append((value, misses))
        self.slots.append(Slots(entries, f"the cache of {path}"))
        self._kept += entries.values()
        self.parts.append((misses, *map(id, entries.values())))
        for result in results:
            self.visit(result, f"a result of {path}")

    def _cached(self, function: Any, path: str) -> None:
        """A function whose results are kept, and may have been computed before the first call, so that it never runs.

        All that it reads counts. Objects that cannot be compared do not prevent a program as long as it has not run:
        its results are compared, and it runs again only if they are gone.
        """
        if not isinstance(function, types.FunctionType) or function.__code__ in self.codes or self.knows(function):
            return
        problems = len(self.problems)
        self.visit(function, f"{path}.__wrapped__")
        self._reads(function, path)
        del self.problems[problems:]

    def _function(self, value: types.FunctionType, path: str) -> None:
        code = value.__code__
        self.functions.append(value)
        self._identity(value)
        self._identity(code)
        self._kept.append(code)
        if (inner := getattr(value, "__wrapped__", None)) is not None:
            self.visit(inner, f"{path}.__wrapped__")
        if value.__name__ in _ENVIRONMENT and value.__module__ == "os":
            self.visit(os.environ, "os.environ")
        if not is_program_code(code.co_filename):
            # a wrapper of the standard library or of torch holds functions of the program
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
                held = cell_contents(cell)
                followed = isinstance(held, types.FunctionType | types.MethodType | functools.partial)
                if followed or (held.__class__ is dict and is_standard(code.co_filename)):  # of singledispatch
                    self.visit(held, f"{path}.{name}")
            return
        if code in self.codes:
            self._reads(value, path)
        elif value.__dict__:  # it is no code that runs, but may hold settings
            held = value.__dict__
            self.slots.append(Slots(held, path))
            for name in sorted(self._attribute_names() & held.keys()):
                self.parts.append(name)
                self.visit(held[name], f"{path}.{name}")

    def _reads(self, value: types.FunctionType, path: str) -> None:
        """What a function of the program reads: its attributes, defaults, closure and global names."""
        code = value.__code__
        held = value.__dict__
        self.slots.append(Slots(held, path))
        for name, item in held.items():
            self.parts.append(name)
            self.visit(item, f"{path}.{name}")
        self.visit(value.__defaults__, f"{path}.__defaults__")
        self.visit(value.__kwdefaults__, f"{path}.__kwdefaults__")
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if not self._again(cell):
                self.slots.append(Slots(cell, f"{path}: {name}"))
                held = cell_contents(cell)
                self.visit(None if held is MISSING else held, name)
        names = names_of_code(code)
        self._looked_up.append((value.__globals__, names))
        self._globals(code, value.__globals__, names)
        for module in imported_by(code, value.__globals__.get("__package__")):
            self._module(module, attributes_of(code), module.__name__, is_own_code(code.co_filename))

    def _globals(self, code: types.CodeType, values: dict[str, Any], used: frozenset[str]) -> None:
        """The global names that code may read, and the names of modules."""
        names = tuple(sorted(name for name in used if name in values and name not in _OF_MODULES))
        self.parts.append(names)
        self.slots.append(Slots(values, f"globals of {code.co_name}", names))
        for name in names:
            value = values[name]
            if isinstance(value, types.ModuleType):
                self._module(value, attributes_of(code), name, is_own_code(code.co_filename))
            else:
                self.visit(value, name)

    def functions_of(self, module: types.ModuleType) -> None:
        """All functions of a module by identity: code that is not followed calls them by their names."""
        values = vars(module)
        names = tuple(name for name, item in values.items() if callable(item))
        self.slots.append(Slots(values, module.__name__, names))
        self._kept += [values[name] for name in names]
        self.parts += [id(values[name]) for name in names]

    def _attribute_names(self) -> frozenset[str]:
        """The names that any code of the program uses."""
        if self._names is None:
            if self.known is not None:
                self._names = self.known._attribute_names()
            else:
                self._names = frozenset(chain.from_iterable(map(attributes_of, self.codes)))
        return self._names

    def _module(self, module: types.ModuleType, used: frozenset[str], path: str, by_library: bool = False) -> None:
        """The values of those names of a module that code may read; of a library, only its data."""
        self._identity(module)
        new = used - self._module_names.get(module, frozenset())
        self._module_names[module] = new | self._module_names.get(module, frozenset())
        values = vars(module)
        own = is_program_code(getattr(module, "__file__", None) or "<frozen>")
        if by_library and not own:  # this library reads settings of others where it is documented, and not as state
            return
        names = tuple(sorted(name for name in new if name in values and name not in _OF_MODULES))
        if own and not used.isdisjoint(_ANY_NAME):  # by names that are computed
            names = tuple(sorted({*names, *(name for name, item in values.items() if _is_data(name, item))}))
        if module is os and not _ENVIRONMENT.isdisjoint(names):
            names = (*names, "environ")
        self._kept.append(module)
        self.parts.append(names)
        self.slots.append(Slots(values, path, names))
        for name in names:
            value = values[name]
            if isinstance(value, types.ModuleType):
                self._module(value, used, f"{path}.{name}", by_library)
            elif module is sys and name == "modules":
                self.problems.append("sys.modules")
            elif own or value.__class__ in _DATA or isinstance(value, type) or (module is os and name == "environ"):
                self.visit(value, f"{path}.{name}")
            else:
                self._identity(value)
                self._kept.append(value)

    def _optimizer(self, value: torch.optim.Optimizer, path: str) -> None:
        """Parameters and states; hyperparameters unless they are read by the step itself."""
        self.optimizers.append(value)
        tuned = self.tuned(value)
        self.visit(type(value), f"type({path})")
        held = vars(value)
        self.slots.append(Slots(held, path))
        self.slots.append(Slots(value.param_groups, f"{path}.param_groups"))
        for at, group in enumerate(value.param_groups):
            where = f"{path}.param_groups[{at}]"
            self.visit(group["params"], f"{where}['params']")
            if tuned:
                self.parts += [bool(group.get(name)) for name in MAKING_STATES]
            else:
                self.visit(group, where)
        for name, item in held.items():
            if name != "param_groups" and not (tuned and name == "defaults"):
                self.parts.append(name)
                first = len(self.tensors)
                self.visit(item, f"{path}.{name}")
                if name == "state" and tuned:
                    self.states.update(range(first, len(self.tensors)))

    def _stepped(self, value: Stepped, path: str) -> None:
        self.stepped.append(value)
        if (why := value.why_unsettled()) is not None:
            self.problems.append(f"{path}, of a data parallel module: {why}")
        for owner, names in value.between_steps():
            self._named(owner, names, f"{path}: {type(owner).__name__}")

    def _named(self, value: Any, names: tuple[str, ...], path: str) -> None:
        """Some attributes of an object."""
        held = vars(value)
        self._kept.append(value)
        self.slots.append(Slots(held, path, names))
        for name in names:
            self.visit(held[name], f"{path}.{name}")

    def _tensor(self, value: Any, path: str) -> None:
        if self.known is not None and (at := self.known._seen.get(id(value))) is not None:
            self.parts.append(("known tensor", at))
            return
        at = self._seen.get(id(value))
        if at is not None:
            self.parts.append(("tensor", at))
            return
        self._seen[id(value)] = len(self.tensors)
        self.tensors.append(value)
        kind = value.__class__
        if value.grad_fn is not None:
            self.problems.append(f"{path}, a tensor that autograd computed outside")
            return
        if kind is DTensor:
            if value._copied_view is not None:
                self.problems.append(f"{path}, a view of a DTensor that shares no memory with it")
            self.parts += (kind, value._spec, value.requires_grad, value.is_inference())
        elif kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, RankTensor):
            self.parts += (kind, value.requires_grad, value.is_inference())
        else:
            self.problems.append(f"{path}, a tensor of the class {kind.__name__}")
            return
        for part in parts_of(value._local_tensor if kind is DTensor else value):
            if part.layout is not torch.strided or part.is_conj() or part.is_neg() or part.__class__ not in _PLAIN:
                self.problems.append(f"{path}, a tensor that is not simply strided")
                return
            self.parts.append((part.dtype, part.device, part.shape, part.stride(), part.storage_offset()))
            self.parts.append(self.memory(part))
        self.visit(value.grad, f"{path}.grad")
        self.visit(value._backward_hooks, f"{path}: hooks")
        self.visit(getattr(value, "_post_accumulate_grad_hooks", None), f"{path}: hooks after accumulation")
        slots = Slots(value.__dict__, path, caches=_CACHES_OF_RANKS if is_of_ranks(value) else REMEMBERED)
        self.slots.append(slots)
        for name, item in slots.before.items():
            self.parts.append(name)
            self.visit(item, f"{path}.{name}")


_PLAIN_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta)
_CACHED: Any = type(functools.lru_cache(lambda: None))
_CACHES_OF_RANKS = (*REMEMBERED, "tensors")
_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "import_module", "hasattr", "attrgetter"})
_VALUES = (int, float, complex, str, bytes)
_NUMBERS_AND_TEXT = frozenset({*_BY_VALUE, float, complex})
_DATA = frozenset({*_NUMBERS_AND_TEXT, list, tuple, dict, set, frozenset})
_ENVIRONMENT = frozenset({"getenv", "getenvb", "environb"})
_OF_MODULES = frozenset({  # names that Python itself keeps in modules
    "__builtins__", "__spec__", "__loader__", "__cached__", "__file__", "__name__", "__package__", "__path__",
    "__doc__", "__annotations__", "__dict__", "__class__",
})  # fmt: skip
# Classes in C whose contents are followed, or whose functions are refused where they are called.
_SHOWN: tuple[type, ...] = (
    *_VALUES, tuple, list, dict, set, frozenset, collections.deque, BaseException, types.ModuleType, threading.local,
    io.IOBase.__mro__[1], random.Random.__mro__[1],
)  # fmt: skip
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_NUMPY_SCALAR = np.generic


def _plain_value(value: Any) -> Any:
    """The number or text that an object of a derived class is."""
    kind: Any = next(base for base in _VALUES if isinstance(value, base))
    own: dict[Any, Callable[[Any], Any]] = {
        int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__, bytes: bytes,
    }  # fmt: skip
    return own[kind](value)


def _is_of_torch(owner: Any) -> bool:
    """Whether this is an object that torch made in C++, or what pybind11 keeps of a function."""
    kind = type(owner)
    from_torch = kind.__module__.startswith(("torch.", "pybind11")) and not isinstance(owner, torch.Tensor)
    return from_torch or kind.__name__ == "PyCapsule"


def _is_descriptor_in_c(value: Any) -> bool:
    """Whether an attribute of a class is computed by code that is no Python, from what cannot be seen."""
    kind = type(value)
    if not hasattr(kind, "__get__") or isinstance(value, (*_FOLLOWED, _CACHED)):
        return False
    return not any(isinstance(vars(base).get("__get__"), types.FunctionType) for base in kind.__mro__)


def _is_data(name: str, value: Any) -> bool:
    return name not in _OF_MODULES and value.__class__ in _DATA


def _is_program_class(kind: type) -> bool:
    """Whether a class is the program's, by its module or by its methods."""
    module = sys.modules.get(kind.__module__)
    if module is not None and kind.__module__ != "builtins":
        file = getattr(module, "__file__", None)
        if kind.__module__ == "__main__" or (file is not None and is_program_code(file)):
            return True
    functions = [item for item in vars(kind).values() if isinstance(item, types.FunctionType)]
    return any(is_program_code(function.__code__.co_filename) for function in functions)


def results_of_cache(function: Any) -> tuple[dict[Any, Any], list[Any]] | None:
    """The dict in which `functools.cache` or `lru_cache` keeps the results of a function, and these in its order.

    Python shows both to its garbage collector alone. A bounded cache holds its results in links: the collector is given
    key and result of each, in the order of their last use.

    Returns:
        None if they are not found where they should be.

    Example:
        >>> cached = functools.lru_cache(lambda name: [name])
        >>> _ = cached("a"), cached("b"), cached("a")
        >>> results_of_cache(cached)[1]
        [['a'], ['b']]
    """
    info, referents = function.cache_info(), gc.get_referents(function)
    is_bounded = info.maxsize is not None
    for entries in referents:
        if entries.__class__ is not dict or entries is function.__dict__ or len(entries) != info.currsize:
            continue
        if not is_bounded:
            return entries, list(entries.values())
        if all(type(each).__name__ == "_lru_list_elem" for each in entries.values()):
            break
    else:
        return None
    keys, found, at = set(map(id, entries)), dict[int, Any](), 0
    while at + 1 < len(referents) and len(found) < len(keys):
        if id(referents[at]) in keys:
            found[id(referents[at])] = referents[at + 1]
            at += 1
        at += 1
    return (entries, [found[id(key)] for key in entries]) if len(found) == len(keys) else None


def storage_key(part: torch.Tensor) -> int:
    """What tensors in the same memory have in common, as long as it is alive."""
    return part.untyped_storage()._cdata


_FOLLOWED = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, torch.Tensor)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@functools.cache
def _slot_names(kind: type) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        own = [names] if isinstance(names, str) else list(names)
        found += [_mangled(base, name) for name in own if name not in ("__dict__", "__weakref__")]
    return (*found, "args") if issubclass(kind, BaseException) else tuple(found)


@functools.cache
def _base_in_c(kind: type) -> type | None:
    """The class in C, of this one and its bases, whose objects hold more than attributes: a state that nobody can see.

    Such objects are larger than what Python adds for attributes.
    """
    for base in kind.__mro__[:-1]:
        if base.__module__.startswith("torch.") or issubclass(base, _SHOWN):
            continue
        parent: Any = base.__base__
        names = vars(base).get("__slots__", ())
        own = [names] if isinstance(names, str) else [name for name in names if name not in ("__dict__", "__weakref__")]
        added = len(own)
        added += bool(base.__weakrefoffset__) and not parent.__weakrefoffset__
        added += base.__dictoffset__ > 0 and not parent.__dictoffset__
        if base.__basicsize__ - parent.__basicsize__ > added * _POINTER:
            return base
    return None


_POINTER = struct.calcsize("P")


def _mangled(kind: type, name: str) -> str:
    """The name under which Python keeps a private attribute."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
