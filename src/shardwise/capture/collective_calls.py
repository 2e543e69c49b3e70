"""The collectives of a recorded program: kind, group, bytes that a rank receives, modelled seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwise.capture.call_sites import NOWHERE, Site
from shardwise.capture.tape import Call, Geometry, Ref
from shardwise.core.mesh import DeviceMesh
from shardwise.debug.recording.records import MoveRecord
from shardwise.plan.cost import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    current_cost_model,
    reduce_scatter_bytes,
)
from shardwise.torch_private import tree_leaves

__all__ = [
    "Collective",
    "axes_of",
    "bound_arguments",
    "collective_kind",
    "described",
    "group_ranks",
    "is_collective",
    "of_route",
]

_KINDS = {
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
}


class Collective(NamedTuple):
    """One collective of a program.

    Args:
        position: of its call in the program; on virtual ranks, of the first of its copies.
        kind: `all_reduce`, `all_gather`, ...
        over: the mesh axes of its group, `tp` or `dp x tp`; else the ranks.
        ranks: how many ranks are in the group.
        received: bytes that a rank receives.
        seconds: by the cost model.
        site: the user's line, phase and module.
    """

    position: int
    kind: str
    over: str
    ranks: int
    received: float
    seconds: float
    site: Site


def is_collective(call: Any) -> bool:
    """Whether a call of a program communicates."""
    return isinstance(call, Call) and call.op.namespace == "c10d"


def collective_kind(call: Call) -> str:
    """The name of a collective, as `all_gather`."""
    name = str(call.op._opname).removesuffix("_")
    return _KINDS.get(name) or name.strip("_")


def bound_arguments(call: Call) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return dict(zip([argument.name for argument in call.op._schema.arguments], call.args, strict=False)) | call.kwargs


def group_ranks(call: Call) -> tuple[int, ...]:
    """The ranks of the world that take part in a collective."""
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(bound_arguments(call)["process_group"])))


def described(
    position: int,
    call: Call,
    site: Site | None,
    geometry: Mapping[int, Geometry],
    meshes: Sequence[DeviceMesh],
) -> Collective:
    """What a recorded call of a process group is."""
    ranks = group_ranks(call)
    kind, received = collective_kind(call), _received(call, len(ranks), geometry)
    mesh, axes = axes_of(ranks, meshes)
    if mesh is None:
        over, seconds = f"ranks {_short(ranks)}", math.nan
    else:
        over = " x ".join(mesh.axis_name(axis) for axis in axes)
        seconds = current_cost_model().seconds(mesh, axes, received)
    return Collective(position, kind, over, len(ranks), received, seconds, site or NOWHERE)


def of_route(position: int, site: Site, move: MoveRecord) -> Collective:
    """A collective that was announced by a route."""
    return Collective(position, move.collective, move.axis, move.group, move.received, move.seconds, site)


def axes_of(ranks: tuple[int, ...], meshes: Iterable[DeviceMesh]) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """A mesh and its axes along which these ranks are one group."""
    wanted = sorted(ranks)
    for mesh in meshes:
        position = mesh.position_of(wanted[0])
        if position is None:
            continue
        for count in range(1, mesh.ndim + 1):
            for axes in itertools.combinations(range(mesh.ndim), count):
                if sorted(mesh.grid_ranks[at] for at in mesh.group_through(axes, position)) == wanted:
                    return mesh, axes
    return None, ()


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, ... {ranks[-1]} ({len(ranks)})"


def _received(call: Call, ranks: int, geometry: Mapping[int, Geometry]) -> float:
    given = bound_arguments(call)

    def size(*names: str) -> float:
        found = [leaf for name in names for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Ref)]
        return float(sum(_bytes(geometry[ref.number]) for ref in found))

    match call.op._opname:
        case "_allgather_base_":
            return all_gather_bytes(ranks, size("input_tensor"))
        case "_reduce_scatter_base_":
            return reduce_scatter_bytes(ranks, size("output_tensor"))
        case "allreduce_" | "allreduce_coalesced_":
            return all_reduce_bytes(ranks, size("tensors"))
        case "alltoall_base_":
            return _all_to_all(given, ranks, size("output"))
        case _:
            return size(*[name for name in given if name.startswith(("output", "tensor"))])


def _all_to_all(given: Mapping[str, Any], ranks: int, held: float) -> float:
    got = list(given["output_split_sizes"])
    if not sum(got):
        return all_to_all_bytes(ranks, held)
    group = dist.ProcessGroup.unbox(given["process_group"])
    return held * (1 - got[group.rank()] / sum(got))


def _bytes(geometry: Geometry) -> int:
    return math.prod(geometry.shape) * geometry.dtype.itemsize
