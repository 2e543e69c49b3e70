"""Methods of DTensor on the wrappers of torch.func, which are of the class torch.Tensor."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.mesh import on_first_mesh
from shardwise.tensor.dtensor import DTensor
from shardwise.transforms import alive, innermost, is_wrapped, visible_dims, visible_spec

__all__: list[str] = []


class _OfTransformed:
    """A method or property of DTensor on torch.Tensor, visible only on wrappers of a DTensor.

    Inside a function that torch.func transforms, tensors are of the class torch.Tensor. On any other tensor the
    attribute does not exist.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, tensor: Any, owner: type) -> Any:
        if tensor is None:  # torch reads all attributes of the class, and skips None
            return None
        if is_wrapped(tensor) and isinstance(inner := innermost(tensor), DTensor):
            tensor = alive(tensor)
            if tensor is inner:
                return getattr(inner, self.name)
            if self.name == "_spec":
                return visible_spec(inner._spec, visible_dims(tensor))
            return DTensor.__dict__[self.name].__get__(tensor)
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}", name=self.name, obj=tensor)


def _give_to_wrappers() -> None:
    for name in ("_spec", "spec", "device_mesh", "placements", "redistribute", "to_local", "full_tensor"):
        setattr(torch.Tensor, name, _OfTransformed(name))


on_first_mesh.append(_give_to_wrappers)  # DTensors need a mesh, so torch is unchanged until the first one
