"""`to_dlpack` of a DTensor gives the whole tensor, as `DTensor.__dlpack__` does.

torch's function is written in C++ and asks no Python class. A DTensor has no memory of its own, so that it would give a
null pointer, and whoever reads from it ends the process. It is wrapped when the first mesh is made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack

from shardwise.tensor import DTensor

__all__ = ["wrap_to_dlpack"]


def wrap_to_dlpack() -> None:
    """Let `torch.utils.dlpack.to_dlpack` and `torch.to_dlpack` take DTensors."""
    original: Any = torch.utils.dlpack.to_dlpack

    @functools.wraps(original, assigned=("__doc__",))
    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.full_tensor()
        return original(tensor, *args, **kwargs)

    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # pyright: ignore[reportAttributeAccessIssue]
