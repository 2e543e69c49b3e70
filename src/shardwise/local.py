"""How an operator runs on locals: once here, or once for each virtual rank; on a dry run, on meta tensors.

Knows nothing of how layouts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from shardwise.core.layout import dense_strides
from shardwise.core.mesh import Coordinate, DeviceMesh
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.fabric.dry import dry
from shardwise.fabric.virtual import RankTensor, virtual
from shardwise.schema import OpInfo, Slot

__all__ = ["any_complex", "coordinates_here", "laid_out_like", "like", "local_runner", "seeing_conjugates"]


def any_complex(*specs: Sequence[DTensorSpec]) -> bool:
    return any(spec.tensor_meta.dtype.is_complex for group in specs for spec in group)


def seeing_conjugates(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` run so that what it does inside sees the conjugate and negative bits; its results carry none."""
    hide = torch._C._dispatch_tls_set_dispatch_key_excluded
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)

    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
        for key in keys:
            hide(key, False)
        try:
            result = op(*args, **kwargs)
            return tree_map(lambda t: t.resolve_conj().resolve_neg() if isinstance(t, torch.Tensor) else t, result)
        finally:
            for key, was in zip(keys, hidden, strict=True):
                hide(key, was)

    return run


def like(results: Any, items: Iterator[Any]) -> Any:
    """A list for a list, a tuple for any kind of tuple."""
    return list(items) if isinstance(results, list) else tuple(items)


def laid_out_like(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy of a local with its dims in memory in the order of these strides."""
    if isinstance(local, RankTensor):
        return RankTensor([laid_out_like(tensor, stride) for tensor in local.tensors])
    made = local.new_empty_strided(local.shape, dense_strides(local.shape, like=stride))
    return made.copy_(local)


def coordinates_here(mesh: DeviceMesh) -> list[Coordinate]:
    """The coordinates of the ranks that run in this process."""
    return fabric_of(mesh).coordinates(mesh)


def local_runner(
    info: OpInfo,
    slots: tuple[Slot, ...],
    patches: Mapping[Coordinate, Mapping[str, Any]] | None,
    mesh: DeviceMesh,
    draws: bool,
) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any], list[torch.Tensor]], Any]:
    """How an operator is run on locals: once here, or once for each virtual rank."""
    here = coordinates_here(mesh)
    lockstep = mesh.fabric == virtual.name
    is_dry = mesh.fabric == dry.name

    def fill(
        args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: Sequence[Any], coordinate: Coordinate
    ) -> tuple[list[Any], dict[str, Any]]:
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, local in zip(slots, locals_, strict=True):
            slot.put(new_args, new_kwargs, local)
        for name, value in patches[coordinate].items() if patches is not None else ():
            index = info.names.index(name) if name in info.names else len(new_args)
            if index < len(new_args):
                new_args[index] = value
            else:
                new_kwargs[name] = value
        return new_args, new_kwargs

    def run_here(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        if not here:  # outside the mesh: hold nothing
            return tuple(torch.empty(0) for _ in info.returns) if len(info.returns) > 1 else torch.empty(0)
        new_args, new_kwargs = fill(args, kwargs, locals_, here[0])
        if is_dry and "device" in new_kwargs:
            new_kwargs["device"] = torch.device("meta")
        results = op(*new_args, **new_kwargs)
        if is_dry:
            for result in results if isinstance(results, tuple | list) else (results,):
                if isinstance(result, torch.Tensor):
                    dry.track(result)
        return results

    def run_once(
        op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor], columns: list[Any]
    ) -> Any:
        """Random numbers are drawn once, on operands that all ranks hold alike, and given to every rank."""
        mine = [local if column is None else column[0] for local, column in zip(locals_, columns, strict=True)]
        new_args, new_kwargs = fill(args, kwargs, mine, here[0])
        result = op(*new_args, **new_kwargs)
        for slot, column in zip(slots, columns, strict=True):
            if slot.name in info.writes and column is not None:
                for other in column[1:]:
                    other.copy_(column[0])
        return _together([tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, result) for _ in here])

    def run_lockstep(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], locals_: list[torch.Tensor]) -> Any:
        columns = [local.tensors if isinstance(local, RankTensor) else None for local in locals_]
        if draws:
            return run_once(op, args, kwargs, locals_, columns)
        results = []
        for position, coordinate in enumerate(here):
            mine = [
                local if column is None else column[position] for local, column in zip(locals_, columns, strict=True)
            ]
            new_args, new_kwargs = fill(args, kwargs, mine, coordinate)
            results.append(op(*new_args, **new_kwargs))
        return _together(results)

    return run_lockstep if lockstep else run_here


def _together(results: list[Any]) -> Any:
    """The results of all virtual ranks as one: tensors as a `RankTensor`, sequences item by item, others the first."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        return RankTensor(results)
    if isinstance(first, tuple | list):
        return like(first, (_together([result[i] for result in results]) for i in range(len(first))))
    return first
