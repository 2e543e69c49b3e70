"""What an operator gives on one device: shape, strides and dtype of its results, by running it on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwise.core.layout import dense_strides
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.dispatch.key import Key
from shardwise.dispatch.signature import Signature, sparse_result
from shardwise.plan.propagate import meta_tensor

__all__ = ["ResultMetas"]

MAX_DTYPES = 16384
VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class ResultMetas:
    """Finds results' metadata, and remembers what a new shape does not change: the dtype of pointwise results."""

    def __init__(self) -> None:
        self._dtypes: dict[Key, torch.dtype] = {}

    def find(
        self, signature: Signature, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[TensorMeta, ...] | None:
        """The results of a call; None where they depend on the values."""
        pointwise = torch.Tag.pointwise in signature.info.op.tags
        if pointwise:
            known = self._pointwise(signature, key)
            if known is not None:
                return known
        metas = _by_running(signature, args, kwargs)
        if pointwise and metas is not None and len(metas) == 1 and len(self._dtypes) < MAX_DTYPES:
            self._dtypes.setdefault(_without_shapes(key), metas[0].dtype)
        return metas

    def _pointwise(self, signature: Signature, key: Key) -> tuple[TensorMeta, ...] | None:
        """What a pointwise operator gives on contiguous operands of a new shape, if its dtype is known from another."""
        info, specs = signature.info, signature.specs
        if info.returns != ("Tensor",) or info.writes:
            return None
        dtype = self._dtypes.get(_without_shapes(key))
        if dtype is None or any(spec.tensor_meta.stride != dense_strides(spec.shape) for spec in specs):
            return None
        shape: list[int] = []
        for spec in specs:
            own = spec.shape
            shape[:0] = own[: len(own) - len(shape)] if len(own) > len(shape) else ()
            for dim in range(1, len(own) + 1):
                if own[-dim] != 1:
                    if shape[-dim] not in (1, own[-dim]):
                        return None  # do not broadcast: let the operator say so
                    shape[-dim] = own[-dim]
        return (TensorMeta(shape, None, dtype),)


def _by_running(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[TensorMeta, ...] | None:
    info = signature.info
    if not VALUE_DEPENDENT.isdisjoint(info.op.tags):
        return None
    new_args, new_kwargs = list(args), dict(kwargs)
    for slot, spec in zip(signature.slots, signature.specs, strict=True):
        slot.put(new_args, new_kwargs, meta_tensor(spec.tensor_meta))
    if "device" in new_kwargs:
        new_kwargs["device"] = torch.device("meta")
    try:
        results = info.op(*new_args, **new_kwargs)
    except NotImplementedError:
        return None if info.returns else ()
    except RuntimeError as error:
        if "called on meta tensors" in str(error):  # item(): the operator looks at values
            return None
        raise
    given = results if isinstance(results, tuple | list) else () if results is None else (results,)
    tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
    if given and not tensors:
        return None
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise sparse_result(info)
    return tuple(TensorMeta.of(tensor) for tensor in tensors)


def _without_shapes(key: Key) -> Key:
    """A key with only what a pointwise result's dtype depends on."""
    return tuple((part.tensor_meta.dtype, part.ndim == 0) if part.__class__ is DTensorSpec else part for part in key)
