"""Gathered parameters: their memory, the leaves that compute on it, and the handles that autograd saves.

Memory belongs to the tensors on it and is never freed under one, so any pattern of calls is safe. A group drops its own
references when a module has finished. Autograd saves a handle instead of the memory, and unpacking the handle gathers
again. Other references to a tensor keep its memory. Issues no collective itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.autograd.graph import saved_tensors_hooks

from shardwise.compilers import never_traced
from shardwise.core.mesh import DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_tensor import data_was_read, of_rows, part_at, parts_of, writes_as_data
from shardwise.parallel.data_parallel.sharded_param import GatheredParameter, ShardedParameter
from shardwise.tensor import DTensor, dtensor_of
from shardwise.torch_private import (
    CachedCheckpointMode,
    CachingCheckpointMode,
    dispatch_mode_count,
    dispatch_mode_stack,
    saved_tensor_hooks,
    temporarily_clear_interpreter_stack,
    transforms_active,
    without_dispatch_modes,
)

__all__ = ["STORED", "Gathered", "Leaves", "Source", "at_once", "completion_token", "save_handles"]

ONE_TENSOR = (torch.Tensor, GatheredParameter)  # the usual classes of single tensors (others: one for each rank)
COUNTING = (CachedCheckpointMode, CachingCheckpointMode)  # modes of selective checkpointing
Take = Callable[[Sequence[torch.Tensor | None]], None]


class Source:
    """The stored parameters that a group gathers, and the tensors that a caller has substituted for others.

    Args:
        stored: for each parameter of the group; None if a caller has substituted a tensor for it.
        substituted: these tensors, by index.
    """

    def __init__(self, stored: Sequence[Any], substituted: dict[int, Any]) -> None:
        self.stored, self.substituted = tuple(stored), substituted
        self.indices = tuple(index for index, parameter in enumerate(self.stored) if parameter is not None)

    def versions(self) -> list[int]:
        """The version counter of each stored parameter."""
        return [self.stored[index]._version for index in self.indices]


@runtime_checkable
class GatheringGroup(Protocol):
    """The interface of a group to its gathered copy."""

    parameters: tuple[ShardedParameter, ...]

    def launch(self, source: Source) -> DTensor | None:
        """Begin the all-gather."""
        ...

    def launch_again(self, part: DTensor) -> DTensor:
        """Begin the all-gather of the parts of the flat buffer that ranks have kept."""
        ...

    def fill(self, source: Source, buffer: DTensor | None) -> list[Any]:
        """Wait for it, and copy each parameter to separate memory."""
        ...

    def part_of(self, buffer: DTensor, ranks: int) -> DTensor:
        """A copy of this rank's part of the gathered flat buffer, split over groups of this many ranks."""
        ...

    def needed(self, gathered: Gathered) -> None:
        """Called when autograd needs memory that has been dropped."""
        ...

    def make_leaves(self, gathered: Gathered, compute_mesh: DeviceMesh | None) -> list[Any]:
        """Leaves for all parameters, connected to the autograd nodes that receive their gradients."""
        ...


class _Leaves(NamedTuple):
    tensors: list[Any]
    versions: list[int]  # version counters, and numbers of writes through `data`
    locals: list[Any]  # None for a plain tensor
    flags: list[bool]


class Written(NamedTuple):
    """How a gathered parameter was written to: on which mesh, recorded by autograd, by giving it other memory."""

    mesh: DeviceMesh | None
    in_graph: bool
    assigned: bool


