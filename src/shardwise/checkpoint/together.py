"""The processes that save or load together: what each has to say is told to all, errors too, so that none waits.

The one place of the package that communicates. On virtual ranks there is one process, and nothing to be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.core import mesh as mesh_module
from shardwise.errors import CheckpointError, ShardwiseError, UnsupportedError
from shardwise.fabric.virtual import RankTensor
from shardwise.tensor import DTensor

__all__ = ["Processes", "Turn", "processes_of"]

T = TypeVar("T")


class Turn:
    """What this process has to tell the others at one point: something, or an error."""

    def __init__(self) -> None:
        self.says: Any = None
        self.error: Exception | None = None

    def attempt(self, run: Callable[[], T], otherwise: T) -> T:
        """What `run` gives. After an error, which is kept to be told to the others, `otherwise`."""
        if self.error is None:
            try:
                return run()
            except Exception as error:
                self.error = error
        return otherwise


class Processes:
    """The processes of a job by rank; one alone where there is no process group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks: tuple[int, ...] = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.rank = self.ranks[0] if group is None else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that does what is done once."""
        return self.rank == self.ranks[0]

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.group is None

    def tell(self, turn: Turn) -> list[Any]:
        """What every process says, by rank; an error of any of them is raised on all."""
        if self.group is None or len(self.ranks) == 1:
            if turn.error is not None:
                raise turn.error
            return [turn.says]
        said: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(said, (_portable(turn.error), None if turn.error else turn.says), group=self.group)
        if turn.error is not None:
            raise turn.error
        for rank, (error, _) in zip(self.ranks, said, strict=True):
            if error is not None:
                raise _of_rank(rank, error)
        return [says for _, says in said]

    def tell_if_different(self, turn: Turn, fact: Any) -> list[Any]:
        """What every process says, which is sent only where their facts differ: digests of these go first."""
        first = Turn()
        first.error, first.says = turn.error, hashlib.sha256(repr(fact).encode()).digest()
        return [turn.says] * len(self.ranks) if len(set(self.tell(first))) == 1 else self.tell(turn)

    def apart(self) -> Processes:
        """The same processes with a group of their own, so that a thread can talk while the program goes on."""
        if self.group is None:
            return self
        key = (id(dist.group.WORLD), self.ranks)
        made = _apart.get(key)
        if made is None:
            made = dist.new_group(list(self.ranks), backend="gloo", use_local_synchronization=True)
            _apart.clear()  # those of a former world are gone with it
            _apart[key] = made
        return Processes(made)


_apart: dict[Any, Any] = {}


def _portable(error: Exception | None) -> Exception | str | None:
    """An error as it can be sent: ours as they are, of others what they say."""
    if error is None or isinstance(error, ShardwiseError):
        return error
    return f"{type(error).__name__}: {error}"


def _of_rank(rank: int, error: ShardwiseError | str) -> Exception:
    if isinstance(error, ShardwiseError):
        error.add_note(f"said by rank {rank}")
        return error
    return CheckpointError(f"rank {rank}: {error}")


def processes_of(tensors: Iterable[torch.Tensor], group: Any = None) -> Processes:
    """Who saves or loads these tensors: this process, where their ranks are virtual, or those of the process group."""
    fabrics: set[str] = set()
    for tensor in tensors:
        if isinstance(tensor, RankTensor):
            raise UnsupportedError(
                "the state holds a RankTensor, the locals of virtual ranks",
                hint="DTensor.from_local says what they make up",
            )
        if isinstance(tensor, DTensor):
            fabrics.add(tensor.device_mesh.fabric)
    if "dry" in fabrics:
        raise UnsupportedError(
            "a dry run has no values to save or load", hint="make the tensors on a virtual mesh or under torchrun"
        )
    if len(fabrics) > 1:
        raise UnsupportedError(
            "the state holds tensors of virtual ranks and of processes", hint="save them as two checkpoints"
        )
    surrounding = fabrics.pop() if fabrics else mesh_module.chosen_fabric()
    if surrounding != "c10d" or not dist.is_initialized():
        return Processes()
    if dist.get_backend(group) == "fake":
        raise UnsupportedError(
            "the fake process group has one rank of many", hint="use virtual ranks or real processes"
        )
    return Processes(dist.group.WORLD if group is None else group)
