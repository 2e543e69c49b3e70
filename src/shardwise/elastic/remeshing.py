"""`sw.remesh`: a state on another mesh, live or through a checkpoint.

Live, modules and optimizers are replaced by their state dicts, all tensors move as one transfer, and objects built on
the new mesh are filled. Ranks of the old mesh describe the state to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.json_values import Name, join
from shardwise.checkpoint.format.state_tree import StateTree, entries, expand, filled, rebuild, tensors_in
from shardwise.checkpoint.operations.load_checkpoint import load, open_index
from shardwise.checkpoint.operations.process_exchange import Outcome, processes_of
from shardwise.checkpoint.operations.unstepped_optimizer import room_for
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import LayoutError
from shardwise.fabric.base import fabric_of
from shardwise.factories import zeros
from shardwise.meshes.target_layouts import Dtype, Layouts, target_specs
from shardwise.meshes.transfers import BUCKET_BYTES, Progress, TransferPlan
from shardwise.tensor import DTensor
from shardwise.text import plural

__all__ = ["remesh"]

NAMED = 6  # names in an error


def remesh(
    state: Any,
    mesh: DeviceMesh,
    layouts: Layouts = None,
    *,
    into: Any = None,
    dtype: Dtype = None,
    bucket_bytes: int = BUCKET_BYTES,
    progress: Progress | None = None,
) -> Any:
    """Move a state to another mesh: from the ranks of the old mesh or, if these are lost, from a checkpoint.

    Every process of the job calls it, also those in only one of the meshes: a mesh may shrink, grow, or move to other
    ranks. Each byte is sent once, to the rank that needs it (`transfer`). Ranks that were not in the old mesh also
    receive numbers, other objects and plain tensors.

    Args:
        state: a nested dict of DTensors, plain tensors and objects, and of modules and optimizers; or the path of a
            checkpoint.
        mesh: the new mesh.
        layouts: the placements there, as in `transfer`, by names such as "model/layer.weight". Needed for a checkpoint,
            which has no layouts, unless `into` is given.
        into: the same state, built on the new mesh: modules with their `fully_shard` or plan there, and optimizers of
            their parameters, which need not have stepped. It is filled in place. Needed for modules and optimizers.
        dtype: the new dtype of floating-point tensors, as in `transfer`; tensors of `into` keep theirs.
        bucket_bytes: the memory limit for messages of a rank.
        progress: called with the bytes that this process has sent and received so far, and with their total.

    Returns:
        `into`, or the new state.

    Example:
        >>> import shardwise as sw
        >>> four = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        >>> three = sw.DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
        >>> def build(mesh):
        ...     model = sw.fully_shard(torch.nn.Linear(6, 6), mesh)
        ...     return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}
        >>> old = build(four) | {"step": 7}
        >>> new = sw.remesh(old, three, into=build(three))
        >>> new["model"].weight.device_mesh, new["step"]
        (DeviceMesh(cpu dp=3, virtual), 7)
        >>> torch.equal(new["model"].weight.full_tensor(), old["model"].weight.full_tensor())
        True
    """
    if isinstance(state, str | Path):
        return _from_checkpoint(Path(state), mesh, layouts, into, dtype)
    old, new = {"state": state}, None if into is None else {"state": into}
    found = _described(old)
    if new is None:
        _refuse_objects(found.tree)
        moved, objects = _moved(found, _targets(found, mesh, layouts, dtype), bucket_bytes, progress)
        return filled(found.tree.root, {**objects, **moved})["state"]
    _fill(found, new, mesh, bucket_bytes, progress)
    return new["state"]


class _Entry(NamedTuple):
    """The description of a value of a state, sent between ranks."""

    spec: DTensorSpec | None  # of a DTensor
    meta: TensorMeta | None  # of a plain tensor
    value: Any  # any other


class _Described(NamedTuple):
    """A state, and the description of all its values on all ranks.

    Args:
        tree: this process's state.
        entries: the values by path, as described by ranks that have them.
        home: the mesh whose ranks have the plain tensors and objects.
    """

    tree: StateTree
    entries: dict[Name, _Entry]
    home: DeviceMesh


def _described(state: dict[str, Any]) -> _Described:
    outcome = Outcome()
    tree = outcome.attempt(lambda: expand(state), StateTree({}, ()))
    values = dict(entries(tree.root))
    processes = processes_of(outcome, tensors_in(tree.root))
    known = {path: _entry(value) for path, value in values.items()}
    holds = any(entry.spec is not None and not fabric_of(entry.spec.mesh).is_outside(entry.spec.mesh)
                for entry in known.values())  # fmt: skip
    outcome.value = (holds, known)
    gathered, _ = processes.exchange_if_different(outcome, lambda: (holds, known))
    merged: dict[Name, _Entry] = {}
    for _, theirs in sorted(gathered, key=lambda one: not one[0]):  # holders first, each in the order of ranks
        for path, entry in theirs.items():
            merged.setdefault(path, entry)
    home = next((entry.spec.mesh.root for entry in merged.values() if entry.spec is not None), None)
    if home is None:
        raise LayoutError(
            "remesh: the state has no DTensor, so it is on no mesh",
            hint="distribute it: parallelize_module, fully_shard, ...",
        )
    return _Described(tree, merged, home)


def _entry(value: Any) -> _Entry:
    if isinstance(value, DTensor):
        return _Entry(value._spec, None, None)
    if isinstance(value, torch.Tensor):
        return _Entry(None, TensorMeta(tuple(value.shape), dtype=value.dtype), None)
    return _Entry(None, None, value)


def _refuse_objects(tree: StateTree) -> None:
    if tree.expanded:
        first = tree.expanded[0]
        raise LayoutError(
            f"remesh: {_name(first.path)!r} is a {type(first.owner).__name__}, which must be built on the new mesh",
            hint="build it there as on the old mesh, and pass a state with it as into=",
        )


def _targets(found: _Described, mesh: DeviceMesh, layouts: Layouts, dtype: Dtype) -> dict[Name, DTensorSpec]:
    """The specs on the new mesh, by the user's layouts. Plain tensors stay plain: replicated."""
    sources = {_name(path): entry.spec for path, entry in found.entries.items() if entry.spec is not None}
    made = target_specs(sources, mesh, layouts, dtype)
    targets = {path: made[_name(path)] for path, entry in found.entries.items() if entry.spec is not None}
    for path, entry in found.entries.items():
        if entry.meta is not None:
            targets[path] = DTensorSpec(mesh, [Replicate()] * mesh.ndim, entry.meta)
    return targets


