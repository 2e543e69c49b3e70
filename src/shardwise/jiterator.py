"""`torch.cuda.jiterator` functions refuse DTensors and RankTensors.

They are launched by C++ that asks no Python class. Such a tensor has no memory of its own, so that the kernel would
read address 0, after which the process cannot use its GPU. They are wrapped when the first mesh is made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.cuda import jiterator

from shardwise.errors import UnsupportedError
from shardwise.fabric.virtual import RankTensor
from shardwise.tensor import DTensor

__all__ = ["wrap_jiterator"]


def wrap_jiterator() -> None:
    """Let functions of `torch.cuda.jiterator` check what they are given."""
    kind: Any = getattr(jiterator, "_JittedFunction", None)
    if kind is None:
        return
    original: Any = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *tensors: torch.Tensor, **kwargs: Any) -> Any:
        for tensor in tensors:
            if isinstance(tensor, DTensor | RankTensor):
                raise UnsupportedError(
                    f"a function of torch.cuda.jiterator cannot run on a {type(tensor).__name__}",
                    hint="write it with torch's operators, or run it on locals with shardwise.local_map",
                )
        return original(self, *tensors, **kwargs)

    kind.__call__ = call
