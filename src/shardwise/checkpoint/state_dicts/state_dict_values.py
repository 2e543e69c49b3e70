"""The tensors of state dicts: gathered for full state dicts, sent by rank 0, and laid out for loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.operations.apply_load import memory_of
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes, processes_of
from shardwise.errors import CheckpointError
from shardwise.fabric.rank_tensor import parts_of
from shardwise.loading import laid_out_as
from shardwise.tensor import DTensor

__all__ = ["TensorToLoad", "checked_processes", "finished", "leaves", "map_leaves", "receive", "to_load"]


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Copy nested dicts, lists and tuples, with `function` applied to all other values."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(item, function) for item in value)
    return function(value)


def leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(value, found.append)
    return found


def finished(state: dict[str, Any], options: Any) -> dict[str, Any]:
    """Apply the options to a state dict: gather full tensors, copy to host memory, keep on rank 0 only."""
    if not options.full_state_dict and not options.cpu_offload:
        return state
    processes = checked_processes(leaf for leaf in leaves(state) if isinstance(leaf, torch.Tensor))
    is_kept = processes.is_first or not (options.full_state_dict and options.cpu_offload)

    def finish(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if options.full_state_dict and isinstance(value, DTensor):
            value = _full_tensor(value)
        return value.cpu() if is_kept and options.cpu_offload else value if is_kept else None

    finished = map_leaves(state, finish)
    return finished if is_kept else {}


def checked_processes(tensors: Iterable[torch.Tensor]) -> Processes:
    """The processes of these tensors; raises for tensors that a state dict cannot contain."""
    outcome = Outcome()
    processes = processes_of(outcome, tensors)
    if outcome.error is not None:
        raise outcome.error
    return processes


def _full_tensor(tensor: DTensor) -> torch.Tensor:
    """The global tensor as a plain tensor. Collective: all ranks call it."""
    with torch.no_grad():
        full = tensor.full_tensor()
    first, *others = parts_of(full)
    if first is full:
        return full
    if any(not torch.equal(other, first) for other in others):
        raise CheckpointError(
            f"{tensor.spec} differs between the slices of its mesh, and a full state dict cannot contain it",
            hint="use a sharded state dict: full_state_dict=False",
        )
    return first.clone()


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor, sent by rank 0 before its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorToLoad:
    """A tensor to load: its source, whether it is wanted, and the tensor it replaces."""

    def __init__(self, source: torch.Tensor | TensorInfo) -> None:
        self.source = source
        self.is_wanted = False
        self.like: torch.Tensor | None = None
        self.value: Any = None

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return torch.Size(self.source.shape)

    def want(self, like: torch.Tensor | None) -> None:
        """Mark it as wanted; it replaces `like`, if that is known."""
        self.is_wanted, self.like = True, like

    def receive(self, processes: Processes | None) -> None:
        """Get the tensor, by broadcast from rank 0 if `processes` are given, and lay it out as `like`."""
        if not self.is_wanted:  # only its name or its wrong shape matters
            self.value = torch.empty(self.shape, dtype=self.source.dtype, device="meta")
            return
        tensor = self._sent(processes) if processes is not None and self.shape else self.source
        assert isinstance(tensor, torch.Tensor)
        if isinstance(self.like, DTensor) and self.like.shape == self.shape:
            laid_out = laid_out_as(tensor, self.like.spec)
            self.value = self._own(tensor) if laid_out is tensor else laid_out
        elif self.like is not None and isinstance(tensor, DTensor):
            self.value = _full_tensor(tensor)
        else:
            self.value = self._own(tensor)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor in this layout, unless it is the one that it replaces."""
        is_there = self.like is not None and memory_of(tensor) == memory_of(self.like)
        return tensor.detach() if is_there else tensor.detach().clone()

    def _sent(self, processes: Processes) -> torch.Tensor:
        source = self.source
        device = processes.device(torch.device("cpu") if self.like is None else self.like.device)
        if isinstance(source, TensorInfo):
            tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
        else:
            tensor = source.detach().to(device).contiguous()
        processes.broadcast_tensor(tensor)
        return tensor


def to_load(given: Any, processes: Processes, options: Any, *, own: bool = False) -> Any:
    """The state dict with a `TensorToLoad` for each tensor; the same on all ranks if rank 0 broadcasts it.

    With `own` each rank has the entries of its part of a model, which may be none, and nothing is compared.
    """
    if processes.alone or not options.broadcast_from_rank0:
        outcome = Outcome()
        outcome.value = bool(given)
        if not own and len(set(processes.exchange(outcome))) > 1:
            raise CheckpointError(
                "the state dict to load is empty on some ranks",
                hint="broadcast_from_rank0=True with full_state_dict=True broadcasts the one of rank 0",
            )
        return map_leaves(given, lambda value: TensorToLoad(value) if isinstance(value, torch.Tensor) else value)
    sharded = next((leaf for leaf in leaves(given) if isinstance(leaf, DTensor)), None) if processes.is_first else None
    if sharded is not None:
        sent: Any = CheckpointError(
            f"broadcast_from_rank0 sends full tensors, but the state dict of rank 0 contains {sharded.spec}",
            hint="get it with full_state_dict=True, or load it without broadcast_from_rank0",
        )
    else:
        sent = map_leaves(given, _announced) if processes.is_first else None
    received = processes.broadcast_object(sent)
    if isinstance(received, CheckpointError):
        raise received
    made = map_leaves(
        received, lambda value: TensorToLoad(value) if isinstance(value, TensorInfo | torch.Tensor) else value
    )
    if processes.is_first:
        for value, tensor in zip(leaves(made), leaves(given), strict=True):
            if isinstance(value, TensorToLoad):
                value.source = tensor
    return made


def _announced(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return TensorInfo(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()


def receive(wanted: Any, processes: Processes, options: Any) -> None:
    """Receive all values, in the same order on all ranks."""
    sender = processes if options.broadcast_from_rank0 and not processes.alone else None
    for value in leaves(wanted):
        if isinstance(value, TensorToLoad):
            value.receive(sender)