class Gathered:
    """One gathered copy of the parameters of a group. Its memory may be dropped, and is gathered again when needed."""

    def __init__(self, group: GatheringGroup, source: Source) -> None:
        self.group, self.source = group, source
        self.tensors: list[Any] | None = None  # the memory, by index of the parameter
        self.versions: list[int] | None = None  # of the stored parameters when they were gathered
        self.writes: dict[int, int] = {}  # version counters of the leaves that were written to
        self._leaves: dict[DeviceMesh | None, _Leaves] = {}
        self._pending: DTensor | None = None
        self._started = False
        self.part: DTensor | None = None  # a part of the flat buffer, kept between forward and backward
        self._keys: list[int] = []
        self._bases: list[int] = []
        self._reference: weakref.ref[Gathered] = weakref.ref(self)

    def __del__(self) -> None:
        if self._keys:
            self.drop()

    @property
    def is_present(self) -> bool:
        """Whether the parameters are gathered, or an all-gather has been started."""
        return self.tensors is not None or self._started

    @property
    def is_in_flight(self) -> bool:
        """Whether an all-gather is in flight."""
        return self._pending is not None

    @property
    def is_up_to_date(self) -> bool:
        """Whether the stored parameters have not been written to since they were gathered."""
        return self.versions is None or self.versions == self.source.versions()

    def start(self) -> None:
        """Begin to gather."""
        if self.is_present:
            return
        if not self.is_up_to_date:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                "sharded parameter was written to between forward and backward, and has to be gathered again"
            )
        self.versions = self.source.versions()
        with kept_apart(grads=False):
            part, self.part = self.part, None
            again = part is not None
            self._pending = self.group.launch_again(part) if again else self.group.launch(self.source)
            self._started = True

    def finish(self, keep_over: int | None = None) -> None:
        """Wait for the memory; begin to gather if that has not been done.

        Args:
            keep_over: also keep a part of the flat buffer, split over groups of this many ranks, for the next gather.
        """
        if self.tensors is not None:
            return
        self.start()
        with kept_apart(grads=False):
            self.tensors = self.group.fill(self.source, self._pending)
            if keep_over is not None and self._pending is not None:
                self.part = self.group.part_of(self._pending, keep_over)
        self._pending, self._started = None, False
        self._bases = [0] * len(self.tensors)
        for index in self.source.indices:
            local = self.tensors[index]
            part = local if type(local) is torch.Tensor else part_at(local, 0)
            if part is local:  # leaves on it share its version counter
                self._bases[index] = part._version
            key = part.untyped_storage()._cdata
            _memory[key] = self._reference, index
            self._keys.append(key)

    def drop(self, *, keep_part: bool = False) -> None:
        """Release the memory. It is freed when no other tensor uses it.

        Args:
            keep_part: keep the part of the flat buffer from which backward gathers.
        """
        if not keep_part:
            self.part = None
        if self._pending is not None:
            _ = self._pending._local_tensor  # a collective in flight is finished before its buffer is freed
        for key in self._keys:
            if _memory.get(key, (None,))[0] is self._reference:
                del _memory[key]
        self._keys.clear()
        self._leaves.clear()
        self.tensors, self._pending, self._started = None, None, False

    def lend(self, other: Gathered) -> bool:
        """Share this copy's memory with another copy of the same values; returns whether it did."""
        if self is other or self.tensors is None or self.source is not other.source:
            return False
        if self.versions != other.versions or self.writes or other.writes:
            return False
        other.tensors = self.tensors
        return True

    # ---------------------------------------------------------------- leaves

    def leaves(self, compute_mesh: DeviceMesh | None) -> list[Any]:
        """The tensors that modules compute with, by index of the parameter."""
        flags = [self.source.stored[index].requires_grad for index in self.source.indices]
        found = self._leaves.get(compute_mesh)
        if found is None or found.flags != flags:
            with kept_apart(grads=True):
                tensors = self.group.make_leaves(self, compute_mesh)
            versions: list[int] = []
            locals_: list[Any] = []
            for index in self.source.indices:
                leaf = tensors[index]
                versions.append(self._count(leaf, index) if data_was_read else leaf._version)
                locals_.append(getattr(leaf, "_local_tensor", None))
            found = self._leaves[compute_mesh] = _Leaves(tensors, versions, locals_, flags)
        return found.tensors

    def take_writes(self) -> dict[int, list[Written]]:
        """The parameters written to since the last call."""
        found: dict[int, list[Written]] = {}
        for mesh, (tensors, versions, locals_, _) in self._leaves.items():
            for at, index in enumerate(self.source.indices):
                leaf = tensors[index]
                count = self._count(leaf, index) if data_was_read else leaf._version
                assigned = getattr(leaf, "_local_tensor", None) is not locals_[at]
                if count != versions[at] or assigned:
                    versions[at] = count
                    self.writes[index] = leaf._version - self._base(leaf, index)
                    in_graph = leaf.grad_fn is not None and leaf.grad_fn.name() != "LeavesBackward"
                    found.setdefault(index, []).append(Written(mesh, in_graph, assigned))
        return found

    def _count(self, leaf: Any, index: int) -> int:
        """How many times a leaf was written to: autograd does not see writes through the `data` of a DTensor."""
        assert self.tensors is not None
        if not isinstance(leaf, DTensor):  # `data` of the other leaves shares their counter
            return leaf._version
        return leaf._version + writes_as_data(part_at(self.tensors[index], 0))

    def _base(self, tensor: torch.Tensor, index: int) -> int:
        return 0 if isinstance(tensor, DTensor) else self._bases[index]

    # ---------------------------------------------------------------- saved tensors

    def handle(self, tensor: Any, index: int, spec: DTensorSpec | None, local: torch.Tensor) -> Saved:
        """The handle of a tensor on this memory until backward."""
        views = [(part.size(), part.stride(), part.storage_offset()) for part in parts_of(local)]
        return Saved(self, index, spec, views, tensor._version - self._base(tensor, index))


