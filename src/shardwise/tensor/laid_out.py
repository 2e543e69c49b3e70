"""The base of DTensor: a local and a spec. Makes DTensors of locals; the classes themselves are set by `dtensor`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import TypeIs

from shardwise.core.dispatch_keys import NumberConversions
from shardwise.core.spec import DTensorSpec
from shardwise.core.symbolic import introduce_sizes
from shardwise.core.tracing import is_dynamo_compiling
from shardwise.torch_private import make_wrapper_subclass
from shardwise.transforms import innermost, is_wrapped

__all__ = ["LOCAL", "SPEC", "LaidOutTensor", "classes", "dtensor_of", "is_dtensor", "wrapper_of"]


class LaidOutTensor(NumberConversions):
    """The state of every DTensor. Its methods are those of `DTensor`."""

    __slots__ = ("_local_tensor", "_spec")
    _local_tensor: torch.Tensor
    _spec: DTensorSpec
    _laid_out_over_ranks = True  # so that operators on it and locals of virtual ranks are dispatched to it
    _copied_view: Any = None  # how it was made, if it is a view that shares no memory with its base
    _reduction: Any = None  # the reduced tensor, if it is Partial and has been reduced
    _memory: Any = None  # identifies its memory and shape for copied views of it; None where there are none

    @property
    def _held(self) -> torch.Tensor:
        """The local as it is, even where it is a copied view whose base may have been written to since."""
        return LOCAL.__get__(self)

    @property
    def _held_spec(self) -> DTensorSpec:
        """The layout as it is stored, in any state."""
        return SPEC.__get__(self)

    def _mark_copied(self, made: Any) -> None:
        """Remember how a view was made that shares no memory with its base; None: it is an ordinary tensor again."""
        self._copied_view = made
        self.__class__ = classes.ordinary if made is None else classes.copied  # pyright: ignore[reportAttributeAccessIssue]


class _Classes:
    """The three classes of DTensors, which are defined above this module."""

    ordinary: Any
    pending: Any
    copied: Any


classes = _Classes()
LOCAL = LaidOutTensor.__dict__["_local_tensor"]  # the slots, which properties of the states hide
SPEC = LaidOutTensor.__dict__["_spec"]
_make_wrapper, _STRIDED = make_wrapper_subclass, torch.strided


def dtensor_of(spec: DTensorSpec, local: torch.Tensor) -> Any:
    """A DTensor of this local, fast."""
    meta = spec.tensor_meta
    if meta.is_symbolic:
        introduce_sizes()
    made = _make_wrapper(  # pyright: ignore[reportCallIssue]
        classes.ordinary, meta.shape, meta.stride, None, None, meta.dtype, _STRIDED, local.device
    )
    made._local_tensor = local
    made._spec = spec
    return made


def wrapper_of(spec: DTensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that makes a DTensor of a local with this spec."""
    meta = spec.tensor_meta
    if meta.is_symbolic:
        return functools.partial(dtensor_of, spec)
    cls, shape, stride, dtype = classes.ordinary, meta.shape, meta.stride, meta.dtype

    def wrap(local: torch.Tensor) -> torch.Tensor:
        made = _make_wrapper(cls, shape, stride, None, None, dtype, _STRIDED, local.device)  # pyright: ignore[reportCallIssue]
        made._local_tensor = local
        made._spec = spec
        return made

    return wrap


def is_dtensor(value: Any) -> TypeIs[LaidOutTensor]:
    """Whether a value is a DTensor, or a wrapper of one inside a function that torch.func transforms."""
    if isinstance(value, LaidOutTensor):
        return True
    if value.__class__ is not torch.Tensor or is_dynamo_compiling():  # it does not show wrapped tensors
        return False
    return is_wrapped(value) and isinstance(innermost(value), LaidOutTensor)
