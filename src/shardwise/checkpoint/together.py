"""The exchanges of the processes that save or load together: results and errors of each reach all, so that none waits.

Every step between two exchanges runs inside `Turn.attempt`: an error, an interrupt too, is kept, sent with the next
exchange, and raised on all processes there. The one place of the package that communicates. On virtual ranks there is
one process, and nothing to exchange.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.checkpoint.ranges import Replaced
from shardwise.core import mesh as mesh_module
from shardwise.errors import CheckpointError, ShardwiseError, UnsupportedError
from shardwise.fabric.base import of_one_rank
from shardwise.fabric.c10d import c10d, new_group
from shardwise.fabric.virtual import RankTensor
from shardwise.tensor import DTensor

__all__ = ["Processes", "Turn", "processes_of"]

T = TypeVar("T")


class Turn:
    """What this process contributes to the next exchange: a value, or an error."""

    def __init__(self) -> None:
        self.says: Any = None
        self.error: BaseException | None = None

    def attempt(self, run: Callable[[], T], otherwise: T) -> T:
        """What `run` gives. After an error, which is kept for the next exchange, `otherwise`."""
        if self.error is None:
            try:
                return run()
            except BaseException as error:
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
        packed = turn.attempt(lambda: pickle.dumps(turn.says), b"")
        said = self._exchange((_portable(turn.error), packed if turn.error is None else b""))
        failed = [(rank, error) for rank, (error, _) in zip(self.ranks, said, strict=True) if error is not None]
        for rank, error in failed:
            if isinstance(error, Replaced):  # all start over, whatever else went wrong
                raise _of_rank(rank, error)
        if turn.error is not None:
            raise turn.error
        for rank, error in failed:
            raise _of_rank(rank, error)
        return [pickle.loads(data) for _, data in said]

    def _exchange(self, mine: Any) -> list[Any]:
        """All-gather an object. All communication of checkpoints is here."""
        said: list[Any] = [None] * len(self.ranks)
        c10d.checked(
            self.group, "an exchange of a checkpoint", lambda: dist.all_gather_object(said, mine, group=self.group)
        )
        return said

    def tell_if_different(self, turn: Turn, fact: Callable[[], Any], beside: Any = None) -> tuple[list[Any], list[Any]]:
        """What every process says, which is sent only where their facts differ: digests of these go first.

        Second, what every process gave as `beside`, which is small and goes with the digests.
        """
        first = Turn()
        first.error = turn.error
        first.says = first.attempt(lambda: (hashlib.sha256(repr(fact()).encode()).digest(), beside), None)
        told = self.tell(first)
        same = len({digest for digest, _ in told}) == 1
        return [turn.says] * len(self.ranks) if same else self.tell(turn), [beside for _, beside in told]

    def said_by_first(self, says: Any) -> Any:
        """What the first process says; what the others give is not used."""
        said = [says]
        if self.group is not None:
            c10d.checked(
                self.group,
                "an object is sent by the first process",
                lambda: dist.broadcast_object_list(said, self.ranks[0], group=self.group),
            )
        return said[0]

    def fill_from_first(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor, on a device that the group can send from, with the values of the first process."""
        if self.group is not None:
            c10d.checked(
                self.group,
                f"{tuple(tensor.shape)} {tensor.dtype} is sent by the first process",
                lambda: dist.broadcast(tensor, self.ranks[0], group=self.group),
                compare=False,
            )

    def device(self, wanted: torch.device) -> torch.device:
        """A device that the backends of the group can send from: the wanted one, or else one that they have."""
        types = [entry.split(":")[0] for entry in str(dist.get_backend_config(self.group)).split(",")]
        if wanted.type in types:
            return wanted
        return torch.device("cpu" if "cpu" in types else torch.accelerator.current_accelerator() or types[0])

    def apart(self) -> Processes:
        """The same processes with a group of their own, so that a thread can talk while the program goes on."""
        if self.group is None:
            return self
        world = dist.group.WORLD
        if _apart.get((), world) is not world:  # the groups of a former world are gone with it
            _apart.clear()
        _apart[()] = world
        made = _apart.get(self.ranks)
        if made is None:
            made = _apart[self.ranks] = c10d.checked(
                self.group, "a group is made for a checkpoint", lambda: new_group(self.ranks, backend="gloo")
            )
        return Processes(made)


_apart: dict[tuple[int, ...], Any] = of_one_rank({})  # groups by ranks; under () the world they belong to


def _portable(error: BaseException | None) -> ShardwiseError | str | None:
    """An error as it can be sent: ours as they are, of others what they say."""
    if error is None or isinstance(error, ShardwiseError):
        return error
    return f"{type(error).__name__}: {error}"


def _of_rank(rank: int, error: ShardwiseError | str) -> Exception:
    if isinstance(error, ShardwiseError):
        error.add_note(f"said by rank {rank}")
        return error
    return CheckpointError(f"rank {rank}: {error}")


def processes_of(turn: Turn, tensors: Iterable[torch.Tensor], group: Any = None) -> Processes:
    """Who saves or loads these tensors: this process, where their ranks are virtual, or those of the process group.

    Tensors that cannot be saved or loaded together are an error of this turn, which the other processes hear of.
    """
    fabrics: set[str] = set()

    def look() -> None:
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

    looking = Turn()  # also after an error: the others must hear of it, if there are any
    looking.attempt(look, None)
    turn.error = turn.error or looking.error
    surrounding = fabrics.pop() if len(fabrics) == 1 else mesh_module.chosen_fabric()
    if surrounding != c10d.name or not dist.is_initialized():
        return Processes()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            "this process is not in the process_group that it gives", hint="call it on the ranks of the group alone"
        )
    if dist.get_backend(group) == "fake":
        raise UnsupportedError(
            "the fake process group has one rank of many", hint="use virtual ranks or real processes"
        )
    return Processes(dist.group.WORLD if group is None else group)
