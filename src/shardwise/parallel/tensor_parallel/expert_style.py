"""ExpertParallel: the stacked matrices of a mixture of experts sharded by expert, on the mesh of the input.

The module is unchanged. It calls `shardwise.moe.dispatch`, or operators whose rules decide the communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.api import replicate_rest
from shardwise.compilers import not_compiled
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.core.spec import DTensorSpec
from shardwise.errors import LayoutError, MeshError
from shardwise.parallel.tensor_parallel.module_parameters import laid_out, remap_parameters, restore_parameters
from shardwise.parallel.tensor_parallel.norm_gradients import add_up_after_backward
from shardwise.parallel.tensor_parallel.style import ParallelStyle, placement_of
from shardwise.tensor import DTensor, is_dtensor
from shardwise.torch_private import tree_leaves, tree_map

__all__ = ["ExpertParallel"]

STACKED = 3  # dims of a parameter that is a matrix for each expert
_ENTERED = "_shardwise_entered"  # on a running module: the spec of the DTensor made from a plain input


class ExpertParallel(ParallelStyle):
    """Shard the experts of a module: parameters `[E, ...]` of three dims or more get `Shard(0)`, others are replicated.

    E need not be divisible by the number of ranks. The module runs on DTensors: it may call `shardwise.moe.dispatch`,
    which sends tokens to the ranks of their experts, or be written for one device. FSDP may shard experts too, over
    another axis.

    Args:
        parameters: the stacked parameters, as patterns of their names inside the module; by default those of three dims
            or more. Needed for biases `[E, F]`, for example.
        tp_mesh: the axis along which each expert is split, of the same mesh.
        tp_dims: the dim of stacked parameters to split along it, by patterns of names, as in `{"up": 2, "down": 1}`.
        input_layouts: the placement of a plain input on the axis of the experts; `Shard(0)` by default.
        use_local_output: give each rank its part of the output as a plain tensor if the input was plain (the default).

    Example:
        >>> import shardwise as sw
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.router = nn.Parameter(torch.ones(6, 4, 8)), nn.Linear(4, 6)
        ...
        ...     def forward(self, x):
        ...         weights, ids = self.router(x).softmax(-1).topk(2)
        ...         rows, back = sw.moe.dispatch(x, ids, len(self.up))
        ...         return back(torch.nn.functional.grouped_mm(rows, self.up, offs=back.offs), weights)
        >>> mesh = sw.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        >>> experts = sw.parallel.parallelize_module(Experts(), mesh, ExpertParallel(use_local_output=False))
        >>> experts.up.spec, experts(torch.ones(2, 4)).spec
        (f32[6,4,8] ep:S0, f32[8,8] ep:S0)
    """

    def __init__(
        self,
        *,
        parameters: Sequence[str] | None = None,
        tp_mesh: DeviceMesh | None = None,
        tp_dims: Mapping[str, int] | None = None,
        input_layouts: Any = None,
        use_local_output: bool = True,
    ) -> None:
        self.parameters = None if parameters is None else tuple(parameters)
        self.tp_mesh, self.tp_dims = tp_mesh, dict(tp_dims or {})
        if bool(self.tp_dims) != (tp_mesh is not None):
            raise LayoutError(
                "ExpertParallel: tp_mesh and tp_dims go together",
                hint='as in tp_mesh=mesh["tp"], tp_dims={"up": 2, "down": 1}',
            )
        self.input_layouts = (placement_of(input_layouts or Shard(0), self, "input_layouts"),)
        self.use_local_output = use_local_output

    def _parameters_of(self, module: nn.Module, who: str) -> Mapping[str, Placement]:
        found = dict(self._stacked(module))
        sizes = {parameter.shape[0] for parameter in found.values()}
        if len(sizes) != 1:
            have = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in found.items())
            if not found and self.parameters is None:
                raise LayoutError(
                    f"{who}: there are no stacked parameters, [experts, ...] of {STACKED} dims or more",
                    hint="stack the weights of experts that are modules of their own, or give each of them a style of "
                    'layers, as {"experts.*.up": ColwiseParallel(), "experts.*.down": RowwiseParallel()}',
                )
            raise LayoutError(
                f"{who}: stacked parameters must have one number of experts, found {have or 'none'}",
                hint='name them: ExpertParallel(parameters=["up", "down"]), or apply the style only to the experts',
            )
        unknown = [pattern for pattern in self.tp_dims if not any(fnmatchcase(name, pattern) for name in found)]
        if unknown:
            raise LayoutError(
                f"{who}: tp_dims has {unknown[0]!r}, which matches no stacked parameter",
                hint=f"the stacked parameters are {', '.join(found)}",
            )
        if self.tp_mesh is not None:
            return {}
        return {name: Shard(0) for name in found if "." not in name}

    def _stacked(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if self.parameters is None:
                if parameter.dim() >= STACKED:
                    yield name, parameter
            elif any(fnmatchcase(name, pattern) for pattern in self.parameters):
                yield name, parameter

    def _placements(self, name: str) -> tuple[Placement, ...]:
        """Along the axis of the experts, and along that of tensor parallelism."""
        if self.tp_mesh is None:
            return (Shard(0),)
        dim = next((dim for pattern, dim in self.tp_dims.items() if fnmatchcase(name, pattern)), None)
        return Shard(0), Replicate() if dim is None else Shard(dim)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = device_mesh if self.tp_mesh is None else _joined(device_mesh, self.tp_mesh)
        for name, parameter in list(self._stacked(module)):
            path, _, own = name.rpartition(".")
            owner = module.get_submodule(path)
            owner._parameters[own] = laid_out(parameter, mesh, self._placements(name), self.src_data_rank)
        replicate_rest(module, mesh, self.src_data_rank)
        replicated = [p for p in module.parameters() if isinstance(p, DTensor) and p._spec.is_replicated]
        add_up_after_backward(replicated)
        sizes = {size for parameter in module.parameters() for size in parameter.shape}

        @not_compiled
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = None if args else next(iter(kwargs), None)
            value = args[0] if args else kwargs.get(name or "")
            if not isinstance(value, torch.Tensor):
                return None
            found = self._entered(module, value, mesh)
            return ((found, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: found})

        @not_compiled
        def after(module: nn.Module, args: Any, result: Any) -> Any:
            restore_parameters(module)
            spec: DTensorSpec | None = module.__dict__.pop(_ENTERED, None)
            return result if spec is None or not self.use_local_output else _left(result, spec, sizes)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
        return module

    def _entered(self, module: nn.Module, value: Any, mesh: DeviceMesh) -> Any:
        """The input as a DTensor, and the parameters on its mesh."""
        if not is_dtensor(value):
            placements = [self.input_layouts[0], *[Replicate() for _ in range(mesh.ndim - 1)]]
            value = DTensor.from_local(value, mesh, placements)
            module.__dict__[_ENTERED] = value._spec
        elif value._spec.mesh != mesh:
            larger = value._spec.mesh
            if larger.root is not mesh.root or not set(mesh.axes) <= set(larger.axes):
                raise MeshError(
                    f"the input is on {larger} as {value._spec}, and the experts are on {mesh}, not a slice of it",
                    hint="put the batch on the mesh of the plan, or on a larger mesh of which it is a slice",
                )
            remap_parameters(module, mesh, larger)
        return value

    def __repr__(self) -> str:
        return (
            f"ExpertParallel(parameters={self.parameters}, tp_mesh={self.tp_mesh}, tp_dims={self.tp_dims}, "
            f"input_layouts={self.input_layouts}, use_local_output={self.use_local_output})"
        )


def _joined(mesh: DeviceMesh, tp_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of both axes, that of the experts first."""
    names = (*(mesh.mesh_dim_names or ()), *(tp_mesh.mesh_dim_names or ()))
    if len(names) != 2 or mesh.root is not tp_mesh.root:
        raise MeshError(
            f"ExpertParallel: {mesh} and {tp_mesh} are not two named axes of one mesh",
            hint='as in parallelize_module(model, mesh["ep"], {...: ExpertParallel(tp_mesh=mesh["tp"], tp_dims=...)})',
        )
    return mesh.root[names]