# by storage: its gathered copy, which this does not keep, and the index of the parameter
_memory: dict[int, tuple[weakref.ref[Gathered], int]] = {}


class Saved(NamedTuple):
    """A view of gathered memory that can be restored."""

    gathered: Gathered
    position: int  # of the parameter in its group
    spec: DTensorSpec | None
    views: Sequence[tuple[Any, Any, Any]]
    writes: int

    def restored(self) -> torch.Tensor:
        """The tensor that was saved."""
        gathered = self.gathered
        if self.writes != gathered.writes.get(self.position, 0):
            name = gathered.group.parameters[self.position].name
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"the parameter {name} was written to inside forward after an operator had saved it"
            )
        if gathered.tensors is None:
            gathered.group.needed(gathered)
        assert gathered.tensors is not None
        full = gathered.tensors[self.position]
        if type(full) is torch.Tensor:
            local = full.as_strided(*self.views[0])
        else:
            parts = zip(parts_of(full), self.views, strict=True)
            local = of_rows(full, [(part.as_strided(*view),) for part, view in parts])[0]
        return local if self.spec is None else dtensor_of(self.spec, local)


def _pack(tensor: Any) -> Any:
    spec = None
    local = tensor
    if type(tensor) is DTensor:
        spec, local = tensor._spec, tensor._local_tensor
    part = local if type(local) in ONE_TENSOR else part_at(local, 0)
    if type(part) is torch.Tensor:
        found = _memory.get(part.untyped_storage()._cdata)
        gathered = None if found is None else found[0]()
        if found is not None and gathered is not None and not part.is_conj() and not part.is_neg():
            index = found[1]
            assert gathered.tensors is not None
            full = gathered.tensors[index]
            if full.dtype is part.dtype and type(full) is type(local):
                return gathered.handle(tensor, index, spec, local)
    return tensor, tensor._version


def _unpack(packed: Any) -> torch.Tensor:
    if type(packed) is Saved:
        return packed.restored()
    tensor, version = packed
    if tensor._version != version:  # with hooks in place autograd leaves this check to them
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype}, {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
        )
    return tensor


never_traced(_pack, _unpack)


