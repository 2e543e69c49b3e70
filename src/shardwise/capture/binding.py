"""The fast guard of a captured function: whether what it can read is, object by object, what it was.

Where it is not, everything reachable is followed anew, which takes milliseconds and may find the same program.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from shardwise.capture.reachable import Reachable
from shardwise.capture.snapshot import local_of
from shardwise.fabric.virtual import RankTensor, parts_of
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import REMEMBERED

__all__ = ["Binding", "arguments_key"]

_FACTS = operator.attrgetter("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_FUNCTION = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_LAYOUT = operator.attrgetter("_local_tensor", "_spec")
_GEOMETRY = operator.attrgetter("shape", "dtype", "device")


class Binding:
    """What was reached from a function, frozen, with the programs that are known for it.

    Args:
        state: what was reached.
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
        whole = [slots for slots in state.slots if slots.names is None]
        self._dicts = [slots.holder for slots in whole if isinstance(slots.holder, dict)]
        self._cells = [slots.holder for slots in whole if isinstance(slots.holder, types.CellType)]
        self._sets = [(slots.holder, slots.before) for slots in whole if isinstance(slots.holder, set)]
        kinds = (dict, set, types.CellType)
        self._lists = [slots.holder for slots in whole if not isinstance(slots.holder, kinds)]
        self._globals = [(slots.holder, slots.names) for slots in state.slots if slots.names]
        self._dicts += state.tables
        self._empty = [each for each in self._dicts if not each]
        self._dicts = [each for each in self._dicts if each]
        self._class_dicts = [vars(kind) for kind in state.classes]
        self._facts: Sequence[Any] = ()
        self._freeze()

    def _freeze(self) -> None:
        tensors = self.state.tensors
        states = self.state.states
        self._tensors = [tensor for at, tensor in enumerate(tensors) if at not in states]
        self._laid_out = [tensor for tensor in tensors if tensor.__class__ is DTensor]
        self._plain = [tensor for tensor in self._tensors if tensor.__class__ is not DTensor]
        self._facts = self._read()
        self._geometry = self._geometries()

    def _read(self) -> list[Any]:
        found = list(chain.from_iterable(map(dict.values, self._dicts)))
        found.extend(chain.from_iterable(self._dicts))
        found.extend(chain.from_iterable(self._lists))
        found.extend(cell.cell_contents for cell in self._cells)
        state = self.state
        found.append(not any(self._empty))
        found.extend(map(type, state.objects))
        found.extend([table.get("forward") for table in state.forwards])
        found.extend(chain.from_iterable(map(_FUNCTION, state.functions)))
        for table in self._class_dicts:
            found.extend(table.values())
        for value, slots in state.slotted:
            found.extend([getattr(value, name, None) for name in slots])
        for values, names in self._globals:
            found.extend([values[name] for name in names])
        found.extend(chain.from_iterable(map(_FACTS, self._tensors)))
        found.extend(chain.from_iterable(map(_LAYOUT, self._laid_out)))
        return found

    def _geometries(self) -> list[Any]:
        return [(_GEOMETRY(tensor), tensor.stride(), tensor.storage_offset()) for tensor in self._flat()]

    def _flat(self) -> list[torch.Tensor]:
        return [tensor for tensor in self._plain if not isinstance(tensor, RankTensor)]

    def holds(self) -> bool:
        """Whether everything is as it was."""
        try:
            now = self._read()
        except (KeyError, ValueError):  # a name or the contents of a cell are gone
            return False
        facts = self._facts
        if len(now) != len(facts) or not all(map(operator.is_, now, facts)):
            return False
        return all(held == before for held, before in self._sets) and self._geometries() == self._geometry

    def renew(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Take new gradients in place of those that were there; whether they are of the same kind.

        Args:
            pairs: the positions of tensors, each with that of its gradient.
        """
        tensors, seen = self.state.tensors, self.state._seen
        for owner, at in pairs:
            old, new = tensors[at], tensors[owner].grad
            if new is None or not _alike(old, new):
                return False
            seen.pop(id(old), None)
            seen[id(new)] = at
            tensors[at] = new
            first = self.first[at]
            parts = parts_of(local_of(new))
            self.inputs[first : first + len(parts)] = parts
        self._freeze()
        return True


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
    """What programs depend on of arguments that are tensors alone, quickly; None for all others."""
    found: list[Any] = []
    seen = state._seen
    ids = set()
    for arg in args:
        kind = arg.__class__
        if kind is DTensor:
            local = arg._local_tensor
            if local.__class__ is not torch.Tensor:
                return None
            found += (arg._spec, local.stride(), local.storage_offset(), local.device)
        elif kind is torch.Tensor:
            found += (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.device, arg.layout)
            if arg.is_conj() or arg.is_neg():
                return None
        else:
            return None
        plain = arg.grad_fn is None and not arg.requires_grad and arg.grad is None and not arg._backward_hooks
        if (
            not plain
            or arg.is_inference()
            or id(arg) in seen
            or id(arg) in ids
            or (arg.__dict__ and kind is not DTensor)
        ):
            return None
        if kind is DTensor and (arg._copied_view is not None or any(n not in REMEMBERED for n in arg.__dict__)):
            return None
        ids.add(id(arg))
    return tuple(found)