def _moved(
    found: _Described,
    targets: Mapping[Name, DTensorSpec],
    bucket_bytes: int,
    progress: Progress | None,
    into: Mapping[Name, Any] | None = None,
) -> tuple[dict[Name, torch.Tensor], dict[Name, Any]]:
    """The tensors on the new mesh, plain ones as plain tensors; and the objects."""
    own = dict(entries(found.tree.root))
    sources = {path: _source(found, path, own.get(path)) for path in targets}
    specs = {_name(path): value if isinstance(value, DTensorSpec) else value._spec for path, value in sources.items()}
    plan = TransferPlan(specs, {_name(path): spec for path, spec in targets.items()}, bucket_bytes, None)
    state = {_name(path): value for path, value in sources.items()}
    given = None if into is None else {_name(path): into[path] for path in targets}
    results = plan.run(state, into=given, progress=progress)
    moved = {}
    for path, spec in targets.items():
        result = results[_name(path)]
        if found.entries[path].meta is not None and into is None:
            result = own[path] if fabric_of(spec.mesh).is_outside(spec.mesh) and path in own else _plain(result)
        moved[path] = result
    objects = {path: entry.value for path, entry in found.entries.items() if entry.spec is None and entry.meta is None}
    return moved, objects


def _source(found: _Described, path: Name, value: Any) -> Any:
    """A tensor of the state, a plain one as a replicated DTensor; its spec if this rank does not have it."""
    entry = found.entries[path]
    if entry.spec is not None:
        return value if isinstance(value, DTensor) and value._spec is entry.spec else entry.spec
    assert entry.meta is not None, "a tensor"
    spec = DTensorSpec(found.home, [Replicate()] * found.home.ndim, entry.meta)
    if fabric_of(found.home).is_outside(found.home):
        return spec
    return DTensor.from_local(value.detach().contiguous(), found.home, [Replicate()] * found.home.ndim)


def _plain(value: DTensor) -> torch.Tensor:
    """The value of a replicated DTensor."""
    return value.full_tensor()


def _fill(
    found: _Described, new: dict[str, Any], mesh: DeviceMesh, bucket_bytes: int, progress: Progress | None
) -> None:
    tree = expand(new, lambda owner, path: _state_dict(owner, path, found.entries), exact=False)
    there = dict(entries(tree.root))
    missing, surplus = [p for p in found.entries if p not in there], [p for p in there if p not in found.entries]
    if missing or surplus:
        raise LayoutError(
            f"remesh: `into` is another state: it lacks {_some(missing)}, and only it has {_some(surplus)}",
            hint="build the same modules and optimizers on the new mesh",
        )
    targets: dict[Name, DTensorSpec] = {}
    buffers: dict[Name, Any] = {}
    for path, entry in found.entries.items():
        if entry.spec is None and entry.meta is None:
            continue
        targets[path], buffers[path] = _room(path, entry, there[path], mesh)
    _, objects = _moved(found, targets, bucket_bytes, progress, buffers)
    for path, value in there.items():
        if path in buffers and buffers[path] is not value and not fabric_of(mesh).is_outside(mesh):
            with torch.no_grad():
                value.copy_(_plain(buffers[path]))
    for owner in tree.expanded:
        size = len(owner.path)
        own = {path[size:]: value for path, value in objects.items() if path[:size] == owner.path}
        if isinstance(owner.owner, torch.nn.Module):  # its tensors are filled in place
            if own:
                owner.owner.load_state_dict(filled(owner.state, own), strict=False)
        else:
            owner.owner.load_state_dict(filled(owner.state, own))
    filled(new, objects)


