"""Version counters: how autograd counts writes.

A DTensor and its local share memory, but are two tensors to autograd, each with a counter of its own. So autograd would
not notice that a tensor saved for backward was changed through the other one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shardwise.core.tracing import is_tracing
from shardwise.torch_private import TorchDispatchMode, pop_raw_dispatch_mode, push_raw_dispatch_mode
from shardwise.transforms import transforming

__all__ = ["with_version_of"]

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


class _Result(TorchDispatchMode):
    """Lets every operator return one tensor."""

    made: torch.Tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return self.made


def with_version_of(source: torch.Tensor, made: AnyTensor) -> AnyTensor:
    """`made`, which has no other references, with the version counter of `source`: a write to either counts for both.

    Example:
        >>> one, other = torch.zeros(2), torch.zeros(2)
        >>> other = with_version_of(one, other)
        >>> other.add_(1)
        tensor([1., 1.])
        >>> one._version
        1
    """
    if transforming() or is_tracing() or made.is_inference():  # inference tensors have no counter
        return made
    # torch gives the result of `detach` the counter of its operand, whatever the dispatched operator returns
    mode = _Result.__new__(_Result)
    mode.made = made
    push_raw_dispatch_mode(mode)
    try:
        return source.detach()  # pyright: ignore[reportReturnType]
    finally:
        pop_raw_dispatch_mode(None)
