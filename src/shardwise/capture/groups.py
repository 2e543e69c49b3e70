"""Collectives of a program by the methods of their process groups, which take a fraction of an operator's time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shardwise.capture.tape import Call, Ref, Tape
from shardwise.torch_private import tree_flatten, tree_unflatten

__all__ = ["issuing", "noting_options"]

_REDUCING = ("allreduce", "_reduce_scatter_base")


@contextlib.contextmanager
def noting_options(tape: Tape) -> Iterator[None]:
    """Inside, the tape knows the options of a reduction that is issued: the operator shows them as an opaque object."""
    kind: Any = dist.ProcessGroup
    originals = {name: getattr(kind, name) for name in _REDUCING}

    def noting(original: Any) -> Callable[..., Any]:
        def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            tape.options = next((arg for arg in given if isinstance(arg, _OPTIONS)), None)
            try:
                return original(self, *args, **kwargs)
            finally:
                tape.options = None

        return issue

    for name, original in originals.items():
        setattr(kind, name, noting(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


_OPTIONS = (dist.AllreduceOptions, dist.ReduceScatterOptions)


def issuing(call: Call, position: int) -> Callable[..., Any]:
    """The function of tensors that issues a recorded collective and waits for it.

    Args:
        call: the recorded operator of c10d.
        position: where it is in the program; unused.
    """
    op, options = call.op, call.expected
    bound = dict(zip([argument.name for argument in op._schema.arguments], call.args, strict=False)) | call.kwargs
    match op._opname:
        case "_allgather_base_":
            gather = _group(bound)._allgather_base
            return lambda out, given: gather(out, given).wait()
        case "alltoall_base_":
            got, sent = list(bound["output_split_sizes"]), list(bound["input_split_sizes"])
            swap = _group(bound).alltoall_base
            return lambda out, given: swap(out, given, got, sent).wait()
        case "allreduce_" if options is not None:
            reduce = _group(bound).allreduce
            return lambda *tensors: reduce(list(tensors), options).wait()
        case "_reduce_scatter_base_" if options is not None:
            scatter = _group(bound)._reduce_scatter_base
            return lambda out, given: scatter(out, given, options).wait()
        case _:
            return _by_operator(call)


def _group(bound: dict[str, Any]) -> Any:
    return dist.ProcessGroup.unbox(bound["process_group"])


def _by_operator(call: Call) -> Callable[..., Any]:
    """Any other collective: its operator, with new tensors in the places of the recorded ones."""
    leaves, tree = tree_flatten((call.args, call.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Ref)]

    def issue(*tensors: Any) -> None:
        given = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, tree)
        found = call.op(*args, **kwargs)
        (found[-1] if isinstance(found, tuple) else found).wait()

    return issue
