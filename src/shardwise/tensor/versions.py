"""Version counters: how autograd counts writes.

A DTensor and its local share memory, but are two tensors to autograd, each with a counter of its own. So autograd would
not notice that a tensor saved for backward was changed through the other one.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shardwise.compilers import never_traced
from shardwise.core.tracing import is_tracing
from shardwise.fabric.rank_tensor import counters_of_data
from shardwise.torch_private import (
    UnwrappedDispatchMode,
    pop_raw_dispatch_mode,
    push_raw_dispatch_mode,
    without_dispatch_modes,
)
from shardwise.transforms import transforming

__all__ = ["counted_data", "with_version_of"]

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


class _Result(UnwrappedDispatchMode):
    """Lets every operator return one tensor."""

    made: torch.Tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return self.made


never_traced(_Result.__torch_dispatch__)


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


def counted_data(tensor: torch.Tensor, local: torch.Tensor, data: AnyTensor) -> AnyTensor:
    """`data`, which is `tensor.data` and has no other references, with a counter that copies of the memory look at.

    As on one device it is not the counter of `tensor`: autograd does not see such writes. But views that had to be
    copied, and the reduction of a Partial, are computed again after them. All `data` of one memory share one counter.
    """
    if transforming() or is_tracing() or tensor.is_inference() or data.is_inference():
        return data

    def counters() -> tuple[torch.Tensor, ...]:
        # the counters outlive an inference mode, whose own tensors count nothing
        with torch.inference_mode(False), without_dispatch_modes():
            return with_version_of(tensor, torch.empty(0)), torch.empty(0)

    return with_version_of(counters_of_data(local, counters)[1], data)
