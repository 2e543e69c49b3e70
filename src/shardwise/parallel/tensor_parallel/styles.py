"""ColwiseParallel, RowwiseParallel, SequenceParallel: layouts of parameters, and hooks for inputs and outputs.

This module defines the layouts of a style; `value_layouts` moves a value into one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.nn.utils import parametrize

from shardwise.api import replicate_rest
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.errors import LayoutError
from shardwise.parallel.tensor_parallel.adapters import BASE
from shardwise.parallel.tensor_parallel.layer import Layer, LayerLayouts
from shardwise.parallel.tensor_parallel.module_parameters import lay_out
from shardwise.parallel.tensor_parallel.norm_gradients import add_up_after_backward
from shardwise.parallel.tensor_parallel.style import ParallelStyle, placement_of

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


class _LayerStyle(ParallelStyle):
    """The common part of styles of single layers: parameters in a layout, hooks around the forward."""

    input_layouts: tuple[Placement, ...]
    output_layouts: tuple[Placement, ...]
    use_local_output: bool
    layers: ClassVar[dict[type[nn.Module], LayerLayouts]]  # for each kind of module that it fits

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        self.input_layouts = (placement_of(input_layouts, self, "input_layouts"),)
        self.output_layouts = (placement_of(output_layouts, self, "output_layouts"),)
        self.use_local_output = use_local_output

    def _layouts(self, module: nn.Module, who: str) -> LayerLayouts:
        for kind, layouts in self.layers.items():
            if isinstance(module, kind):
                return layouts
        fitting = " and ".join(f"nn.{kind.__name__}" for kind in self.layers)
        raise LayoutError(
            f"{who}: the style is for {fitting}, not for this module",
            hint="norms and dropout take SequenceParallel(); for other modules shard the parameters with "
            "distribute_module(module, mesh, partition_fn), or subclass ParallelStyle",
        )

    def _layer_of(self, path: str, module: nn.Module) -> tuple[str, nn.Module]:
        """The layer inside of adapters (LoRA)."""
        while isinstance(base := module._modules.get(BASE), nn.Module):
            path, module = f"{path}.{BASE}" if path else BASE, base
        return path, module

    def _parameters_of(self, module: nn.Module, who: str) -> Mapping[str, Placement]:
        placements = self._layouts(module, who).parameters
        if "weight" not in module._parameters and not parametrize.is_parametrized(module, "weight"):
            raise LayoutError(
                f"{who}: a hook computes its weight from other parameters",
                hint="use torch.nn.utils.parametrizations, as weight_norm there, or apply the plan before the hook",
            )
        return placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts = self._layouts(module, type(module).__name__)
        lay_out(module, layouts.parameters, device_mesh, self.src_data_rank)
        layer = Layer(device_mesh, layouts, self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        return layer.install(module)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


# ---------------------------------------------------------------- the styles


class ColwiseParallel(_LayerStyle):
    """Split an nn.Linear by its output features, or an nn.Embedding by its columns: each rank computes a part of them.

    Args:
        input_layouts: the layout of a plain input; `Replicate()` by default.
        output_layouts: the layout of the output; `Shard(-1)`, as it is computed, by default.
        use_local_output: give each rank its part as a plain tensor (the default) instead of a DTensor. An output on a
            larger mesh than the plan's stays a DTensor.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> style = ColwiseParallel(use_local_output=False)
        >>> linear = sw.parallel.parallelize_module(torch.nn.Linear(8, 16), mesh, style)
        >>> linear.weight.spec, linear(torch.ones(2, 8)).spec
        (f32[16,8] S0, f32[2,16] S1)
    """

    layers: ClassVar = {
        nn.Linear: LayerLayouts({"weight": Shard(0), "bias": Shard(0)}, input=Replicate()),
        nn.Embedding: LayerLayouts({"weight": Shard(1)}, input=Replicate()),
    }
    desired_input_layouts = (Replicate(),)

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        super().__init__(
            input_layouts=input_layouts or Replicate(),
            output_layouts=output_layouts or Shard(-1),
            use_local_output=use_local_output,
        )


class RowwiseParallel(_LayerStyle):
    """Split an nn.Linear by its input features, or an nn.Embedding by its rows; the parts of the output are added up.

    Args:
        input_layouts: the layout of a plain input; `Shard(-1)` by default. For nn.Embedding give `Replicate()`.
        output_layouts: the layout of the output; `Replicate()` by default.
        use_local_output: give each rank its part as a plain tensor (the default) instead of a DTensor. An output on a
            larger mesh than the plan's stays a DTensor.

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=sw.Shard(0), use_local_output=False)}
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
        >>> mlp = sw.parallel.parallelize_module(mlp, mesh, plan)
        >>> mlp[2].weight.spec, mlp(torch.ones(4, 8)).spec
        (f32[8,32] S1, f32[4,8] S0)
    """

    layers: ClassVar = {
        nn.Linear: LayerLayouts({"weight": Shard(1), "bias": Replicate()}, input=Shard(-1), features=("weight", 1)),
        nn.Embedding: LayerLayouts({"weight": Shard(0)}, input=Replicate()),
    }

    def __init__(self, *, input_layouts: Any = None, output_layouts: Any = None, use_local_output: bool = True) -> None:
        super().__init__(
            input_layouts=input_layouts or Shard(-1),
            output_layouts=output_layouts or Replicate(),
            use_local_output=use_local_output,
        )


class SequenceParallel(_LayerStyle):
    """Run a norm, dropout or any module that treats positions alike on a part of the sequence; parameters replicated.

    Args:
        sequence_dim: the dim of the input that is the sequence.
        use_local_output: give each rank its part as a plain tensor instead of a DTensor (the default).

    Example:
        >>> import torch
        >>> import shardwise as sw
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> norm = sw.parallel.parallelize_module(torch.nn.LayerNorm(8), mesh, SequenceParallel())
        >>> norm(torch.ones(2, 3, 8)).spec  # three positions on each rank
        f32[2,12,8] S1
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        super().__init__(
            input_layouts=Shard(sequence_dim), output_layouts=Shard(sequence_dim), use_local_output=use_local_output
        )

    def _layer_of(self, path: str, module: nn.Module) -> tuple[str, nn.Module]:
        return path, module

    def _parameters_of(self, module: nn.Module, who: str) -> Mapping[str, Placement]:
        return {name: Replicate() for name in module._parameters}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in module.modules():
            lay_out(part, {name: Replicate() for name in part._parameters}, device_mesh, self.src_data_rank)
        replicate_rest(module, device_mesh, self.src_data_rank)  # its buffers
        add_up_after_backward(module.parameters())
        (sharding,) = self.sequence_sharding
        names = list(module._parameters)
        layouts = LayerLayouts(dict.fromkeys(names, Replicate()), input=sharding)
        return Layer(device_mesh, layouts, sharding, None, self.use_local_output).install(module)

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.input_layouts[0].dim}, use_local_output={self.use_local_output})"  # pyright: ignore[reportAttributeAccessIssue]
