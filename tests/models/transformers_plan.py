"""The tensor-parallel plan that a model of transformers carries, as a plan for `parallelize_module`.

Such a plan maps paths of modules and of parameters to names of styles. Operators on DTensors know how their operands
are laid out, so names that only describe communication (`moe_tp_experts`, ...) need no style.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

import shardwise as sw
from shardwise.core.placement import Placement
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from shardwise.parallel.tensor_parallel.module_parameters import lay_out, see_on, unsee

__all__ = ["has_plan", "plan_of"]

LAYERS = {
    "colwise": ColwiseParallel(use_local_output=False),
    "colwise_gather_output": ColwiseParallel(output_layouts=sw.Replicate(), use_local_output=False),
    "rowwise": RowwiseParallel(use_local_output=False),
    "rowwise_split_input": RowwiseParallel(input_layouts=sw.Replicate(), use_local_output=False),
    "embedding_rowwise": RowwiseParallel(input_layouts=sw.Replicate(), use_local_output=False),
}
NOTHING_TO_DO = {
    "all_reduce",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
}


class ShardParameters(ParallelStyle):
    """Parameters of one module, by their names, in the given placements, and on the mesh of what goes in."""

    def __init__(self, placements: dict[str, Placement]) -> None:
        self.placements = placements

    def __repr__(self) -> str:
        return f"ShardParameters({self.placements})"

    def _parameters_of(self, module: nn.Module, who: str) -> Mapping[str, Placement]:
        return self.placements

    def _apply(self, module: nn.Module, device_mesh: sw.DeviceMesh) -> nn.Module:
        lay_out(module, self.placements, device_mesh, self.src_data_rank)

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(args[0], sw.DTensor) and args[0].device_mesh != device_mesh:
                see_on(module, device_mesh, args[0].device_mesh)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda module, args, result: unsee(module), always_call=True)
        return module


def has_plan(model: nn.Module) -> bool:
    """Whether the model carries a plan."""
    return bool(getattr(model, "tp_plan", None))


def plan_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """The model's own plan, with the styles of this library. Of an adapter it is the plan of the model below it."""
    if hasattr(model, "get_base_model"):
        base = model.get_base_model()
        (prefix,) = (path for path, module in model.named_modules() if module is base)
        return {f"{prefix}.{path}": style for path, style in plan_of(base).items()}
    plan: dict[str, ParallelStyle] = {}
    parameters: dict[str, dict[str, Placement]] = {}
    for pattern, style in model.tp_plan.items():
        for path, part in _named(model, pattern):
            if style in NOTHING_TO_DO:
                continue
            if hasattr(part, "base_layer"):
                path, part = f"{path}.base_layer", part.base_layer
            if isinstance(part, nn.Linear | nn.Embedding) and style in LAYERS:
                plan[path] = LAYERS[style]
            elif isinstance(part, nn.Module):
                for name, value in part.named_parameters(recurse=False):
                    parameters.setdefault(path, {})[name] = _placement(style, value)
            else:
                owner, _, name = path.rpartition(".")
                parameters.setdefault(owner, {})[name] = _placement(style, part)
    if not plan:
        raise ValueError(f"the plan of {type(model).__name__} names none of its modules: {model.tp_plan}")
    return plan | {path: ShardParameters(placements) for path, placements in parameters.items()}


def _named(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Modules and parameters whose path the pattern matches; `*` is the number of a layer."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    for path, part in [*model.named_modules(), *model.named_parameters()]:
        if matches(path):
            yield path, part


def _placement(style: str, parameter: nn.Parameter) -> Placement:
    """How a parameter of a module that is no `nn.Linear` is split. Weights are (..., outputs, inputs)."""
    if parameter.ndim == 1:
        return sw.Shard(0) if "colwise" in style else sw.Replicate()
    split = {
        "colwise": sw.Shard(parameter.ndim - 2),
        "packed_colwise": sw.StridedShard(parameter.ndim - 2, split_factor=2),
        "packed_rowwise": sw.StridedShard(parameter.ndim - 1, split_factor=2),
        "rowwise": sw.Shard(parameter.ndim - 1),
        "grouped_gemm": sw.Shard(0),
    }
    return split[style]
