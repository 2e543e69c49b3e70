"""Collectives and bytes as they are issued, by either library, on torch's fake process group.

One dispatch mode sees the calls to process groups; the bytes follow from the shapes in the calls. Knows nothing of why
something is communicated.
"""

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise

DTENSORS = (shardwise.DTensor, torch_tensor.DTensor)


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """A process group of `size` ranks, of which this process is one and the others are pretended."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # advice on its own routes
    logging.getLogger("torch._logging._internal").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(
        logging.CRITICAL
    )  # what an operator refuses, it raises too
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def calls(function: Callable[[], object], of_c: bool = False) -> int:
    """How many functions of Python a call enters, generators each time that they go on.

    Those of a garbage collection are not its own.

    Args:
        function: what is called.
        of_c: count functions of C too.
    """
    found, events = 0, ("call", "c_call") if of_c else ("call",)

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in events

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


class Moved(NamedTuple):
    """What something costs a rank: collectives, and bytes received."""

    collectives: float
    received: float


# of which argument of a collective, the output or the input, this rank gets as much from each of the others
_PERFORMED = {"_allgather_base": 1, "all_gather_single": 1, "_reduce_scatter_base": 0, "reduce_scatter_single": 0}


class Unperformed:
    """The collectives that were asked for, and the bytes that this rank would have received; each of them is over."""

    def __init__(self) -> None:
        self.moved = Moved(0, 0.0)

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def unperformed_collectives() -> Iterator[Unperformed]:
    """Process groups do nothing when they are asked for a collective, for either library: the work is done at once.

    The fake group carries out an all-gather by one copy for each rank. That is the fake's own time, not a library's.
    Names here are those that both libraries call on `torch.distributed.ProcessGroup`.
    """
    kept = {name: vars(dist.ProcessGroup)[name] for name in _PERFORMED if name in vars(dist.ProcessGroup)}
    asked = Unperformed()

    def unperformed(which: int) -> Callable[..., Unperformed]:
        def method(group: dist.ProcessGroup, *tensors: Any, **options: Any) -> Unperformed:
            count, received = asked.moved
            asked.moved = Moved(count + 1, received + (group.size() - 1) * tensors[which].nbytes)
            return asked

        return method

    for name in kept:
        setattr(dist.ProcessGroup, name, unperformed(_PERFORMED[name]))
    try:
        yield asked
    finally:
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, method)


class Calls(TorchDispatchMode):
    """Counts the collectives that are issued inside, and the bytes that this rank receives in them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.received = 0.0

    @property
    def moved(self) -> Moved:
        return Moved(self.count, self.received)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTENSORS) for kind in types):
            return NotImplemented  # what that issues comes here again
        name = func._schema.name
        if name in _OUTPUT_FIRST:
            args[0].zero_()  # the fake group leaves it as it is, and an index must be one
        result = func(*args, **(kwargs or {}))
        if name in _RECEIVED:
            self.count += 1
            self.received += _RECEIVED[name](args, result)
        elif func.namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in _SILENT:
            raise NotImplementedError(f"bytes of {name} are not known")
        return result


def _members(group: Any) -> int:
    return dist.ProcessGroup.unbox(group).size()


def _all_reduced(tensor: torch.Tensor, members: int) -> float:
    return 2 * (members - 1) / members * tensor.nbytes


def _split_bytes(output: torch.Tensor, splits: Sequence[int], group: Any) -> float:
    """What comes from others in an all-to-all: all but the part from oneself."""
    members = dist.ProcessGroup.unbox(group)
    own = splits[members.rank()] if splits else output.numel() // members.size()
    return (output.numel() - own) * output.element_size()


def _row_bytes(output: torch.Tensor, splits: Sequence[int], group: Any) -> float:
    """The same of a functional one, whose splits count rows."""
    return output.nbytes * (1 - splits[_resolved(group).rank()] / sum(splits)) if sum(splits) else 0.0


_OUTPUT_FIRST = {"c10d::alltoall_base_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"}
_RECEIVED: dict[str, Callable[[Any, Any], float]] = {
    "c10d::_allgather_base_": lambda args, _: (_members(args[2]) - 1) * args[1].nbytes,
    "c10d::allreduce_": lambda args, _: sum(_all_reduced(tensor, _members(args[1])) for tensor in args[0]),
    "c10d::_reduce_scatter_base_": lambda args, _: (_members(args[2]) - 1) * args[0].nbytes,
    "c10d::alltoall_base_": lambda args, _: _split_bytes(args[0], args[3], args[2]),
    "c10d::broadcast_": lambda args, _: sum(tensor.nbytes for tensor in args[0]),
    "_c10d_functional::all_gather_into_tensor": lambda args, _: (args[1] - 1) * args[0].nbytes,
    "_c10d_functional::all_reduce": lambda args, _: _all_reduced(args[0], _resolved(args[2]).size()),
    "_c10d_functional::reduce_scatter_tensor": lambda args, result: (args[2] - 1) * result.nbytes,
    "_c10d_functional::all_to_all_single": lambda args, result: _row_bytes(result, args[1], args[3]),
    "_dtensor::shard_dim_alltoall": lambda args, _: args[0].nbytes * (1 - 1 / _resolved(args[3]).size()),
}
_SILENT = {
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "_dtensor::mesh_get_process_group",
}


def _resolved(group: Any) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group  # pyright: ignore[reportArgumentType]
