"""Random numbers in a graph: the global tensor is drawn as on one device, and each rank keeps its part.

A graph cannot contain eager draws (a generator that our own code reads and advances), but it can contain torch's own
random operators. All ranks draw the same global tensor, so replicas agree and shards are parts of one device's numbers.
A compiler that fuses (inductor) computes only the part that is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.fabric.base import fabric_of
from shardwise.fabric.block_copies import slicer
from shardwise.plan.propagate import replicated
from shardwise.torch_private import OpOverload

__all__ = ["fill_in_graph", "mask_in_graph"]

# A graph that is written out as Python cannot name it. `randint_like` draws the same numbers.
_FROM = getattr(torch.ops.aten.random_, "from")


def fill_in_graph(
    spec: DTensorSpec, op: OpOverload, numbers: tuple[Any, ...], generator: torch.Generator | None
) -> torch.Tensor:
    """The local of a new tensor of this spec that the in-place operator `op` fills."""
    full = _global_tensor(spec, spec.tensor_meta.dtype)
    if op is _FROM and generator is None:
        return _part(spec, torch.ops.aten.randint_like.low_dtype(full, *numbers))
    return _part(spec, op(full, *numbers, generator=generator))


def mask_in_graph(spec: DTensorSpec, p: float) -> torch.Tensor:
    """The local of the mask that dropout draws for a tensor of this spec."""
    if spec.mesh.device_type != "cuda":
        share = _global_tensor(spec, torch.float32).bernoulli_(1 - p)
        return _part(spec.with_dtype(torch.bool), share.to(torch.bool))
    ones = torch.ones_like(_global_tensor(spec, spec.tensor_meta.dtype))
    return _part(spec.with_dtype(torch.bool), torch.ops.aten.native_dropout.default(ones, p, True)[1])


def _global_tensor(spec: DTensorSpec, dtype: torch.dtype) -> torch.Tensor:
    meta = spec.tensor_meta.dense()
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=spec.mesh.device_type)


def _part(spec: DTensorSpec, full: torch.Tensor) -> torch.Tensor:
    mesh, before = spec.mesh, replicated(spec)
    return fabric_of(mesh).build(mesh, lambda c: slicer(before.block(c), spec.block(c))(full))
