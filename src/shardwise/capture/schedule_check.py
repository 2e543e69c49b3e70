"""Agreement of ranks on the collectives of their programs, before a program with other collectives is used.

Which collectives a program has must be the same on all ranks of a group. A pass that leaves out, joins or moves some
decides by the local program, and programs of ranks may differ.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist

from shardwise.capture.collective_calls import axes_of, group_ranks, is_collective
from shardwise.capture.program import Program
from shardwise.capture.tape import Call, refs_of
from shardwise.core.mesh import DeviceMesh
from shardwise.errors import UnsupportedError
from shardwise.fabric.base import fabric_of

__all__ = ["check_collectives", "check_refusals", "schedule_of"]

_ORDER = "order"


def schedule_of(program: Program) -> dict[tuple[int, ...], list[tuple[Any, ...]]]:
    """For each group of ranks the collectives of a program, in order: operator, shapes, dtypes, reduction."""
    found: dict[tuple[int, ...], list[tuple[Any, ...]]] = {}
    geometry = program.facts.geometry
    for _, call in program.calls:
        if not isinstance(call, Call) or not is_collective(call):
            continue
        places = [geometry[ref.number] for ref in refs_of(call)]
        reduction = None if call.expected is None else call.expected.reduceOp.op.name
        sizes = () if call.op._opname == "alltoall_base_" else tuple(math.prod(place.shape) for place in places)
        event = (call.op._opname, sizes, tuple(str(place.dtype) for place in places), reduction)
        found.setdefault(group_ranks(call), []).append(event)
    return found


def _order_of(program: Program, among: frozenset[int]) -> list[tuple[str, str]]:
    """The collectives among some ranks as all of them see them: operator, and mesh axes in place of groups.

    Ranks with the same order cannot block each other, also where their collectives are of several groups.
    """
    meshes = program.facts.meshes
    found: list[tuple[str, str]] = []
    for _, call in program.calls:
        if is_collective(call) and among.issuperset(ranks := group_ranks(call)):  # pyright: ignore[reportArgumentType]
            mesh, axes = axes_of(ranks, meshes)
            over = "ranks" if mesh is None else " x ".join(mesh.axis_name(axis) for axis in axes)
            found.append((call.op._opname, over))  # pyright: ignore[reportAttributeAccessIssue]
    return found


def check_collectives(program: Program, options: str, moved: bool = False) -> None:
    """Raise where ranks do not have the same collectives. All ranks of the program's meshes take part.

    Args:
        program: of this rank.
        options: the passes that have changed its collectives, for the message.
        moved: whether collectives of one group may have passed those of another. Then their order over all
            groups must be the same on all ranks of a mesh.
    """
    mine: dict[Any, str] = {ranks: _digest(events) for ranks, events in schedule_of(program).items()}
    for ranks, mesh in _compared(program):
        facts = mine | {_ORDER: _digest(_order_of(program, ranks))} if moved else mine
        for other in _exchanged(mesh, facts):
            for group in facts.keys() & other.keys():
                if facts[group] != other[group]:
                    raise UnsupportedError(
                        f"captured: the ranks {sorted(ranks) if group == _ORDER else list(group)} would not issue the "
                        f"same collectives with {options}",
                        hint=f"they have different local programs; capture the function without {options}",
                    )


def check_refusals(program: Program, refused: UnsupportedError | None) -> None:
    """Raise on all ranks of the program's meshes where one of them refuses its program. All of them take part.

    Args:
        program: of this rank.
        refused: why this rank refuses it; None if it does not.
    """
    mine = "" if refused is None else str(refused)
    found = [other["refused"] for _, mesh in _compared(program) for other in _exchanged(mesh, {"refused": mine})]
    if refused is not None:
        raise refused
    if others := sorted({other for other in found if other}):
        raise UnsupportedError(f"another rank refuses its program: {others[0]}")


def _compared(program: Program) -> list[tuple[frozenset[int], DeviceMesh]]:
    """The meshes over which ranks compare their programs, with the ranks: those that are in no larger one."""
    over = {_participants(mesh): mesh for mesh in reversed(program.facts.meshes)}
    return [(ranks, mesh) for ranks, mesh in reversed(over.items()) if not any(ranks < others for others in over)]


def _exchanged(mesh: DeviceMesh, facts: dict[Any, str]) -> list[dict[Any, str]]:
    """The facts of all ranks."""
    return fabric_of(mesh).agree(mesh, facts, torch.empty(0, device=mesh.device_type))


def _digest(events: object) -> str:
    return hashlib.sha256(repr(events).encode()).hexdigest()


def _participants(mesh: DeviceMesh) -> frozenset[int]:
    """The ranks that this one compares itself with over a mesh."""
    position = mesh.position_of(fabric_of(mesh).rank()) if dist.is_initialized() else 0
    if position is None:
        return frozenset()
    return frozenset(int(mesh.grid_ranks[at]) for at in mesh.group_through(tuple(range(mesh.ndim)), position))
