"""Collectives of a program by the methods of their process groups, which take a fraction of an operator's time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from shardwise.capture.tape import Call, Ref, Tape, refused
from shardwise.torch_private import tree_flatten, tree_unflatten

__all__ = ["issuing", "recording_collectives", "starting"]

_COLLECTIVES = (
    "allreduce", "_reduce_scatter_base", "_allgather_base", "alltoall_base", "allgather", "allreduce_coalesced",
    "alltoall", "allgather_coalesced", "allgather_into_tensor_coalesced", "barrier", "broadcast", "gather", "reduce",
    "scatter",
    "reduce_scatter", "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_TO_ONE = ("send", "recv", "recv_anysource")
_OPTIONS = (dist.AllreduceOptions, dist.ReduceScatterOptions)


@contextlib.contextmanager
def recording_collectives(tape: Tape) -> Iterator[None]:
    """Inside, collectives are waited for at once, and the tape records their options, which an operator does not show.

    Some groups run operators of their own while they are waited for; those are not the program's.
    """
    kind: Any = dist.ProcessGroup
    work_kind: Any = dist.Work
    originals = {name: vars(kind)[name] for name in (*_COLLECTIVES, *_TO_ONE) if name in vars(kind)}
    original_wait = vars(work_kind)["wait"]

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tape.is_own_thread():
            return original_wait.__get__(self)(*args, **kwargs)
        tape.pause()
        try:
            return original_wait.__get__(self)(*args, **kwargs)
        finally:
            tape.resume()

    def recorded(original: Any) -> Callable[..., Any]:
        def issue(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not tape.is_own_thread():
                return original.__get__(self)(*args, **kwargs)
            given = (*args, *kwargs.values())
            tape.options = next((arg for arg in given if isinstance(arg, _OPTIONS)), None)
            try:
                work = original.__get__(self)(*args, **kwargs)
            finally:
                tape.options = None
            wait(work)
            tape.arrived()
            return work

        return issue

    def refusing(original: Any) -> Callable[..., Any]:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not tape.is_own_thread():
                return original.__get__(self)(*args, **kwargs)
            raise refused(
                "a message to one rank", "exchange with collectives, or send outside of the captured function"
            )

        return refuse

    for name, original in originals.items():
        setattr(kind, name, refusing(original) if name in _TO_ONE else recorded(original))
    work_kind.wait = wait
    try:
        yield
    finally:
        work_kind.wait = original_wait
        for name, original in originals.items():
            setattr(kind, name, original)


def issuing(call: Call, position: int) -> Callable[..., Any]:
    """The function of tensors that issues a recorded collective and waits for it.

    Args:
        call: the recorded operator of c10d.
        position: where it is in the program; unused.
    """
    start = starting(call)
    return lambda *tensors: start(*tensors).wait()


def starting(call: Call) -> Callable[..., Any]:
    """The function of tensors that issues a recorded collective and returns what can be waited for."""
    op, options = call.op, call.expected
    bound = dict(zip([argument.name for argument in op._schema.arguments], call.args, strict=False)) | call.kwargs
    match op._opname:
        case "_allgather_base_":
            return _group(bound)._allgather_base
        case "alltoall_base_":
            got, sent = list(bound["output_split_sizes"]), list(bound["input_split_sizes"])
            swap = _group(bound).alltoall_base
            return lambda out, given: swap(out, given, got, sent)
        case "allreduce_" if options is not None:
            reduce = _group(bound).allreduce
            return lambda *tensors: reduce(list(tensors), options)
        case "_reduce_scatter_base_" if options is not None:
            scatter = _group(bound)._reduce_scatter_base
            return lambda out, given: scatter(out, given, options)
        case _:
            return _by_operator(call)


def _group(bound: dict[str, Any]) -> Any:
    return dist.ProcessGroup.unbox(bound["process_group"])


def _by_operator(call: Call) -> Callable[..., Any]:
    """Any other collective: its operator, with new tensors in the places of the recorded ones."""
    leaves, tree = tree_flatten((call.args, call.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Ref)]

    def issue(*tensors: Any) -> Any:
        given = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            given[i] = tensor
        args, kwargs = tree_unflatten(given, tree)
        found = call.op(*args, **kwargs)
        return found[-1] if isinstance(found, tuple) else found

    return issue