def save_handles() -> saved_tensors_hooks | None:
    """Let operators save handles of gathered memory, until `__exit__` of the result.

    None if this is active already, if a user's hooks are active (checkpointing, which decides what is saved), or if
    torch allows no hooks: then saved memory is not freed.
    """
    if (
        saved_tensor_hooks._top_saved_tensors_default_hooks(False) is not None
        or not saved_tensor_hooks._saved_tensors_hooks_is_enabled()
    ):
        return None
    hooks = saved_tensors_hooks(_pack, _unpack)
    hooks.__enter__()
    return hooks


# ---------------------------------------------------------------- autograd nodes of gathered leaves


STORED = "_shardwise_stored"  # the attribute of a node of leaves with their stored parameters


class Completion(torch.autograd.Function):
    """A node of autograd that runs when a backward has run all nodes of leaves below it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, done: Callable[[], None], of: list[Any]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.set_materialize_grads(False)
        ctx.done, ctx.variable = done, of[0]
        return torch.empty_like(anchor)

    @staticmethod
    def backward(ctx: Any, grad: None) -> tuple[None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.done()
        return None, None, None


def completion_token(variable: Any, done: Callable[[], None]) -> torch.Tensor:
    """A tensor from which leaves are made; its node calls `done` when a backward has run the nodes of all of them.

    It is on the device of the leaves, so that the autograd thread that runs their operators calls it. `done` must not
    refer to what keeps the tensor: Python's collector does not see what a node refers to. Its node has an
    attribute `variable`, a parameter, like the nodes that accumulate gradients.
    """
    kept = torch.device("cpu") if variable.device.type == "meta" else variable.device
    with torch.inference_mode(False), torch.enable_grad():
        token: Any = Completion.apply(torch.zeros((), device=kept, requires_grad=True), done, [variable])
    return at_once(token)


def at_once(tensor: Any) -> Any:
    """Give the node of a tensor the highest priority in autograd, like the accumulation of gradients."""
    tensor.grad_fn._set_sequence_nr(2**64 - 1)
    return tensor


class Leaves(torch.autograd.Function):
    """The autograd node of the leaves of a bucket: it receives all their gradients in one call."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, token: Any, take: Take, leaves: Sequence[Any], parameters: Sequence[Any]
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.take, ctx.variable = take, token.grad_fn.variable
        setattr(ctx, STORED, parameters)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in grads):
            raise UnsupportedError(
                "backward(create_graph=True) reached the parameters of a data parallel module: their gradients are "
                "reduced outside of autograd, so a derivative of them would be lost",
                hint="differentiate with respect to inputs, torch.autograd.grad(loss, inputs, create_graph=True), or "
                "call the module by torch.func.functional_call with tensors of your own as parameters",
            )
        ctx.take(grads)
        return None, None, None, None


never_traced(Completion.forward, Completion.backward, Leaves.forward, Leaves.backward)


def kept_apart(*, grads: bool) -> contextlib.AbstractContextManager[Any]:
    """A context for gathering and for making leaves, with gradients or without, independent of the caller's modes.

    The tensors are no inference tensors, and constants to transforms of torch.func. Selective checkpointing, which
    counts operators, does not see those that gather.
    """
    transformed, modes = transforms_active(), dispatch_mode_count()
    if not transformed and not modes and not torch.is_inference_mode_enabled():
        return torch.set_grad_enabled(grads)
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(grads))
    if transformed:
        stack.enter_context(temporarily_clear_interpreter_stack())
    if not grads and not is_tracing():
        stack.enter_context(_unseen())
    return stack


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Hide operators from selective checkpointing; other modes (dry runs, profilers) still see them."""
    if not any(isinstance(mode, COUNTING) for mode in dispatch_mode_stack()):
        yield
        return
    with without_dispatch_modes() as before, contextlib.ExitStack() as others:
        for mode in reversed(before):
            if mode is not None and not isinstance(mode, COUNTING):
                others.enter_context(mode)
        yield
