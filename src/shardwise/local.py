"""Helpers for operators on locals: their arguments, conjugate bits, empty operands, order in memory.

The fabric runs them; layouts have been chosen before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.dispatch_keys import seeing
from shardwise.core.layout import dense_strides
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import OperatorRunner, fabric_of
from shardwise.fabric.rank_tensor import map_parts, parts_of
from shardwise.fabric.shared_writes import written_arguments
from shardwise.schema import OpInfo, Slot
from shardwise.torch_private import DispatchKey, tree_leaves, tree_map

__all__ = [
    "any_complex", "coordinates_here", "in_order_of", "laid_out_like", "like", "local_runner",
    "seeing_conjugates", "sparing_empty", "stored_zeros",
]  # fmt: skip


def any_complex(*specs: Sequence[DTensorSpec]) -> bool:
    """Whether some of these tensors are complex: only these have conjugate and negative bits."""
    return any(spec.tensor_meta.dtype.is_complex for group in specs for spec in group)


def seeing_conjugates(op: Callable[..., Any]) -> Callable[..., Any]:
    """Run `op` so that operators inside it see conjugate and negative bits; its results have none."""

    def run_resolving_conjugates(*args: Any, **kwargs: Any) -> Any:
        with seeing(DispatchKey.Conjugate, DispatchKey.Negative):
            result = op(*args, **kwargs)
            return tree_map(lambda t: t.resolve_conj().resolve_neg() if isinstance(t, torch.Tensor) else t, result)

    return run_resolving_conjugates


def sparing_empty(info: OpInfo, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` on one rank's tensors; it is not called if all its results are empty.

    The shapes are computed on meta tensors. Written arguments are returned unchanged.
    """

    def run_unless_empty(*args: Any, **kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        if all(tensor.numel() for tensor in given) or any(tensor.is_meta for tensor in given):
            return op(*args, **kwargs)
        if info.writes:
            bound = info.bind(args, kwargs)
            written = _tensors([bound[name] for name in info.writes])
            if None in info.returned or any(tensor.numel() for tensor in written):
                return op(*args, **kwargs)
            items = tuple(bound[name] for name in info.returned if name is not None)
            return None if not items else items[0] if len(items) == 1 else items
        meta_args, meta_kwargs = tree_map(_on_meta, (args, kwargs))
        try:
            results = op(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError, TypeError):  # it reads values, or cannot run on meta tensors
            return op(*args, **kwargs)
        if any(tensor.numel() for tensor in _tensors(results)):
            return op(*args, **kwargs)
        return tree_map(lambda result: _empty_on(given[0].device, result), results)

    return run_unless_empty


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _empty_on(device: torch.device, result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device)


def like(results: Any, items: Iterator[Any]) -> Any:
    """`items` as a list if `results` is a list, else as a tuple."""
    return list(items) if isinstance(results, list) else tuple(items)


def laid_out_like(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy of a local with the memory order of these strides."""

    def copied(part: torch.Tensor) -> torch.Tensor:
        return part.new_empty_strided(part.shape, dense_strides(part.shape, like=stride)).copy_(part)

    return map_parts(copied, local)


def in_order_of(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A local with the memory order of these strides; copied only if its order differs."""
    parts = parts_of(local)
    is_ordered = all(part.stride() == dense_strides(part.shape, like=stride) for part in parts)
    return local if is_ordered else laid_out_like(local, stride)


def coordinates_here(mesh: DeviceMesh) -> list[Coordinate]:
    """The coordinates of the ranks that run in this process."""
    return fabric_of(mesh).coordinates(mesh)


def local_runner(
    info: OpInfo,
    slots: tuple[Slot, ...],
    patches: Mapping[Coordinate, Mapping[str, Any]] | None,
    mesh: DeviceMesh,
    draws: bool,
) -> OperatorRunner:
    """The function that runs an operator on locals.

    Args:
        info: the operator's schema.
        slots: the positions of the locals in its arguments.
        patches: for each coordinate the plain arguments to be replaced.
        mesh: the mesh whose ranks run it.
        draws: whether it draws random numbers, once for all ranks.
    """
    return fabric_of(mesh).operator_runner(_Operator(info, slots, patches, coordinates_here(mesh)), draws)


class _Operator:
    """An operator with the positions of its locals, for the ranks of this process."""

    __slots__ = ("names", "op", "own", "slots", "written")

    def __init__(
        self,
        info: OpInfo,
        slots: tuple[Slot, ...],
        patches: Mapping[Coordinate, Mapping[str, Any]] | None,
        coordinates: list[Coordinate],
    ) -> None:
        self.op, self.names, self.slots = info.op, info.names, slots
        self.own: Sequence[Mapping[str, Any]] = [{} if patches is None else patches[at] for at in coordinates]
        names = written_arguments(info.op)
        self.written: Sequence[tuple[int, str]] = [(i, slot.name) for i, slot in enumerate(slots) if slot.name in names]

    def arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call on one rank, with its tensors and its replaced arguments."""
        names, new_args, new_kwargs = self.names, list(args), dict(kwargs)
        for slot, local in zip(self.slots, tensors, strict=True):
            slot.put(new_args, new_kwargs, local)
        for name, value in own.items():
            index = names.index(name) if name in names else len(new_args)
            if index < len(new_args):
                new_args[index] = value
            else:
                new_kwargs[name] = value
        return new_args, new_kwargs


def stored_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with memory. Zeros of forward mode have none, and kernels on locals do not check for that."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if tensor._is_zerotensor() else tensor
