"""ShardParameters: the style of modules with parameters to shard that are not single layers (experts, sinks)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.parallel.tensor_parallel.module_parameters import lay_out, remap_parameters, restore_parameters
from shardwise.parallel.tensor_parallel.style import ParallelStyle
from shardwise.tensor import is_dtensor

__all__ = ["ShardParameters"]


class ShardParameters(ParallelStyle):
    """Lay out some parameters of a module. The module computes on DTensors, as on one device.

    Args:
        placements: of parameters of the module itself, by name.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> style = ShardParameters({"weight": sw.Shard(1)})
        >>> sw.parallel.parallelize_module(torch.nn.Bilinear(2, 4, 3), mesh, style).weight.spec
        f32[3,2,4] S1
    """

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        self.placements = dict(placements)

    def __repr__(self) -> str:
        return f"ShardParameters({self.placements})"

    def _parameters_of(self, module: nn.Module, who: str) -> Mapping[str, Placement]:
        return self.placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        lay_out(module, self.placements, device_mesh, self.src_data_rank)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            larger = next((mesh for mesh in _meshes_of(args, kwargs) if mesh != device_mesh), None)
            if larger is not None:
                remap_parameters(module, device_mesh, larger, submodules=False)

        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            restore_parameters(module)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        return module


def _meshes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[DeviceMesh]:
    for value in (*args, *kwargs.values()):
        if is_dtensor(value):
            yield value.device_mesh
