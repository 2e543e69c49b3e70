"""Applies a load to the state: staged values and objects, on all processes or, if an object refuses, on none."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.nn.parameter import is_lazy

from shardwise.checkpoint.format.json_values import Name, join
from shardwise.checkpoint.format.state_tree import ExpandedObject, entries, filled
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes
from shardwise.errors import CheckpointError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = [
    "LoadChanges",
    "StagedValues",
    "WaitingValues",
    "change_all",
    "has_tensors",
    "is_filled",
    "memory_of",
    "put_values",
]

NAMED = 20  # names in an error about a state that is partly loaded


@runtime_checkable
class WaitingValues(Protocol):
    """Verified values of a tensor."""

    @property
    def name(self) -> str:
        """The name of the tensor."""
        ...

    def put(self) -> None:
        """Change the tensor."""
        ...


class StagedValues(NamedTuple):
    """A local tensor, its new values in host memory, and the name of its tensor."""

    local: torch.Tensor
    values: torch.Tensor
    name: str

    def put(self) -> None:
        """Copy the values into the local tensor."""
        put_values(self.local, self.values)


class LoadChanges:
    """All changes of a load, after everything is read and verified.

    Objects with a state dict run code of the user. Those without tensors (schedulers, samplers) are loaded first; if
    one of them raises, on any rank, all get their former state back. Then tensors are filled: shapes, dtypes and memory
    have been checked, and files were read and verified before. Optimizers and other objects with tensors are last. If
    one of them fails, or a file that was verified cannot be read again, the error lists the changes so far.

    Which objects are last, and which of these are given their state dict, is the same on all ranks, whatever a rank
    has of them: their code may communicate.
    """

    def __init__(
        self,
        rank: int,
        tensors: Sequence[torch.Tensor],
        waiting: Sequence[WaitingValues],
        state: Any = None,
        expanded: Sequence[ExpandedObject] = (),
        objects: Mapping[Name, Any] | None = None,
        last: Set[str] = frozenset(),
        given: Set[str] = frozenset(),
    ) -> None:
        self._rank = rank
        self._tensors = tensors
        self._waiting = waiting
        self._state = state
        self._expanded = expanded
        self._objects = objects or {}
        self._last, self._given = last, given
        self._former: list[tuple[ExpandedObject, Any]] = []
        self._others: list[tuple[ExpandedObject, dict[Name, Any]]] = []
        self._done: list[str] = []

    def load_plain(self) -> None:
        """Load the objects without tensors."""
        for owner in self._expanded:
            size = len(owner.path)
            own = {at[size:]: value for at, value in self._objects.items() if at[:size] == owner.path}
            if join(owner.path) in self._last:
                self._others.append((owner, own))
            else:
                self._former.append((owner, copy.deepcopy(owner.state)))
                _give(owner, filled(owner.state, own))
                self._done.append(_place(owner.path))

    def restore_plain(self) -> None:
        """Restore the former state of the objects without tensors."""
        for owner, former in reversed(self._former):
            try:
                _give(owner, former)
            except Exception as error:
                raise CheckpointError(
                    f"the former state of {_place(owner.path)} could not be restored: {error}",
                    hint="its state is undefined; nothing else was changed",
                ) from error

    def load_rest(self) -> None:
        """Fill the tensors, replace plain objects, and load the objects with tensors."""
        doing = "versions of tensors"
        try:
            for tensor in self._tensors:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
            for values in self._waiting:
                doing = values.name
                values.put()
                if doing not in self._done[-1:]:
                    self._done.append(doing)
            if isinstance(self._state, dict) and self._objects:
                doing = "plain objects"
                filled(self._state, self._objects)
                self._done.append(doing)
            for owner, objects in self._others:
                doing = _place(owner.path)
                if join(owner.path) in self._given:
                    _give(owner, filled(owner.state, objects))
                    self._done.append(f"load_state_dict of {doing}")
        except BaseException as error:
            more = f" and {len(self._done) - NAMED} more" if len(self._done) > NAMED else ""
            half = CheckpointError(
                f"the state is partly loaded: {type(error).__name__} at {doing}: {error}\n    changed on rank "
                f"{self._rank} before, in this order: {', '.join(self._done[:NAMED]) or 'nothing'}{more}\n"
                "    on ranks without an error of their own: everything",
                hint="load again, or start over",
            )
            if isinstance(error, Exception):
                raise half from error
            error.add_note(str(half))
            raise


def _place(path: Name) -> str:
    return join(path) or "the state"


def change_all(outcome: Outcome, processes: Processes, make: Callable[[], LoadChanges]) -> None:
    """Change the states of all processes; of none, if an object without tensors raises on any of them."""
    outcome.value = None
    changes = outcome.attempt(make, None)
    outcome.attempt(lambda: changes.load_plain() if changes else None, None)
    try:
        processes.exchange(outcome)
    except BaseException:
        if changes is not None:
            changes.restore_plain()
        raise
    outcome.attempt(lambda: changes.load_rest() if changes else None, None)
    processes.exchange(outcome)


def put_values(local: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a local tensor; inference tensors are changed in inference mode."""
    with torch.inference_mode() if local.is_inference() else torch.no_grad():
        local.detach().copy_(values)


def has_tensors(expanded: ExpandedObject) -> bool:
    """Whether the state dict of an object has tensors."""
    return any(isinstance(value, torch.Tensor) for _, value in entries(expanded.state))


def is_filled(expanded: ExpandedObject) -> bool:
    """Whether all tensors of a state dict are memory of its module, which is filled with the tensors.

    Others are copies: of a hook, an overridden `state_dict`, or an extra state. The module must be given them.
    """
    module = expanded.owner
    if not isinstance(module, torch.nn.Module):
        return False
    own = {frozenset[Any](), *(memory_of(tensor) for tensor in itertools.chain(module.parameters(), module.buffers()))}
    tensors = (value for _, value in entries(expanded.state) if isinstance(value, torch.Tensor))
    return all(memory_of(tensor) in own for tensor in tensors)


def memory_of(tensor: torch.Tensor) -> frozenset[Any]:
    """Where the elements of a tensor are in this process; empty if it has none.

    A tensor without memory of its own that could be filled (sparse, on meta, not initialized) is its own place.
    """
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        return frozenset().union(*(memory_of(local) for _, local in fabric_of(mesh).parts(mesh, tensor._local_tensor)))
    if is_lazy(tensor) or tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return frozenset([id(tensor)])
    if not tensor.numel():
        return frozenset()
    if tensor.untyped_storage().device.type == "meta":
        return frozenset([id(tensor)])
    return frozenset([(tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())])


def _give(expanded: ExpandedObject, state: Any) -> None:
    """Load the state dict of a module, an optimizer, ..."""
    if isinstance(expanded.owner, torch.nn.Module):
        expanded.owner.load_state_dict(state, strict=False)
    else:
        expanded.owner.load_state_dict(state)
