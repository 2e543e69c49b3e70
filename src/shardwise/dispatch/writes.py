"""Operators that write to their arguments and have no in-place rule: by a new tensor, or by copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise import modes
from shardwise.dispatch.executors import general_executor, with_written
from shardwise.dispatch.signature import Executor, Signature, Wrapping
from shardwise.dispatch.views import materialize, replace_local, write
from shardwise.errors import UnsupportedError
from shardwise.fabric.routes import bound_route
from shardwise.local import any_complex, seeing_conjugates
from shardwise.schema import functional_of
from shardwise.torch_private import DisableTorchDispatch, OpOverload

__all__ = ["replacing_locals", "reshaping_in_place", "sharing_memory", "through_copies", "through_functional"]


def reshaping_in_place(signature: Signature, functional: OpOverload) -> Executor:
    """`t_`, `squeeze_`, ...: the tensor itself becomes the view."""
    wrapper, op = signature.wrapping.wrapper, signature.info.op

    def reshape_in_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # replaces the tensor, which may itself be a copied view
        before: Any = wrapper(args[0]._spec)(args[0]._local_tensor)
        before._mark_copied(args[0]._copied_view)
        view = functional(before, *args[1:], **kwargs)
        with DisableTorchDispatch():  # the wrapper's own sizes and strides
            op(*args, **kwargs)
        args[0]._local_tensor, args[0]._spec, args[0]._memory = view._local_tensor, view._spec, None
        args[0]._mark_copied(view._copied_view)
        return args[0]

    return reshape_in_place


def sharing_memory(wrapping: Wrapping, op: OpOverload) -> Executor:
    """`x.set_(y)`: x becomes what y is, with its memory and layout."""

    def share_memory(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target, source = args
        if not (isinstance(target, wrapping.tensor_class) and isinstance(source, wrapping.tensor_class)):
            raise UnsupportedError(
                "set_() of a DTensor and a plain tensor: they cannot share memory",
                hint="copy_() copies values; distribute_tensor(tensor, mesh, placements) makes a DTensor",
            )
        with DisableTorchDispatch():  # the wrapper's own sizes and strides
            op(target, source)
        vars(target).pop("_flight", None)
        target._reduction, target._memory = None, None
        target._local_tensor, target._spec = source._local_tensor, source._spec
        target._mark_copied(source._copied_view)
        return target

    return share_memory


def replacing_locals(signature: Signature) -> Executor:
    """Write to tensors with broadcast dims that would be dense on one device: they get new locals.

    The result of the operator without the underscore becomes the tensor, in its own layout: a replicated gradient
    to which a sharded one is added is sharded. If there is no such operator, the tensors are materialized first.
    """
    info, wrapping = signature.info, signature.wrapping
    written = [slot for slot in signature.slots if slot.name in info.writes]
    functional = functional_of(info.op) if info.returned == (written[0].name,) and not info.outs else None
    if torch.Tag.inplace_view in info.op.tags or info.draws or len(written) > 1:
        functional = None

    def replace_locals(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        targets = [slot.get(args, kwargs) for slot in written]
        if functional is None:
            for target in targets:
                if isinstance(target, wrapping.tensor_class) and target._spec.is_lazy:
                    materialize(target)
            return info.op(*args, **kwargs)
        with modes.decomposing(info.op):
            result = functional(**info.bind(args, kwargs))
        _refuse_cast(targets, [result])
        replace_local(targets[0], result)
        return targets[0]

    return replace_locals


def _refuse_cast(targets: Sequence[Any], results: Sequence[Any]) -> None:
    """Refuse what torch refuses of an operator in place: complex results in real tensors, floats in integer ones."""
    for target, result in zip(targets, results, strict=True):
        if not torch.can_cast(result.dtype, target.dtype):
            raise UnsupportedError(
                f"result type {result.dtype} can't be cast to the desired output type {target.dtype}",
                hint="write x = x + y instead of x += y, or convert the other operand first",
            )


def through_copies(signature: Signature) -> Executor:
    """Write to gathered copies on every rank, then redistribute them to the layouts of the tensors."""
    info, slots, specs, wrapping = signature.info, signature.slots, signature.specs, signature.wrapping
    mesh, pinned, gathered = signature.mesh, signature.pinned, signature.replicated_operands()
    local_op = seeing_conjugates(info.op) if any_complex(specs, ()) else None
    run = general_executor(signature, (None,) * len(slots), None, local_op=local_op, draws=signature.info.draws)
    wraps = [wrapping.wrapper(spec) for spec in gathered]

    def run_on_copies(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        new_args, new_kwargs = list(args), dict(kwargs)
        given, copies = [], []
        for slot, spec, goal, wrap in zip(slots, specs, gathered, wraps, strict=True):
            tensor = slot.get(args, kwargs)
            local = wrapping.local_of(tensor, mesh)
            copy = wrap(local if spec is goal else bound_route(spec, goal).run(local))
            slot.put(new_args, new_kwargs, copy)
            given.append(tensor)
            copies.append(copy)
        results = run(tuple(new_args), new_kwargs)
        for i in pinned:
            if specs[i] is not gathered[i]:
                write(wrapping, info, given[i], copies[i])
        back = {id(copy): tensor for copy, tensor in zip(copies, given, strict=True)}
        if isinstance(results, tuple):
            return tuple(back.get(id(result), result) for result in results)
        return back.get(id(results), results)

    return run_on_copies


def through_functional(signature: Signature, op: OpOverload) -> Executor:
    """Compute a new tensor and copy it into the target, in the layout of the target."""
    info, wrapping, mesh = signature.info, signature.wrapping, signature.mesh
    written = [slot for slot in signature.slots if slot.name in info.writes]

    def write_functional_result(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = [slot.get(args, kwargs) for slot in written]
        # all by name: the two forms of an operator need not have the same defaults
        kept = {name: value for name, value in info.bind(args, kwargs).items() if name not in info.outs}
        with modes.decomposing(info.op):  # plain tensors among the arguments have been accepted
            made = wrapping.wrap_plain(op(**kept), mesh)  # plain if only the targets are DTensors
        results = made if isinstance(made, tuple) else (made,)
        _refuse_cast(given, results)
        for target, result in zip(given, results, strict=True):
            write(wrapping, info, target, result)
        return with_written(wrapping, info, args, kwargs, (None,) * len(info.returns), None, mesh)

    return write_functional_result
