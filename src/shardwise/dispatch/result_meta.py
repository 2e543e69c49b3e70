"""Shape, strides and dtype of an operator's results on one device, by running it on meta tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.core.cache import BoundedCache
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.core.symbolic import unrecorded
from shardwise.dispatch.signature import Key, Signature, nested_result, sparse_result
from shardwise.plan.propagate import meta_tensor
from shardwise.rules.memory_order import CPU_ORDERS
from shardwise.rules.registry import RULES, VALUE_DEPENDENT
from shardwise.rules.shapes import SHAPES, broadcast_shape
from shardwise.schema import OpInfo
from shardwise.torch_private import forward_ad

__all__ = ["ResultMetas"]

MAX_DTYPES = 16384
KEEPING_ORDER = (None, torch.preserve_format, torch.contiguous_format)  # contiguous operands give contiguous results
# What `torch.nested` calls; on meta tensors they fail with internal errors.
NESTED = {torch.ops.aten._nested_tensor_from_tensor_list.default, torch.ops.aten._nested_view_from_jagged.default}


class ResultMetas:
    """Computes the metadata of results, and caches the dtype, which does not depend on the shape."""

    def __init__(self) -> None:
        self._dtypes: BoundedCache[Key, torch.dtype] = BoundedCache(MAX_DTYPES)

    def find(
        self, signature: Signature, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[TensorMeta, ...] | None:
        """The results of a call; None if they depend on values."""
        info = signature.info
        if not (info.pointwise or info.op in SHAPES) or info.writes or info.returns != ("Tensor",):
            return _by_running(signature, args, kwargs)
        if signature.arguments.get("memory_format") not in KEEPING_ORDER:  # `clone` is pointwise
            return _by_running(signature, args, kwargs)
        shapeless = _without_shapes(key)
        dtype, metas = self._dtypes.get(shapeless), None
        if dtype is None:
            metas = _by_running(signature, args, kwargs)
            if metas is None:
                return None
            dtype = self._dtypes.keep(shapeless, metas[0].dtype)
        first = signature.specs[0].tensor_meta
        if (
            info.pointwise
            and dtype is first.dtype
            and first.is_contiguous
            and not first.is_symbolic
            and all(spec.tensor_meta is first for spec in signature.specs)
        ):
            return (first,)
        shape = _shape(signature)  # even where it was run: torch's own on meta tensors is not always right
        if shape is not None and all(spec.tensor_meta.is_contiguous for spec in signature.specs):
            return (TensorMeta(shape, None, dtype),)
        metas = metas or _by_running(signature, args, kwargs)
        if shape is not None and metas and not metas[0].is_symbolic and metas[0].shape != tuple(shape):
            return (TensorMeta(shape, None, dtype),)
        return metas


def _shape(signature: Signature) -> Sequence[int] | None:
    """The shape of the single result, which is contiguous if the operands are."""
    if signature.info.pointwise:
        return broadcast_shape([spec.shape for spec in signature.specs])
    return SHAPES[signature.info.op](signature.arguments)


def _by_running(
    signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[TensorMeta, ...] | None:
    info = signature.info
    if info.op in NESTED:
        raise nested_result()
    on_meta = _on_meta(info)
    if on_meta is info.op and not VALUE_DEPENDENT.isdisjoint(info.op.tags):
        return None
    new_args, new_kwargs = list(args), dict(kwargs)
    try:
        with unrecorded():
            for slot, spec in zip(signature.slots, signature.specs, strict=True):
                slot.put(new_args, new_kwargs, meta_tensor(spec.tensor_meta))
            if "device" in new_kwargs:
                new_kwargs["device"] = torch.device("meta")
            with _outside_forward_mode():
                results = on_meta(*new_args, **new_kwargs)
    except NotImplementedError:
        return None if info.returns else ()
    except ZeroDivisionError:  # some of torch's functions on meta tensors divide by sizes that are zero
        return None
    except TypeError as error:
        if "got multiple values for argument" in str(error):  # some of them do not have the operator's arguments
            return None
        raise
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
    return _in_kernels_order(signature, tuple(TensorMeta.of(tensor) for tensor in tensors))


@contextlib.contextmanager
def _outside_forward_mode() -> Iterator[None]:
    """Inside, tensors have no tangents.

    torch tries the overloads of an operator in turn, and prints the tensors for the error of each that does not match.
    Below autograd, printing a tensor looks for its tangent, fails, and leaves autograd turned off.
    """
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        yield
    finally:
        forward_ad._current_level = level


def _in_kernels_order(signature: Signature, metas: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
    """The results with the strides of the kernels of the mesh's device."""
    order = CPU_ORDERS.get(signature.info.op) if signature.mesh.device_type == "cpu" else None
    if order is None or not metas or metas[0].is_symbolic:
        return metas
    operands = [meta_tensor(spec.tensor_meta) for spec in signature.specs]
    return (TensorMeta.of(order(operands, meta_tensor(metas[0]), signature.arguments)), *metas[1:])


def _on_meta(info: OpInfo) -> Callable[..., Any]:
    """The operator to run on meta tensors: the operator itself, or the one that its rule names."""
    own = RULES.get(info.op)
    return info.op if own is None or own.meta_op is None else own.meta_op


def _without_shapes(key: Key) -> Key:
    """A key with everything that the dtype of a result depends on."""
    return tuple(
        [
            (part.tensor_meta.dtype, part.ndim == 0)
            if part.__class__ is DTensorSpec
            else _without_shapes(part)
            if part.__class__ is tuple
            else part
            for part in key
        ]
    )
