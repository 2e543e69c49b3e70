"""The effects of a step besides the values that it wrote in place: its result, gradients, attributes.

Compared with the state before, and described so that a program can make them again.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from shardwise.capture.program import Given, Local, Made, Root, Same, Sequenced, Tabled
from shardwise.capture.reachable import Reachable
from shardwise.capture.slots import MISSING, Slots
from shardwise.capture.snapshot import Snapshot, local_of
from shardwise.capture.tape import Ref, Tape, refused
from shardwise.dispatch.views import OVERLAPPING
from shardwise.fabric.rank_tensor import RankTensor, is_of_ranks, parts_of
from shardwise.tensor import DTensor
from shardwise.tensor.dtensor import REMEMBERED

__all__ = ["Effect", "Leaving", "Unsettled"]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(...))


_CALLER = -1  # in place of the identity of a tensor
_DETACH = torch.ops.aten.detach.default


class Unsettled(Exception):
    """A step has stored an object of its own where it can read it, usually in a cache that fills. Not recorded then."""


class Effect(NamedTuple):
    """One change: of a tensor's gradient or local, or of a container's contents; or what a new tensor is a view of."""

    kind: str
    target: int  # the position of the tensor or container; of a view, its number among the tensors that were made
    value: Any  # the description of its new value; of a view, of the operator's arguments


class Leaving:
    """Describes results and changes.

    Args:
        tape: the recorded calls.
        state: the objects before, without arguments.
        roots: all tensors that were there before.
        spent: the nodes of autograd that backward has used up.
        slots: all containers that were there before.
    """

    def __init__(
        self, tape: Tape, state: Reachable, roots: Sequence[torch.Tensor], spent: set[Any], slots: Sequence[Slots]
    ) -> None:
        self.tape = tape
        self.state = state
        self.roots = {id(root): at for at, root in enumerate(roots)}
        self.spent = spent
        self._given = {id(each.holder): at for at, each in enumerate(slots)}
        self.gives_container = False  # whether a container of the arguments is in a result
        self._containers: dict[int, Any] = {}  # the descriptions of new ones
        self.values: dict[int, torch.Tensor] = {}  # values that are needed at the end, as they came out
        self._made: dict[int, Made] = {}
        self._kept: list[Any] = []
        self._kept_containers: list[Any] = []  # so that their identities stay theirs
        self._copied: list[tuple[Made, Any]] = []  # views that share no memory with their bases

    def describe(self, value: Any, path: str, in_state: bool = False) -> Any:
        """How a value can be made again."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = value.__class__
        if kind in _ATOMS or id(value) in self.state._seen:
            return Same(value)
        if (at := self._given.get(id(value))) is not None:
            self.gives_container = True
            return Given(at)
        if (known := self._containers.get(id(value))) is not None:
            return known
        found = self._new(value, kind, path, in_state)
        self._containers[id(value)] = found
        self._kept_containers.append(value)
        return found

    def _new(self, value: Any, kind: Any, path: str, in_state: bool) -> Any:
        """A container that the step has made."""
        if isinstance(value, list | tuple):
            items = tuple(self.describe(item, f"{path}[{at}]", in_state) for at, item in enumerate(value))
            if kind in (list, tuple):
                return Sequenced(kind, items)
            if hasattr(kind, "_make"):
                return Sequenced(kind._make, items)
        if isinstance(value, dict) and kind in (dict, collections.OrderedDict):
            pairs = [
                (self.describe(k, path, in_state), self.describe(v, f"{path}[{k!r}]", in_state))
                for k, v in value.items()
            ]
            return Tabled(kind, tuple(pairs))
        if in_state:
            raise Unsettled(f"{path} becomes an object of the class {kind.__name__}")
        raise refused(
            f"{path} is an object of the class {kind.__name__} that the step has made",
            "return tensors, numbers, lists, tuples and dicts, and keep other objects outside",
        )

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        at = self.roots.get(id(value))
        if at is not None:
            return Root(at)
        found = self._made.get(id(value))
        if found is not None:
            return found
        kind = value.__class__
        if kind not in (DTensor, torch.Tensor, RankTensor) and not isinstance(value, DTensor):
            raise refused(f"{path} is a new {kind.__name__}", "make parameters outside of the captured function")
        is_spent = value.grad_fn is not None
        if is_spent and value.grad_fn not in self.spent:
            raise refused(
                f"{path} still has a graph of autograd that backward has not gone through",
                "call backward inside of the captured function, or return tensor.detach()",
            )
        if value.retains_grad:
            raise refused(f"{path} is a new tensor that retains its gradient", "return the gradient, too, or clone()")
        if value.is_leaf and value.grad is not None:
            raise refused(f"{path} is a new tensor with a gradient", "return the gradient instead")
        others = [name for name in value.__dict__ if name not in (*REMEMBERED, "tensors")]
        if others or value._backward_hooks:
            raise refused(f"{path} is a new tensor with attributes ({others}) or hooks", "set them outside")
        spec = value._spec if isinstance(value, DTensor) else None
        local = self.local(_settled_local(value) if isinstance(value, DTensor) else value, path)
        made = Made(len(self._made), local, spec, value.requires_grad, is_spent, value.is_inference())
        self._made[id(value)] = made
        self._kept.append(value)
        if spec is not None and value._copied_view is not None:  # pyright: ignore[reportAttributeAccessIssue]
            self._copied.append((made, value))
        return made

    def local(self, value: torch.Tensor, path: str) -> Local:
        """A plain tensor, or those of all virtual ranks."""
        refs: list[Ref] = []
        for part in parts_of(value):
            ref = self.tape.find(part)
            if ref is None:
                raise refused(
                    f"{path} is a tensor that no operator of the step has made", "make it with torch's operators"
                )
            refs.append(ref)
            self.values[ref.number] = part
        return Local(tuple(refs), is_of_ranks(value))

    def changes(self, before: Snapshot, slots: Sequence[Slots]) -> list[Effect]:
        """The changes since before."""
        found: list[Effect] = []
        for at, was in enumerate(before.held):
            tensor = was.tensor
            name = f"tensor {at}"
            if tensor.requires_grad is not was.requires_grad:
                raise refused("requires_grad of a tensor is changed by the step", "call requires_grad_ outside of it")
            if tensor.__class__ is DTensor and (tensor._local_tensor is not was.local or tensor._spec is not was.spec):  # pyright: ignore[reportAttributeAccessIssue]
                if self._parts(tensor) != tuple(map(id, was.parts)) or tensor._spec is not was.spec:  # pyright: ignore[reportAttributeAccessIssue]
                    local = self.local(tensor._local_tensor, name)  # pyright: ignore[reportAttributeAccessIssue]
                    found.append(Effect("local", at, (local, tensor._spec)))  # pyright: ignore[reportAttributeAccessIssue]
            elif tensor.__class__ is not DTensor and self._parts(tensor) != tuple(map(id, was.parts)):
                raise refused("the memory of a tensor is exchanged by the step", "write to the tensor instead")
            if tensor.grad is not was.grad:
                found.append(Effect("grad", at, self.describe(tensor.grad, "a gradient")))
        for at, each in enumerate(slots):
            now = each.now()
            if not each.is_same(now):
                found.append(Effect("slots", at, self._contents(each, now)))
        return found

    def views(self, before: Snapshot) -> list[Effect]:
        """Views that leave and share no memory with their bases, where a write to one may show in another tensor."""
        chains = [_chain(value) for _, value in self._copied]
        calls = collections.Counter(base for base, _ in {(id(view.args[0]), id(view.args)) for view, *_ in chains})
        holders: dict[int, set[int]] = {self.tape.memory_of[number]: {_CALLER} for number in range(len(before.parts))}
        for tensor in self._kept:
            for memory in self._memories(tensor):
                holders.setdefault(memory, set()).add(id(tensor))
        shown: list[bool] = []
        for (_, value), chain in zip(self._copied, chains, strict=True):
            top: Any = chain[-1].args[0]
            memories = [memory for view in chain for memory in self._memories(view.args[0])]
            others = set().union(*(holders.get(memory, ()) for memory in memories)) - {id(top), id(value)}
            is_root = id(top) in self.roots
            is_overlapping = any(view.op in OVERLAPPING for view in chain)  # a write shows in the view itself
            shown.append(is_root or id(top) in self._made or calls[id(top)] > 1 or is_overlapping)
            if (others - {_CALLER} if is_root else others) or (shown[-1] and len(chain) > 1):
                raise refused(  # torch counts writes to all of them as one
                    "the step leaves a view that shares no memory with its base, since that is sharded; and the base "
                    "is a view itself, or shares memory with an argument or another result",
                    "return view.clone(), or take the view of that tensor itself",
                )
        found: list[Effect] = []
        for (made, _), chain, is_shown in zip(list(self._copied), chains, shown, strict=True):
            if is_shown:
                view = chain[0]
                base, *others = view.args
                args = Sequenced(tuple, (self._base(base), *(self.describe(arg, "a view") for arg in others)))
                kwargs = self.describe(dict(view.kwargs), "a view")
                found.append(Effect("view", made.number, (view.op, Sequenced(tuple, (args, kwargs)), view.item)))
        return found

    def _base(self, tensor: Any) -> Any:
        """What a view is one of. If nobody else has it, it needs no graph of autograd."""
        if id(tensor) in self.roots or id(tensor) in self._made:
            return self._tensor(tensor, "the base of a view")
        local = self.local(_settled_local(tensor), "the base of a view")
        made = Made(len(self._made), local, tensor._spec, False, False, tensor.is_inference())
        self._made[id(tensor)] = made
        return made

    def _memories(self, tensor: Any) -> set[int]:
        refs = [self.tape.find(part) for part in parts_of(tensor._held if isinstance(tensor, DTensor) else tensor)]
        return {self.tape.memory_of[ref.number] for ref in refs if ref is not None}

    @staticmethod
    def _parts(tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(map(id, parts_of(local_of(tensor))))

    def _contents(self, slots: Slots, now: Any) -> Any:
        path = slots.path
        if isinstance(slots.holder, type):
            raise Unsettled(f"an attribute of {path}, a class, is changed")
        if isinstance(slots.holder, ContextVar):
            raise Unsettled(f"the ContextVar {slots.holder.name!r} is left with another value")
        if isinstance(now, dict):
            if any(value is MISSING and slots.before[name] is not MISSING for name, value in now.items()):
                raise refused(f"{path}: a name is deleted by the step", "do that outside")
            pairs = [
                (Same(name), self.describe(value, f"{path}: {name}", in_state=True))
                for name, value in now.items()
                if value is not MISSING
            ]
            return Tabled(dict, tuple(pairs))
        if isinstance(now, set):
            raise Unsettled(f"{path}: a set is changed")
        return Sequenced(
            list, tuple(self.describe(value, f"{path}[{at}]", in_state=True) for at, value in enumerate(now))
        )


def _settled_local(tensor: Any) -> torch.Tensor:
    """The local of a tensor; that of a view as the recorded call has left it, which always counts as old in inference
    mode."""
    return tensor._local_tensor if tensor._copied_view is None else tensor._held


def _chain(tensor: Any) -> list[Any]:
    """How a view that shares no memory with its base was made, and how that was, if it is one, and so on."""
    found: list[Any] = []
    while tensor._copied_view is not None:
        view = tensor._copied_view
        tensor = view.args[0]
        if view.op is not _DETACH or tensor._copied_view is None:  # else it has the elements of the view before
            found.append(view)
    return found