def _left(result: Any, entered: DTensorSpec, sizes: Set[int]) -> Any:
    """The outputs of a plain input, as plain tensors in its layout; numbers are the same on every rank.

    Args:
        result: what the module returned.
        entered: the input.
        sizes: of the module's parameters, which statistics of all ranks may have.
    """

    def left(value: Any) -> Any:
        if is_dtensor(value):
            return _left_tensor(value, entered, sizes)
        if any(is_dtensor(leaf) for leaf in tree_leaves(_inside(value))):
            raise LayoutError(
                f"ExpertParallel: the output has DTensors inside a {type(value).__name__}, which torch takes as one "
                "value",
                hint="return a tuple, list or dict, or pass use_local_output=False",
            )
        return value

    return tree_map(left, result)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple | Set):
        return list(value)
    return list(vars(value).values()) if is_dataclass(value) and not isinstance(value, type) else []


def _left_tensor(result: Any, entered: DTensorSpec, sizes: Set[int]) -> torch.Tensor:
    dim, spec = next((d for d, axes in enumerate(entered.dim_axes) if axes), None), result._spec
    split = dim is None or result.shape[: dim + 1] == entered.shape[: dim + 1]
    if dim is not None and split and not set(entered.dim_axes[dim]) & set(spec.dim_axes[dim]):
        rows, alike = entered.shape[dim], result.shape == entered.shape
        if not alike and (result.dim() == dim + 1 or rows in sizes or rows in entered.shape[dim + 1 :]):
            raise LayoutError(
                f"ExpertParallel: the output {spec} has as many rows as the input {entered}, but is not split like it: "
                "it may be rows or a value of all ranks",
                hint="use_local_output=False, and redistribute(...).to_local() the outputs",
            )
    placements = entered.placements if split else [Replicate()] * entered.mesh.ndim
    return result.redistribute(placements=placements).to_local()
