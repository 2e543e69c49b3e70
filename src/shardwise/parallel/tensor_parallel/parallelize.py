"""parallelize_module: a plan from names of modules to styles. All of it is checked before anything is changed."""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shardwise.api import mark_replaced, parameters_of
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.errors import LayoutError, MeshError
from shardwise.fabric.world import as_mesh
from shardwise.parallel.tensor_parallel.adapters import convert_around_adapters
from shardwise.parallel.tensor_parallel.module_parameters import check_parameters, keep_one_gradient, update_ties
from shardwise.parallel.tensor_parallel.style import STYLES, ParallelStyle

__all__ = ["loss_parallel", "parallelize_module"]

Plan = ParallelStyle | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """A module that a plan names, and its style."""

    path: str
    module: nn.Module
    style: ParallelStyle

    @property
    def who(self) -> str:
        """The module, for errors."""
        return f"module {self.path!r} ({type(self.module).__name__}), {type(self.style).__name__}"


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Plan = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Parallelize a module, in place, by a plan.

    Args:
        module: the module. It may be on the meta device: then no rank ever has a full parameter.
        device_mesh: a mesh of one axis: `mesh["tp"]` where there are several.
        parallelize_plan: a style for the module itself, or a dict from the paths of submodules to styles. Each part
            of a path may have wildcards (`"layers.*.mlp.w[13]"`), `""` is the module itself, and a dict in place of a
            style is a plan for that submodule. A path without a match gives a warning.
        src_data_rank: the rank of the mesh whose parameter values are used. None: each rank's own.

    Returns:
        The module.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> mlp = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> mlp[0].weight.spec, mlp[2].weight.spec
        (f32[32,8] S0, f32[8,32] S1)
    """
    if parallelize_plan is None:
        warnings.warn("parallelize_module without a parallelize_plan does nothing", stacklevel=2)
        return module
    mesh = _one_axis(as_mesh(device_mesh))
    before = parameters_of("parallelize_module", module)
    unknown: list[str] = []
    entries = list(_entries(module, "", parallelize_plan, unknown))
    for key in unknown:
        warnings.warn(_not_found(key, module), stacklevel=2)
    fresh = _checked(entries, mesh)
    for entry in fresh:
        entry.style.src_data_rank = src_data_rank
        entry.style._apply(entry.module, mesh)
        attributes = entry.module.__dict__
        attributes[STYLES] = (*attributes.get(STYLES, ()), (repr(entry.style), mesh))
    convert_around_adapters(module)
    update_ties(module)
    mark_replaced("parallelize_module", before, module)
    keep_one_gradient(module.named_parameters(), mesh)
    return module


def _one_axis(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim != 1:
        name = "tp" if "tp" in (mesh.mesh_dim_names or ()) else mesh.axis_name(mesh.ndim - 1)
        raise MeshError(f"a plan is for one axis, and {mesh} has {mesh.ndim}", hint=f'pass one axis: mesh["{name}"]')
    return mesh


# ---------------------------------------------------------------- which modules


def _entries(module: nn.Module, prefix: str, plan: Any, unknown: list[str]) -> Iterator[PlannedModule]:
    """The modules that a plan for `module` names, in its order."""
    if isinstance(plan, ParallelStyle):
        yield PlannedModule(*plan._layer_of(prefix, module), plan)
    elif isinstance(plan, Mapping):
        for key, style in plan.items():
            found = list(_matching(module, prefix, key.split(".") if key else []))
            if not found:
                unknown.append(f"{prefix}.{key}" if prefix else key)
            for path, submodule in found:
                yield from _entries(submodule, path, style, unknown)
    else:
        raise LayoutError(
            f"a plan is a ParallelStyle, or a dict from names of modules to plans, not {plan!r}"
            + (f" (for module {prefix!r})" if prefix else ""),
            hint='as in {"layers.*.w1": ColwiseParallel(), "layers.*.w2": RowwiseParallel()}',
        )


def _matching(module: nn.Module, path: str, parts: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The submodules whose path matches, part by part."""
    if not parts:
        yield path, module
        return
    for name, child in module._modules.items():
        if child is not None and fnmatchcase(name, parts[0]):
            yield from _matching(child, f"{path}.{name}" if path else name, parts[1:])


def _not_found(key: str, module: nn.Module) -> str:
    names = [name for name, _ in module.named_modules() if name]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.5) or names[:3]
    return f"the plan's key {key!r} matches no module of {type(module).__name__}; nearest: {', '.join(near) or 'none'}"


# ---------------------------------------------------------------- before anything is changed


def _checked(entries: list[PlannedModule], mesh: DeviceMesh) -> list[PlannedModule]:
    """The entries to apply, without duplicates and styles that a module already has. Raises if one does not fit."""
    known: dict[int, Placement] = {}
    seen: set[tuple[int, str]] = set()
    fresh: list[PlannedModule] = []
    for entry in entries:
        style = repr(entry.style)
        applied = entry.module.__dict__.get(STYLES, ())
        if (id(entry.module), style) in seen or (style, mesh) in applied:
            continue  # a module that is reached by two paths, or a plan that is applied again
        seen.add((id(entry.module), style))
        placements = entry.style._parameters_of(entry.module, entry.who)
        check_parameters(entry.module, placements, mesh, entry.who, known)
        fresh.append(entry)
    return fresh


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Accepted for compatibility; it changes nothing. `cross_entropy` never gathers logits that are sharded by class.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> logits = sw.zeros(2, 8, device_mesh=mesh, placements=[sw.Shard(-1)])
        >>> targets = sw.zeros(2, dtype=torch.int64, device_mesh=mesh)
        >>> with loss_parallel():
        ...     loss = torch.nn.functional.cross_entropy(logits, targets)
        >>> round(loss.item(), 4)
        2.0794
    """
    yield
