"""ParallelStyle: the entry of a plan for one module. Users make their own by subclassing it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, as_placement
from shardwise.errors import LayoutError

__all__ = ["STYLES", "ParallelStyle", "placement_of", "placements_of"]

STYLES = "_shardwise_styles"  # on a module: the reprs of its styles, and their meshes


class ParallelStyle(ABC):
    """How one module is parallelized. A plan (`parallelize_module`) applies it to the modules that it names.

    Subclasses define `_apply(module, device_mesh)`, which changes the module in place (parameters, hooks) and returns
    it. `src_data_rank` is the rank whose parameter values are used; it is set before `_apply` is called.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> class Frozen(ParallelStyle):
        ...     def _apply(self, module, device_mesh):
        ...         return sw.distribute_module(module.requires_grad_(False), device_mesh)
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> sw.parallel.parallelize_module(torch.nn.Linear(2, 2), mesh, Frozen()).weight.spec
        f32[2,2] R
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Change the module in place and return it."""

    def _parameters_of(self, module: nn.Module, who: str) -> Mapping[str, Placement]:
        """The layouts of the module's parameters; raises if the style does not fit it. Called before any is changed."""
        return {}

    def _layer_of(self, path: str, module: nn.Module) -> tuple[str, nn.Module]:
        """The module that the style applies to if a plan names `module`, and its path."""
        return path, module


def placement_of(value: Any, style: ParallelStyle, argument: str) -> Placement:
    """A placement, also one of torch, as a `Placement`."""
    try:
        return as_placement(value)
    except (TypeError, ValueError):
        raise LayoutError(
            f"{type(style).__name__}: {argument} is {value!r}, not a placement",
            hint="as in Shard(1) or Replicate(): one placement, for the one axis of the mesh",
        ) from None


def placements_of(value: Any, style: ParallelStyle, argument: str) -> tuple[Placement | None, ...]:
    """One placement, or a tuple of placements and None, as a tuple of `Placement` and None."""
    items = value if isinstance(value, tuple | list) else (value,)
    return tuple(None if item is None else placement_of(item, style, argument) for item in items)
