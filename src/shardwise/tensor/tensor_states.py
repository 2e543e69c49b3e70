"""States of a DTensor besides the ordinary one: its collective is in flight, or it is a view that was copied.

Each is a subclass, so that the hot path, which tests for exactly `DTensor`, pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.core.spec import DTensorSpec
from shardwise.core.tracing import is_tracing
from shardwise.dispatch.views import DETACH, OUTSIDE, materialize
from shardwise.fabric.routes import BoundRoute, bound_route
from shardwise.fabric.traced_collectives import recording
from shardwise.local import in_order_of
from shardwise.tensor.laid_out import LOCAL, SPEC, LaidOutTensor, classes
from shardwise.torch_private import make_wrapper_subclass, tree_leaves

__all__ = ["CopiedState", "PendingState", "pending"]


class Flight(NamedTuple):
    """A collective in flight: how to wait for its result, and the strides of the result."""

    finish: Callable[[], torch.Tensor]
    stride: tuple[int, ...] | None


class PendingState(LaidOutTensor):
    """A DTensor whose last collective is still in flight. The first use waits, and it is an ordinary DTensor then."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return wait_for(self)._local_tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, PendingState):
                wait_for(leaf)
        return classes.ordinary.__torch_dispatch__(func, types, args, kwargs)


def pending(local: torch.Tensor, bound: BoundRoute, target: DTensorSpec) -> Any:
    """A DTensor of this spec whose local is the result of the route, which is started."""
    meta = target.tensor_meta
    made = make_wrapper_subclass(
        classes.pending, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device
    )
    made._spec = target
    made._flight = Flight(bound.start(local), meta.stride if bound.reorder else None)
    return made


def wait_for(tensor: Any) -> Any:
    """Wait for the collective of a pending tensor, which is an ordinary one then; others as they are."""
    if tensor.__class__ is classes.pending:
        finish, stride = tensor._flight
        local = finish()
        tensor.__class__ = classes.ordinary
        tensor._local_tensor = local if stride is None else in_order_of(local, stride)
        vars(tensor).pop("_flight", None)
    return tensor


class CopiedState(LaidOutTensor):
    """A view that shares no memory with its base. Its values are computed again after a write to the base."""

    __slots__ = ()

    @property
    def _local_tensor(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._copied_view.is_stale:
            self._make_again()
        return LOCAL.__get__(self)

    @property
    def _spec(self) -> DTensorSpec:  # pyright: ignore[reportIncompatibleVariableOverride]
        # who reads the layout reads the local next, and a write to the base may have ended that it is constant
        if SPEC.__get__(self).broadcast and self._copied_view.is_stale:
            self._make_again()
        return SPEC.__get__(self)

    @_spec.setter
    def _spec(self, spec: DTensorSpec) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        SPEC.__set__(self, spec)

    def _make_again(self) -> None:
        """Take the view of its base again."""
        with recording(self._held):
            again = self._copied_view.again()
            # in inference mode torch counts no writes: its layout and local are read as they are, or it is made again
            local, found, spec = again._held, SPEC.__get__(again), SPEC.__get__(self)
            if spec.broadcast and found is not spec:  # a constant dim may have changed
                spec = spec.materialized()
                SPEC.__set__(self, spec)
            LOCAL.__set__(self, local if found is spec else bound_route(found, spec).run(local))

    def requires_grad_(self, requires_grad: bool = True) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As `torch.Tensor.requires_grad_`. A leaf detached from a lazy tensor (`nn.Parameter`) shares memory with it.

        So both store every element from now on, and the leaf is an ordinary DTensor.
        """
        super().requires_grad_(requires_grad)
        made = self._copied_view
        if made.op is DETACH and made.args[0].__class__ is classes.ordinary and not is_tracing():
            if made.args[0]._spec.is_lazy:
                materialize(made.args[0])
            again = made.again()
            if again.__class__ is classes.ordinary:
                LOCAL.__set__(self, again._held)
                SPEC.__set__(self, again._spec)
                self._mark_copied(None)
        return self

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> Any:
        made = classes.ordinary.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        if is_tracing():
            made._mark_copied(OUTSIDE)
        return made

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        LOCAL.__set__(self, local)
