"""DTensors whose local is not there yet: its collective is in flight, or it is a copy of what was written to since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardwise.compilers import never_traced
from shardwise.core.spec import DTensorSpec
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.tensor.dtensor import LOCAL_SLOT, DTensor

__all__ = ["CopiedDTensor", "PendingDTensor", "pending"]


class PendingDTensor(DTensor):
    """A DTensor whose last collective is still in flight. The first use waits, and it is an ordinary DTensor then."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _settle(self)._local_tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingDTensor):
                _settle(leaf)
        return DTensor.__torch_dispatch__(func, types, args, kwargs)


def pending(local: torch.Tensor, bound: BoundRoute, target: DTensorSpec) -> DTensor:
    """A DTensor of this spec whose local the route brings, which is begun."""
    meta = target.tensor_meta
    made = torch.Tensor._make_wrapper_subclass(
        PendingDTensor, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device
    )
    made._spec = target
    LOCAL_SLOT.__set__(made, bound.start(local))  # until it is settled the slot holds the function that waits
    return made


def _settle(tensor: DTensor) -> DTensor:
    if tensor.__class__ is PendingDTensor:
        finish = LOCAL_SLOT.__get__(tensor)
        tensor.__class__ = DTensor
        LOCAL_SLOT.__set__(tensor, finish())
    return tensor


class CopiedDTensor(DTensor):
    """A view that shares no memory with its base. What it holds is made anew where the base was written to since."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._copied_view.is_stale:
            again = self._copied_view.again()
            local = again._held
            LOCAL_SLOT.__set__(
                self, local if again._spec is self._spec else bound_route(again._spec, self._spec).run(local)
            )
        return LOCAL_SLOT.__get__(self)

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        LOCAL_SLOT.__set__(self, local)


never_traced(PendingDTensor.__torch_dispatch__.__func__)  # pyright: ignore[reportFunctionMemberAccess]
