"""DTensors inside functions that torch.func transforms, where they are wrapped in tensors of the class torch.Tensor.

Wrappers have the methods of DTensors; writes to views of them are differentiated without storage offsets.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from shardwise.core.mesh import on_first_mesh
from shardwise.tensor.dtensor import DTensor
from shardwise.torch_private import eager_transforms, replay_views, views_replayed
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


class _Levels(threading.local):
    """Of a thread: whether views were replayed before each level of `grad` that is active."""

    def __init__(self) -> None:
        self.before: list[bool] = []


def _replay_views_in_transforms() -> None:
    """The gradient of a write to a view repeats the operators of the view, inside `torch.func.grad` and `vjp`.

    Otherwise autograd finds the written part by storage offsets. It does so for wrappers, but a view of a DTensor has
    no offset, so gradients would be those of another part.
    """
    begin, end = eager_transforms._grad_increment_nesting, eager_transforms._grad_decrement_nesting
    levels = _Levels()

    @functools.wraps(begin)
    def begin_level() -> int:
        level = begin()
        levels.before.append(views_replayed())
        replay_views(True)
        return level

    @functools.wraps(end)
    def end_level() -> int:
        replay_views(levels.before.pop())
        return end()

    eager_transforms._grad_increment_nesting, eager_transforms._grad_decrement_nesting = begin_level, end_level


# DTensors need a mesh, so torch is unchanged until the first one
on_first_mesh += [_give_to_wrappers, _replay_views_in_transforms]
