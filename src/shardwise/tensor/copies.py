"""DTensors copied with all that was set on them, and taken apart for pickle and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.core.mesh import rebuild_mesh
from shardwise.core.placement import MaskPartial, Partial, Replicate, Shard, StridedShard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.fabric.virtual import RankTensor
from shardwise.tensor.dtensor import DTensor

__all__ = ["deep_copied", "pickled"]


def pickled(tensor: DTensor) -> tuple[Any, ...]:
    """The function that rebuilds a DTensor, and what it is given."""
    return _rebuild, (tensor._local_tensor, tensor._spec, tensor.requires_grad, _kept_attributes(tensor))


def _rebuild(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool, attributes: Mapping[str, Any]) -> DTensor:
    made = DTensor(local, spec, requires_grad=requires_grad)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


# What torch.load(weights_only=True) may call to rebuild a DTensor: data, nothing that runs code of its own.
torch.serialization.add_safe_globals(
    [_rebuild, rebuild_mesh, DTensorSpec, TensorMeta, RankTensor, Shard, StridedShard, Replicate, Partial, MaskPartial]
)


def deep_copied(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """What `copy.deepcopy` gives: a leaf of its own, with a copy of the gradient."""
    if not tensor.is_leaf:
        raise RuntimeError("only DTensors made by the user (graph leaves) can be deep-copied; detach() it first")
    with torch.no_grad():
        copied = DTensor(tensor._local_tensor.detach().clone(), tensor._spec, requires_grad=tensor.requires_grad)
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = tensor.grad.__deepcopy__(memo)
    for name, value in _kept_attributes(tensor).items():
        setattr(copied, name, value)
    return copied


def _kept_attributes(tensor: DTensor) -> dict[str, Any]:
    """What users and nn.Parameter have set on it; what was only remembered does not outlive the process."""
    return {name: value for name, value in tensor.__dict__.items() if name not in ("_copied_view", "_settled")}
