"""How an operator runs on locals: once here, or once for each virtual rank; on a dry run, on meta tensors.

Knows nothing of how layouts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.fabric.dry import dry
from shardwise.fabric.nondeterministic import is_nondeterministic
from shardwise.fabric.shared_writes import written_arguments
from shardwise.fabric.virtual import RankTensor, map_parts, parts_of, run_rows, together
from shardwise.schema import OpInfo, Slot
from shardwise.torch_private import DispatchKey, is_key_excluded, set_key_excluded, tree_leaves, tree_map

__all__ = [
    "any_complex", "coordinates_here", "in_order_of", "laid_out_like", "like", "local_runner", "seeing_conjugates",
    "sparing_empty", "stored_zeros",
]  # fmt: skip

Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any], list[torch.Tensor]], Any]  # operator, arguments, locals


def any_complex(*specs: Sequence[DTensorSpec]) -> bool:
    """Whether some of these tensors hold complex numbers, which alone have the conjugate and negative bits."""
    return any(spec.tensor_meta.dtype.is_complex for group in specs for spec in group)


def seeing_conjugates(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` run so that what it does inside sees the conjugate and negative bits; its results carry none."""
    keys = (DispatchKey.Conjugate, DispatchKey.Negative)

    def run_resolving_conjugates(*args: Any, **kwargs: Any) -> Any:
        hidden = [is_key_excluded(key) for key in keys]
        for key in keys:
            set_key_excluded(key, False)
        try:
            result = op(*args, **kwargs)
            return tree_map(lambda t: t.resolve_conj().resolve_neg() if isinstance(t, torch.Tensor) else t, result)
        finally:
            for key, was in zip(keys, hidden, strict=True):
                set_key_excluded(key, was)

    return run_resolving_conjugates


def sparing_empty(info: OpInfo, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` on one rank's tensors, which is not called where everything that it gives is empty.

    The shapes are found on meta tensors. What is written to is given back as it is.
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
        except (NotImplementedError, RuntimeError, TypeError):  # it looks at values, or cannot run on meta tensors
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
    """A list for a list, a tuple for any kind of tuple."""
    return list(items) if isinstance(results, list) else tuple(items)


def laid_out_like(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy of a local with its dims in memory in the order of these strides."""

    def copied(part: torch.Tensor) -> torch.Tensor:
        return part.new_empty_strided(part.shape, dense_strides(part.shape, like=stride)).copy_(part)

    return map_parts(copied, local)


def in_order_of(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A local with its dims in memory in the order of these strides; itself where they are so."""
    parts = parts_of(local)
    is_so = all(part.stride() == dense_strides(part.shape, like=stride) for part in parts)
    return local if is_so else laid_out_like(local, stride)


def coordinates_here(mesh: DeviceMesh) -> list[Coordinate]:
    """The coordinates of the ranks that run in this process."""
    return fabric_of(mesh).coordinates(mesh)


def local_runner(
    info: OpInfo,
    slots: tuple[Slot, ...],
    patches: Mapping[Coordinate, Mapping[str, Any]] | None,
    mesh: DeviceMesh,
    draws: bool,
) -> Run:
    """How an operator is run on locals.

    Args:
        info: the operator's facts.
        slots: where the locals go in its arguments.
        patches: for each coordinate the plain arguments to be replaced.
        mesh: whose ranks run it.
        draws: whether it draws random numbers, once for all ranks.
    """
    runner = _Runner(info, slots, patches, coordinates_here(mesh))
    fabric = fabric_of(mesh)
    if fabric.many_ranks:
        return runner.run_once if draws else runner.run_on_each
    return runner.run_here if fabric.has_values else runner.run_dry


class _Runner:
    """An operator with the places of its locals, for the ranks at the coordinates here."""

    __slots__ = ("info", "own", "slots", "written")

    def __init__(
        self,
        info: OpInfo,
        slots: tuple[Slot, ...],
        patches: Mapping[Coordinate, Mapping[str, Any]] | None,
        coordinates: list[Coordinate],
    ) -> None:
        self.info, self.slots = info, slots
        self.own = [{} if patches is None else patches[at] for at in coordinates]  # each rank's plain arguments
        self.written = [(i, slot.name) for i, slot in enumerate(slots) if slot.name in written_arguments(info.op)]

    def arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """What the operator is called with on a rank: its locals, and the plain arguments that are its own."""
        names, new_args, new_kwargs = self.info.names, list(args), dict(kwargs)
        for slot, local in zip(self.slots, locals_, strict=True):
            slot.put(new_args, new_kwargs, local)
        for name, value in own.items():
            index = names.index(name) if name in names else len(new_args)
            if index < len(new_args):
                new_args[index] = value
            else:
                new_kwargs[name] = value
        return new_args, new_kwargs

    def run_here(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        """On the one rank of this process."""
        new_args, new_kwargs = self.arguments(args, kwargs, locals_, self.own[0])
        return op(*new_args, **new_kwargs)

    def run_dry(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        """On meta tensors, which are counted."""
        new_args, new_kwargs = self.arguments(args, kwargs, locals_, self.own[0])
        if "device" in new_kwargs:
            new_kwargs["device"] = torch.device("meta")
        results = op(*new_args, **new_kwargs)
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor):
                dry.track(result)
        return results

    def run_on_each(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]
    ) -> Any:
        """On one virtual rank after the other."""
        columns = _columns(locals_)
        rows = [[*_row(locals_, columns, i), own] for i, own in enumerate(self.own)]

        def call(row: Sequence[Any]) -> Any:
            new_args, new_kwargs = self.arguments(args, kwargs, row[:-1], row[-1])
            return op(*new_args, **new_kwargs)

        func = self.info.op if is_nondeterministic(self.info.op) else op  # `op` may be a function around it
        return together(run_rows(func, rows, call, self.written), lambda values: values[0])

    def run_once(self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        """Random numbers are drawn once, on operands that all virtual ranks hold alike, and given to every rank."""
        columns = _columns(locals_)
        new_args, new_kwargs = self.arguments(args, kwargs, _row(locals_, columns, 0), self.own[0])
        result = op(*new_args, **new_kwargs)
        for slot, column in zip(self.slots, columns, strict=True):
            if slot.name in self.info.writes and column is not None:
                for other in column[1:]:
                    other.copy_(column[0])
        copies = [tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, result) for _ in self.own]
        return together(copies, lambda values: values[0])


def _columns(locals_: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor] | None]:
    """Of each local the tensors of all virtual ranks; None for a plain one, which every rank has."""
    return [local.tensors if isinstance(local, RankTensor) else None for local in locals_]


def _row(locals_: Sequence[torch.Tensor], columns: Sequence[Sequence[torch.Tensor] | None], position: int) -> list[Any]:
    """What the virtual rank at a position has of each local."""
    return [local if column is None else column[position] for local, column in zip(locals_, columns, strict=True)]


def stored_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has memory. The zeros that forward mode makes have none, which kernels on locals do not see."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if tensor._is_zerotensor() else tensor
