"""Operators without an applicable rule, or whose rule would communicate: decomposed, or run on replicated operands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.core.spec import TensorMeta
from shardwise.dispatch.executors import general_executor
from shardwise.dispatch.signature import Executor, Signature, Wrapping, routes_between
from shardwise.dispatch.views import COPYING_VIEWS
from shardwise.local import any_complex, laid_out_like, seeing_conjugates
from shardwise.plan.propagate import meta_tensor, replicated_spec
from shardwise.rules.registry import overloads
from shardwise.schema import OpInfo
from shardwise.torch_private import OpOverload, decomposition_of

__all__ = ["LIKE", "decomposed", "made_elsewhere", "on_replicated_operands", "torch_decomposition"]

# Operators that access elements by their memory order, or refuse them. By name: torch loads `prims` when it needs
# them.
BY_MEMORY = {
    "aten::resize", "aten::resize_as", "prims::as_strided_scatter", "aten::_pdist_forward", "aten::_pdist_backward",
}  # fmt: skip

aten = torch.ops.aten
# Operators that read only the metadata of a tensor.
LIKE = set(
    overloads(
        [
            aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like,
            aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided,
        ]
    )
)  # fmt: skip


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    """torch's decomposition. It copies if nothing is dropped; on one device the result is the operand then."""
    return aten.dropout.default.decompose(tensor, p, train) if train and p else tensor


@functools.cache
def torch_decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """The decomposition that torch has for an operator without a rule."""
    if op is aten.dropout.default:
        return _dropout
    if op._can_decompose():
        return op.decompose
    if OpInfo.of(op).is_view:  # these need storage offsets, which wrapper tensors lack
        return None
    return decomposition_of(op)


def decomposed(
    signature: Signature,
    compute: Callable[..., Any],
    directly: Callable[[], Executor],
    metas: tuple[TensorMeta, ...] | None = None,
) -> Executor:
    """Run a decomposition. Plain tensors among its results were created inside it, equal on every rank.

    Operators that may return a view or a copy (`to`, `contiguous`, `reshape`) come here in inference mode. Whether a
    result is a view of the operand is known to the operators that the decomposition calls.
    If a decomposition calls its own operator, or returns NotImplemented, the operator runs `directly`.
    Results have the strides of `metas`, if given: random numbers are drawn in the order of memory.
    """
    info, wrapping, mesh = signature.info, signature.wrapping, signature.mesh

    def run_decomposed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if modes.is_decomposing(info.op):
            return directly()(args, kwargs)
        with modes.decomposing(info.op):
            results = wrapping.wrap_plain(compute(*args, **kwargs), mesh)
        if results is NotImplemented:
            return directly()(args, kwargs)
        return results if metas is None else wrapping.in_memory_order(results, metas)

    return run_decomposed


def made_elsewhere(wrapping: Wrapping, info: OpInfo) -> Executor:
    """A new tensor on a device of another type than the mesh's: plain, global, the same on all ranks."""

    def stand_in(value: Any) -> Any:
        return meta_tensor(value._spec.tensor_meta) if isinstance(value, wrapping.tensor_class) else value

    def run_made_elsewhere(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return info.op(*map(stand_in, args), **kwargs)

    return run_made_elsewhere


def on_replicated_operands(signature: Signature, metas: tuple[TensorMeta, ...] | None) -> Executor:
    """Replicate all operands, run the operator on every rank, and warn."""
    info, specs, mesh = signature.info, signature.specs, signature.mesh
    routes = routes_between(specs, signature.replicated_operands())
    outputs = None if metas is None else tuple(replicated_spec(mesh, meta) for meta in metas)
    local_op = _in_memory_order(signature) if _goes_by_memory(info.op) else None
    if any_complex(specs, outputs or ()):
        local_op = seeing_conjugates(local_op or info.op)
    copies = info.is_view and (any(routes) or info.op in COPYING_VIEWS)
    run = general_executor(signature, routes, outputs, local_op=local_op, copies=copies, draws=signature.info.draws)
    moving = [route.route for route in routes if route is not None and route.communicates]
    if not moving or not any("Tensor" in kind for kind in info.returns):  # item() is a request for the value
        return run

    def run_and_warn(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = run(args, kwargs)
        modes.warn_replicated(info.op, specs, moving)
        return result

    return run_and_warn


def _goes_by_memory(op: OpOverload) -> bool:
    return op.name() in BY_MEMORY or torch.Tag.needs_exact_strides in op.tags


def _in_memory_order(signature: Signature) -> Callable[..., Any]:
    """The operator on operands with the strides of one device; moved operands may have different strides."""
    op, slots, specs = signature.info.op, signature.slots, signature.specs

    def run_in_memory_order(*args: Any, **kwargs: Any) -> Any:
        new_args, new_kwargs = list(args), dict(kwargs)
        for slot, spec in zip(slots, specs, strict=True):
            slot.put(new_args, new_kwargs, _with_strides(slot.get(args, kwargs), spec.tensor_meta.stride))
        return op(*new_args, **new_kwargs)

    return run_in_memory_order


def _with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return tensor if tensor.stride() == stride else laid_out_like(tensor, stride)
