"""The layouts of tensors on another mesh: given for each, by pattern, by a function, or by names of axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Owned, Partial, Placement, Ragged, Replicate
from shardwise.core.spec import DTensorSpec, TensorMeta, known_dense
from shardwise.errors import LayoutError
from shardwise.tensor import DTensor

__all__ = ["Dtype", "Layouts", "same_axes", "target_specs"]

# Of floating-point tensors, or a function of the name and the spec; None: unchanged.
Dtype = torch.dtype | Callable[[str, DTensorSpec], torch.dtype | None] | None
# Placements for all tensors; by name or pattern; a function of the name and the spec; None: those of the same axes.
Layouts = Sequence[Placement] | Mapping[str, Any] | Callable[[str, DTensorSpec], Any] | None


def target_specs(
    sources: Mapping[str, DTensorSpec], mesh: DeviceMesh, layouts: Layouts, dtype: Dtype
) -> dict[str, DTensorSpec]:
    """The spec of each tensor on `mesh`."""
    chosen = _by_pattern(sources, layouts) if isinstance(layouts, Mapping) else None
    found: dict[str, DTensorSpec] = {}
    for name, source in sources.items():
        if chosen is not None:
            layout = chosen.get(name)
        elif callable(layouts):
            layout = layouts(name, source)
        else:
            layout = layouts
        meta = known_dense(source.tensor_meta)
        if isinstance(dtype, torch.dtype):
            wanted = dtype if meta.dtype.is_floating_point else None
        else:
            wanted = None if dtype is None else dtype(name, source)
        if wanted is not None:
            meta = TensorMeta(meta.shape, meta.stride, wanted)
        found[name] = _checked(name, source, _spec(name, source, mesh, layout, meta))
    return found


def _by_pattern(sources: Mapping[str, DTensorSpec], layouts: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of each name: that of the name itself, else of the first pattern that matches."""
    found: dict[str, Any] = {}
    for name in sources:
        pattern = name if name in layouts else next((p for p in layouts if fnmatchcase(name, p)), None)
        if pattern is not None:
            found[name] = layouts[pattern]
    idle = [p for p in layouts if p not in sources and not any(fnmatchcase(name, p) for name in sources)]
    if idle:
        raise LayoutError(
            f"layouts: no tensor is named {', '.join(map(repr, idle))}",
            hint=f"names are {', '.join(list(sources)[:6])}{', ...' if len(sources) > 6 else ''}; * matches any part",
        )
    return found


def _spec(name: str, source: DTensorSpec, mesh: DeviceMesh, layout: Any, meta: TensorMeta) -> DTensorSpec:
    if layout is None:
        return same_axes(name, source, mesh, meta)
    spec = layout._spec if isinstance(layout, DTensor) else layout
    if isinstance(spec, DTensorSpec):
        if spec.mesh is not mesh or spec.shape != source.shape:
            raise LayoutError(
                f"layouts: {name!r} is {source}, and cannot become {spec} on {spec.mesh}",
                hint=f"pass a tensor of the same shape on {mesh}, or placements",
            )
        return spec.materialized().with_meta(meta)
    try:
        return DTensorSpec(mesh, spec, meta)
    except LayoutError as error:
        raise LayoutError(f"layouts: {name!r}: {error.problem}", hint=error.hint) from error


def same_axes(name: str, source: DTensorSpec, mesh: DeviceMesh, meta: TensorMeta) -> DTensorSpec:
    """The layout with the same placement on every axis of the same name; other axes are replicated.

    Example:
        >>> from shardwise.core.placement import Shard
        >>> trainer = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> source = DTensorSpec(trainer, [Shard(0), Shard(1)], TensorMeta((8, 8)))
        >>> same_axes("w", source, DeviceMesh("cpu", [4, 5, 6], mesh_dim_names=("tp",)), source.tensor_meta)
        f32[8,8] tp:S1
    """
    old = source.mesh
    if old.mesh_dim_names is None and mesh.mesh_dim_names is None and old.ndim == mesh.ndim:
        to = {axis: axis for axis in range(mesh.ndim)}
    elif old.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise LayoutError(
            f"the axes of {old} and {mesh} cannot be matched by name, so the layout of {name!r} is not known",
            hint="pass layouts: placements for each tensor, a dict of patterns, or a function of name and spec",
        )
    else:
        names = mesh.mesh_dim_names
        to = {axis: names.index(axis_name) for axis, axis_name in enumerate(old.mesh_dim_names) if axis_name in names}
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, new in to.items():
        placement = source.placements[axis]
        if isinstance(placement, Ragged | Owned) and old.shape[axis] != mesh.shape[new]:
            raise LayoutError(
                f"{name!r} is {source}: {placement!r} is for {old.shape[axis]} ranks, and axis "
                f"{mesh.axis_name(new)!r} of {mesh} has {mesh.shape[new]}",
                hint=f"pass its placements on the new mesh: layouts={{{name!r}: [...]}}",
            )
        placements[new] = placement
    order = [tuple(to[axis] for axis in axes if axis in to) for axes in source.dim_axes]
    return DTensorSpec.from_dim_axes(mesh, tuple(placements), meta, order)


def _checked(name: str, source: DTensorSpec, target: DTensorSpec) -> DTensorSpec:
    for spec, what in ((source, "now"), (target, "afterwards")):
        if any(isinstance(placement, Partial) for placement in spec.placements):
            raise LayoutError(
                f"{name!r} would be Partial {what}: {spec}",
                hint="reduce it first, by redistribute() to Shard() or Replicate()",
            )
    return target
