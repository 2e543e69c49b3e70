"""The fast guard of a captured function: whether everything that it can read is, object by object, unchanged.

If something has changed, everything reachable is followed again. That takes milliseconds and may find the same program.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch

from shardwise.capture.dict_versions import DictVersions, dict_of_class, names_of, table_of, versions_are_right
from shardwise.capture.program_code import is_own_code
from shardwise.capture.reachable import MAKING_STATES, Reachable, storage_key
from shardwise.capture.slots import MISSING, cell_contents
from shardwise.capture.snapshot import local_of
from shardwise.fabric.rank_tensor import RankTensor, parts_of
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import REMEMBERED
from shardwise.torch_private import DisableTorchFunctionSubclass

__all__ = ["Binding", "arguments_key", "identity_checks"]

WARM = 16  # calls after which comparisons are worth compiling
_GEOMETRY = operator.attrgetter("shape", "dtype", "device")


def identity_checks(checks: Iterable[tuple[str, tuple[Any, ...]]]) -> Callable[[], bool]:
    """A function that makes all these comparisons, without a loop: Python specializes each of them.

    Args:
        checks: expressions with `{}` in place of objects, and the objects.

    Example:
        >>> items = [1]
        >>> holds = identity_checks([("len({}) == 1", (items,)), ("{}[0] is {}", (items, items[0]))])
        >>> holds()
        True
        >>> items[0] = "other"
        >>> holds()
        False
    """
    names: dict[str, Any] = {}
    known: dict[int, str] = {}

    def named(value: Any) -> str:
        if value is None or value is True or value is False:
            return repr(value)
        name = known.setdefault(id(value), f"v{len(known)}")
        names[name] = value
        return name

    lines = [f"        {text.format(*map(named, values))}" for text, values in checks]
    source = "def holds():\n    return (\n" + "\n        and ".join(["        True", *lines]) + "\n    )\n"
    exec(compile(source, "<captured guard>", "exec"), names)
    return names["holds"]


class Binding:
    """Everything reachable from a function, frozen, with the programs that are known for it.

    Args:
        state: the reachable objects.
    """

    def __init__(self, state: Reachable) -> None:
        self.state = state
        self.entries: dict[Any, Any] = {}
        self.inputs = [part for tensor in state.tensors for part in parts_of(local_of(tensor))]
        self.first: list[int] = []  # of each tensor the position of its first part
        count = 0
        for tensor in state.tensors:
            self.first.append(count)
            count += len(parts_of(local_of(tensor)))
        self._freeze_dicts()
        self._freeze_others()
        self._freeze_tensors()
        self._compared = 0  # how often
        self._generated: Callable[[], bool] | None = None

    # ---------------------------------------------------------------- freezing

    def _freeze_dicts(self) -> None:
        state = self.state
        objects = [value for value in state.objects if isinstance(getattr(value, "__dict__", None), dict)]
        owned = {id(vars(value)) for value in objects}
        holders = [slots.holder for slots in state.slots if slots.names is None]
        holders += map(dict_of_class, state.classes)
        dicts = {id(held): held for held in holders if isinstance(held, Mapping) and id(held) not in owned}
        self._empty: list[Any] = [held for held in dicts.values() if not held]
        self._empty += [held for held in holders if isinstance(held, set) and not held]
        full = [table_of(held) for held in dicts.values() if held] + [table_of(vars(each), each) for each in objects]
        full += [names_of(values, names) for values, names in state.global_names()]
        self._volatile = [table for table in full if not _has_version(table.held)]  # compared by their contents
        self._tables = [table for table in full if _has_version(table.held)]
        self._versions = DictVersions(self._tables)

    def _freeze_others(self) -> None:
        state = self.state
        whole = [slots.holder for slots in state.slots if slots.names is None]
        self._sets = [(held, list(held)) for held in whole if isinstance(held, set) and held]
        self._lists = [held for held in whole if isinstance(held, list | collections.deque)]
        self._lengths = list(map(len, self._lists))
        self._items = list(chain.from_iterable(self._lists))
        self._cells = [(held, cell_contents(held)) for held in whole if isinstance(held, types.CellType)]
        groups = [group for each in state.optimizers for group in each.param_groups]
        self._groups = [(group, group["params"]) for group in groups]
        self._making = [(group, name, bool(group[name])) for group in groups for name in MAKING_STATES if name in group]
        self._cached = state.cached
        self._variables = [(held, held.get(MISSING)) for held in whole if isinstance(held, ContextVar)]
        self._slots = [(each, name, getattr(each, name, None)) for each, names in state.slotted for name in names]
        self._functions = [
            (function, function.__code__, function.__defaults__, function.__kwdefaults__)
            for function in state.functions
            if function.__code__ in state.codes  # others did not run: nothing of them was read
            and not is_own_code(function.__code__.co_filename)
        ]

    def _freeze_tensors(self) -> None:
        state = self.state
        tensors = list(enumerate(state.tensors))
        self._rows = {at: _row(tensor) for at, tensor in tensors if at not in state.states}
        self._laid_out = {at: _layout(tensor) for at, tensor in tensors if tensor.__class__ is DTensor}
        kinds = (DTensor, RankTensor)
        self._plain = {
            at: _geometry(tensor) for at, tensor in tensors if at in self._rows and not isinstance(tensor, kinds)
        }

    # ---------------------------------------------------------------- comparing

    def holds(self) -> bool:
        """Whether everything is as it was."""
        if not (self._versions.hold() or self._hold_the_same()) or any(self._empty):
            return False
        if self._generated is not None:
            with DisableTorchFunctionSubclass():
                return self._generated() and self._same_rest()
        self._compared += 1
        if self._compared == WARM:
            self._generated = identity_checks(self._identities())
        return self._same_tensors() and self._same_others()

    def _identities(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The comparisons of `_same_tensors` and `_same_others`, each as an expression of `{}` with its objects."""
        for tensor, kind, grad, requires_grad, hooks, after in self._rows.values():
            yield "{}.grad is {}", (tensor, grad)
            yield "{}.requires_grad is {}", (tensor, requires_grad)
            yield "{}._backward_hooks is {}", (tensor, hooks)
            yield "{}._post_accumulate_grad_hooks is {}", (tensor, after)
            yield "type({}) is {}", (tensor, kind)
        for tensor, local, spec in self._laid_out.values():
            yield "{}._local_tensor is {}", (tensor, local)
            yield "{}._spec is {}", (tensor, spec)
        for function, code, defaults, named in self._functions:
            yield "{}.__code__ is {}", (function, code)
            yield "{}.__defaults__ is {}", (function, defaults)
            yield "{}.__kwdefaults__ is {}", (function, named)
        items = iter(self._items)
        for held, length in zip(self._lists, self._lengths, strict=True):
            yield f"len({{}}) == {length}", (held,)
            for at in range(length):
                yield f"{{}}[{at}] is {{}}", (held, next(items))
        for cell, was in self._cells:
            yield "{}({}) is {}", (cell_contents, cell, was)
        for group, parameters in self._groups:
            yield "{}.get('params') is {}", (group, parameters)
        for group, name, was in self._making:
            yield f"bool({{}}.get({name!r})) is {was}", (group,)
        for variable, was in self._variables:
            yield "{}.get({}) is {}", (variable, MISSING, was)
        for function, misses in self._cached:
            yield f"{{}}.cache_info().misses == {misses}", (function,)
        for each, name, was in self._slots:
            yield f"getattr({{}}, {name!r}, None) is {{}}", (each, was)

    def _hold_the_same(self) -> bool:
        """Whether dicts of other versions have the same contents. From then on these are compared by their contents."""
        tables = self._tables
        if not all(table.is_same() for table in tables):
            return False
        changed = self._versions.changed()
        self._volatile += [tables[at] for at in changed]
        self._tables = [table for at, table in enumerate(tables) if at not in changed]
        self._versions = DictVersions(self._tables)
        return True

    def _same_tensors(self) -> bool:
        with DisableTorchFunctionSubclass():  # reading an attribute of a subclass takes three times as long otherwise
            for tensor, kind, grad, requires_grad, hooks, after in self._rows.values():
                if (
                    tensor.grad is not grad
                    or tensor.requires_grad is not requires_grad
                    or tensor._backward_hooks is not hooks
                    or tensor._post_accumulate_grad_hooks is not after
                    or tensor.__class__ is not kind
                ):
                    return False
        for tensor, local, spec in self._laid_out.values():
            if tensor._local_tensor is not local or tensor._spec is not spec:
                return False
        return True

    def _same_others(self) -> bool:
        for function, code, defaults, named in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
            if function.__kwdefaults__ is not named:
                return False
        if list(map(len, self._lists)) != self._lengths:
            return False
        if not all(map(operator.is_, chain.from_iterable(self._lists), self._items)):
            return False
        if not all(cell_contents(cell) is was for cell, was in self._cells):
            return False
        if not all(group.get("params") is parameters for group, parameters in self._groups):
            return False
        if not all(bool(group.get(name)) is was for group, name, was in self._making):
            return False
        if not all(variable.get(MISSING) is was for variable, was in self._variables):
            return False
        if not all(function.cache_info().misses == misses for function, misses in self._cached):
            return False
        return all(getattr(each, name, None) is was for each, name, was in self._slots) and self._same_rest()

    def _same_rest(self) -> bool:
        """What is compared in loops always; most functions have none of it."""
        if self._plain:
            tensors = self.state.tensors
            if not all(_geometry(tensors[at]) == was for at, was in self._plain.items()):
                return False
        for held, was in self._sets:
            if len(held) != len(was) or not all(map(operator.is_, held, was)):
                return False
        return not self._volatile or all(table.is_same() for table in self._volatile)

    def renew(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Take new gradients in place of those that were there; whether they are of the same kind.

        Args:
            pairs: the positions of tensors, each with that of its gradient.
        """
        self._generated, self._compared = None, WARM  # it names the gradients that were there
        tensors, seen = self.state.tensors, self.state._seen
        tables = {id(table): at for at, table in enumerate(self._empty)}
        for owner, at in pairs:
            old, new = tensors[at], tensors[owner].grad
            if new is None or not _alike(old, new) or new.__dict__ or id(old.__dict__) not in tables:
                return False
            seen.pop(id(old), None)
            seen[id(new)] = at
            tensors[at] = new
            first = self.first[at]
            parts = parts_of(local_of(new))
            if not self._move_memories(parts_of(local_of(old)), parts):
                return False
            self.inputs[first : first + len(parts)] = parts
            self._empty[tables[id(old.__dict__)]] = new.__dict__
            self._rows[owner], self._rows[at] = _row(tensors[owner]), _row(new)
            if at in self._laid_out:
                self._laid_out[at] = _layout(new)
            if at in self._plain:
                self._plain[at] = _geometry(new)
        return True

    def _move_memories(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> bool:
        """Note new memory in place of old; whether each tensor has one of its own."""
        memories = self.state._memories
        numbers = [memories.pop(storage_key(part), None) for part in old]
        keys = [storage_key(part) for part in new]
        if None in numbers or len(set(keys)) != len(keys) or any(key in memories for key in keys):
            return False
        memories.update(zip(keys, numbers, strict=True))  # pyright: ignore[reportArgumentType, reportCallIssue]
        return True


def _has_version(held: Mapping[Any, Any]) -> bool:
    """Whether each change of a dict gives it another version. The order of an ordered one may change without."""
    keeps_order = not isinstance(held, collections.OrderedDict) or len(held) < 2
    return isinstance(held, dict) and keeps_order and versions_are_right()


def _row(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind, hooks, after = tensor.__class__, tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return tensor, kind, tensor.grad, tensor.requires_grad, hooks, after


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor, tensor._local_tensor, tensor._spec


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _GEOMETRY(tensor), tensor.stride(), tensor.data_ptr()


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.__class__ is not new.__class__ or new.requires_grad or new.grad is not None or new._backward_hooks:
        return False
    if old.__class__ is DTensor and old._spec is not new._spec:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    pairs = zip(parts_of(local_of(old)), parts_of(local_of(new)), strict=True)
    return all(
        a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset() for a, b in pairs
    )


def arguments_key(args: tuple[Any, ...], state: Reachable) -> tuple[Any, ...] | None:
    """The key of arguments that are tensors alone, quickly; None for all others."""
    found: list[Any] = []
    seen, memories = state._seen, state._memories
    ids: set[int] = set()
    for arg in args:
        kind = arg.__class__
        if kind is DTensor:
            local = arg._local_tensor
            if local.__class__ is not torch.Tensor or local.is_conj() or local.is_neg():
                return None
            found += (arg._spec, local.stride(), local.storage_offset(), local.device)
            memory = storage_key(local)
        elif kind is torch.Tensor:
            found += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.device, arg.layout)
            if arg.is_conj() or arg.is_neg() or arg.layout is not torch.strided:
                return None
            memory = storage_key(arg)
        else:
            return None
        plain = arg.grad_fn is None and not arg.requires_grad and arg.grad is None and not arg._backward_hooks
        if (
            not plain
            or arg.is_inference()
            or id(arg) in seen
            or id(arg) in ids
            or memory in memories
            or memory in ids
            or (arg.__dict__ and kind is not DTensor)
        ):
            return None
        if kind is DTensor and (arg._copied_view is not None or any(n not in REMEMBERED for n in arg.__dict__)):
            return None
        ids.update((id(arg), memory))
    return tuple(found)
