"""Values for a DTensor: plain ones and those of other layouts, put into its layout; also by torch's `load_state_dict`.

torch has no hook for the latter: `nn.Module.load_state_dict` copies, or with `assign=True` replaces the parameter by
the value of the state dict, and `Optimizer.load_state_dict` keeps it. So two methods of torch are
wrapped when the first mesh is made. For parameters that are not DTensors they are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.api import distribute_tensor
from shardwise.core.spec import DTensorSpec
from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_tensor import is_of_ranks
from shardwise.tensor import DTensor

__all__ = ["laid_out_as", "wrap_load_state_dict"]


def laid_out_as(value: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A value in the layout of `spec`, in its own dtype. Each rank takes its block of a plain value without moves.

    Args:
        value: a DTensor, or the global value as a plain tensor (or a RankTensor), the same on every rank.
        spec: the layout; its global shape must be that of the value.
    """
    with torch.no_grad():
        if isinstance(value, DTensor):
            own = value.spec.with_meta(spec.tensor_meta)
            if own is spec:
                return value
            return value.redistribute(spec.mesh, spec.placements, shard_order=spec.shard_order)
        if is_of_ranks(value):
            # full_tensor() of a DTensor on a slice of a mesh is one: a global value for each rank of the other axes.
            first = value.tensors[0]
            if all(first.shape == other.shape and torch.equal(first, other) for other in value.tensors[1:]):
                return laid_out_as(first, spec)
            raise UnsupportedError(
                f"a RankTensor with different values on its virtual ranks cannot be loaded into {spec}",
                hint="DTensor.from_local(value, mesh, placements) declares the layout of locals",
            )
        return distribute_tensor(
            value.detach(), spec.mesh, spec.placements, src_data_rank=None, shard_order=spec.shard_order
        )


def wrap_load_state_dict() -> None:
    """Let `load_state_dict` of modules and optimizers keep the layouts of DTensors."""
    nn.Module._load_from_state_dict = _loading_parameters(nn.Module._load_from_state_dict)
    process = torch.optim.Optimizer._process_value_according_to_param_policy
    torch.optim.Optimizer._process_value_according_to_param_policy = staticmethod(_loading_states(process))


def _loading_parameters(load: Callable[..., None]) -> Callable[..., None]:
    """`_load_from_state_dict` that puts values for DTensors into their layouts, after the hooks of the module."""

    @functools.wraps(load, assigned=("__doc__",))
    def load_from_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        hooks: Any = self._load_state_dict_pre_hooks  # they may rename entries of the state dict
        hooks[key := object()] = functools.partial(_lay_out, self)
        try:
            load(self, *args, **kwargs)
        finally:
            del hooks[key]

    return load_from_state_dict


def _lay_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    """Replace the values for the module's own parameters and buffers by values that can be copied or assigned."""
    assign = metadata.get("assign_to_params_buffers", False)
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value: Any = state_dict.get(prefix + name)
        if isinstance(own, DTensor):
            if _fits(own.spec, value):
                state_dict[prefix + name] = laid_out_as(value, own.spec)
        elif own is not None and isinstance(value, DTensor) and not assign:
            with torch.no_grad():
                state_dict[prefix + name] = value.full_tensor()


def _loading_states(process: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`_process_value_according_to_param_policy` that gives states the layout of their parameter.

    A state of another shape than its parameter (rows of a factored moment) is replicated.
    """

    @functools.wraps(process, assigned=("__doc__",))
    def process_value(param: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        value = process(param, value, *args, **kwargs)
        if not isinstance(param, DTensor) or value.dim() == 0:
            return value
        if _fits(param.spec, value):
            return laid_out_as(value, param.spec)
        if not isinstance(value, DTensor):
            return distribute_tensor(value, param.device_mesh, src_data_rank=None)
        return value if value.device_mesh is param.device_mesh else value.redistribute(param.device_mesh)

    return process_value


def _fits(spec: DTensorSpec, value: Any) -> bool:
    """Whether a value fits; for another shape torch raises an error with the name of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == spec.shape and not value.is_meta