def _room(path: Name, entry: _Entry, value: Any, mesh: DeviceMesh) -> tuple[DTensorSpec, Any]:
    """The layout of a tensor of `into`, and the DTensor to write to: itself, or a replicated one for a plain tensor."""
    shape = entry.spec.shape if entry.spec is not None else entry.meta.shape if entry.meta is not None else ()
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        have = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise LayoutError(
            f"{_name(path)!r} has the shape {tuple(shape)}, and in `into` it is {have}",
            hint="build the same modules and optimizers on the new mesh",
        )
    if isinstance(value, DTensor):
        if not set(value._spec.mesh.root.grid_ranks) <= set(mesh.root.grid_ranks):
            raise LayoutError(
                f"{_name(path)!r} of `into` is on {value._spec.mesh}, which is not on the ranks of {mesh}",
                hint="build `into` on the mesh passed to remesh, or on slices of it",
            )
        return value._spec, value
    spec = DTensorSpec(mesh, [Replicate()] * mesh.ndim, TensorMeta(tuple(value.shape), dtype=value.dtype))
    fabric = fabric_of(mesh)
    if fabric.is_outside(mesh):
        return spec, DTensor.from_local(value.detach().new_empty(0), mesh, spec.placements, shape=value.shape)
    return spec, DTensor.from_local(torch.empty_like(value, device=mesh.device_type), mesh, spec.placements)


def _state_dict(owner: Any, path: Name, described: Mapping[Name, _Entry]) -> dict[Any, Any]:
    """The state dict of an object; for an optimizer that has not stepped, with empty tensors for its states."""
    state = owner.state_dict()
    if not isinstance(owner, torch.optim.Optimizer) or state["state"]:
        return state
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    made: dict[Any, Any] = {}
    for at, entry in described.items():
        inside = at[len(path) :]
        if at[: len(path)] != path or len(inside) != 3 or inside[0] != "state":
            continue
        meta = entry.spec.tensor_meta if entry.spec is not None else entry.meta
        room = None if meta is None else room_for(parameters[inside[1]], tuple(meta.shape), meta.dtype)
        made.setdefault(inside[1], {})[inside[2]] = room
    return {**state, "state": made}


def _from_checkpoint(path: Path, mesh: DeviceMesh, layouts: Layouts, into: Any, dtype: Dtype) -> Any:
    if into is not None:
        load(into, path)
        return into
    if layouts is None:
        raise LayoutError(
            f"remesh: the checkpoint {path.name} has no layouts",
            hint="pass layouts=, or as into= a state built on the new mesh",
        )
    index = open_index(path)
    on_rows = [Replicate()] * mesh.ndim
    sources = {
        name: DTensorSpec(mesh, on_rows, TensorMeta(stored.shape, dtype=stored.dtype))
        for name, stored in index.tensors.items()
    }
    targets = target_specs(sources, mesh, layouts, None)
    tensors = {name: _empty(spec) for name, spec in targets.items()}
    state = rebuild(index.state, tensors)
    load(state, path)
    if dtype is None:
        return state
    wanted = target_specs(targets, mesh, lambda name, spec: spec, dtype)
    changed = {name: tensor.to(wanted[name].tensor_meta.dtype) for name, tensor in tensors.items()}
    return rebuild(index.state, changed)


def _empty(spec: DTensorSpec) -> DTensor:
    from_factory: Callable[..., Any] = zeros
    return from_factory(*spec.shape, dtype=spec.tensor_meta.dtype, device_mesh=spec.mesh, placements=spec.placements)


def _name(path: Name) -> str:
    """The name of an entry for users, without the outermost dict, which `remesh` adds."""
    return join(path[1:])


def _some(paths: list[Name]) -> str:
    if not paths:
        return "nothing"
    more = f" and {plural(len(paths) - NAMED, 'other')}" if len(paths) > NAMED else ""
    return ", ".join(_name(path) for path in paths[:NAMED]) + more
