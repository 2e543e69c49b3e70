"""Functions of torch that read the memory of a tensor in C++, past Python classes: `to_dlpack`, `jiterator` kernels.

A DTensor has no storage: they would read address 0, and crash the process or its GPU context. They are wrapped
when the first mesh is made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.dlpack
from torch.cuda import jiterator

from shardwise.errors import UnsupportedError
from shardwise.fabric.rank_tensor import is_of_ranks
from shardwise.tensor import DTensor

__all__ = ["wrap_jiterator", "wrap_to_dlpack"]


def wrap_to_dlpack() -> None:
    """Let `torch.utils.dlpack.to_dlpack` and `torch.to_dlpack` export the full tensor of a DTensor."""
    original: Any = torch.utils.dlpack.to_dlpack

    @functools.wraps(original, assigned=("__doc__",))
    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                tensor = tensor.full_tensor()
        return original(tensor, *args, **kwargs)

    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # pyright: ignore[reportAttributeAccessIssue]


def wrap_jiterator() -> None:
    """Let functions of `torch.cuda.jiterator` refuse DTensors and RankTensors."""
    kind: Any = getattr(jiterator, "_JittedFunction", None)
    if kind is None:
        return
    original: Any = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *tensors: torch.Tensor, **kwargs: Any) -> Any:
        for tensor in tensors:
            if isinstance(tensor, DTensor) or is_of_ranks(tensor):
                raise UnsupportedError(
                    f"a function of torch.cuda.jiterator cannot run on a {type(tensor).__name__}",
                    hint="write it with torch's operators, or run it on locals with shardwise.local_map",
                )
        return original(self, *tensors, **kwargs)

    kind.__call__ = call
