"""Exchanges among the processes that save or load: results and errors of each process reach all of them.

Every step between two exchanges runs inside `Outcome.attempt`: an error (or interrupt) is stored, sent with the next
exchange, and raised there on all processes, so that no process waits for a failed one. The only module of the package
that communicates. With virtual ranks there is one process, and nothing is sent.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from shardwise.checkpoint.io.range_reader import Absent, Replaced
from shardwise.core import mesh as mesh_module
from shardwise.errors import CheckpointError, ShardwiseError, UnsupportedError
from shardwise.fabric.base import fabrics, of_one_rank
from shardwise.fabric.c10d import c10d
from shardwise.fabric.rank_tensor import is_of_ranks
from shardwise.tensor import DTensor

__all__ = ["Outcome", "Processes", "processes_of"]

T = TypeVar("T")
LENGTH = 8  # bytes of a number: how long the message of a process is
FIRST = 4096  # bytes of each process in the first collective of an exchange, its length included


class Outcome:
    """The outcome of this process's steps for the next exchange: a value or an error."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None

    def attempt(self, step: Callable[[], T], otherwise: T) -> T:
        """The result of `step`; `otherwise` if this or an earlier step raised. The error is stored."""
        if self.error is None:
            try:
                return step()
            except BaseException as error:
                self.error = error
        return otherwise


class Processes:
    """The processes of a job; one process if there is no process group."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks: tuple[int, ...] = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.rank = self.ranks[0] if group is None else dist.get_rank()

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which does the work that is done once."""
        return self.rank == self.ranks[0]

    @property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return self.group is None

    def settle_checks(self, outcome: Outcome) -> None:
        """Finish the comparisons of plain tensors among these processes. What they have found goes to `outcome`.

        A process does this also after an error: the others wait for it.
        """
        if self.group is not None:
            settling = Outcome()
            settling.attempt(lambda: c10d.settle_checks(self.ranks), None)
            outcome.error = outcome.error or settling.error

    def exchange(self, outcome: Outcome) -> list[Any]:
        """Gather the values of all processes, by rank; an error of one process is raised on all."""
        if self.group is None or len(self.ranks) == 1:
            if outcome.error is not None:
                raise outcome.error
            return [outcome.value]
        packed = outcome.attempt(lambda: pickle.dumps(outcome.value), b"")
        received = self._all_gather((_portable(outcome.error), packed if outcome.error is None else b""))
        failed = [(rank, *error) for rank, (error, _) in zip(self.ranks, received, strict=True) if error is not None]
        for rank, host, error in failed:
            if isinstance(error, Replaced):  # takes precedence over other errors: all start over
                raise _of_rank(rank, host, error)
        for rank, host, error in failed:
            if isinstance(error, Absent):  # then: all look on other disks
                raise _of_rank(rank, host, error)
        if outcome.error is not None:
            raise self.own(outcome.error)
        for rank, host, error in failed:
            raise _of_rank(rank, host, error)
        return [pickle.loads(data) for _, data in received]

    def own(self, error: BaseException) -> BaseException:
        """An error of this process, with its rank and host."""
        if self.group is not None:
            error.add_note(f"raised by rank {self.rank} on {socket.gethostname()}")
        return error

    def _all_gather(self, mine: Any) -> list[Any]:
        """All-gather an object."""
        data = pickle.dumps(mine)
        received = c10d.checked(self.group, "an exchange of a checkpoint", lambda: self._gather_bytes(data))
        return [pickle.loads(one) for one in received]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """All-gather bytes. `dist.all_gather_object` sends lengths first; here the begin of the bytes goes with them.

        Most exchanges are short, and then one collective is enough.
        """
        room = FIRST - LENGTH
        first = self._gather_equal(len(data).to_bytes(LENGTH, "little") + data[:room], FIRST)
        lengths = [int.from_bytes(one[:LENGTH], "little") for one in first]
        left = max(lengths) - room
        rest = self._gather_equal(data[room:], left) if left > 0 else [b""] * len(first)
        return [(a[LENGTH:] + b)[:length] for a, b, length in zip(first, rest, lengths, strict=True)]

    def _gather_equal(self, data: bytes, size: int) -> list[bytes]:
        """All-gather bytes, padded to the same size on all processes."""
        device = self.device(torch.device("cpu"))
        mine = torch.from_numpy(np.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=np.uint8)).to(device)
        received = torch.from_numpy(np.empty((len(self.ranks), size), dtype=np.uint8)).to(device)
        dist.all_gather(list(received.unbind()), mine, group=self.group)
        return [row.tobytes() for row in received.cpu().numpy()]

    def exchange_if_different(
        self, outcome: Outcome, fact: Callable[[], Any], beside: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """Gather the values of all processes, which are sent only if digests of `fact` differ.

        Also returns the small value `beside` of every process, which is sent with the digests.
        """
        first = Outcome()
        first.error = outcome.error
        first.value = first.attempt(lambda: (hashlib.sha256(repr(fact()).encode()).digest(), beside), None)
        gathered = self.exchange(first)
        same = len({digest for digest, _ in gathered}) == 1
        return [outcome.value] * len(self.ranks) if same else self.exchange(outcome), [beside for _, beside in gathered]

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast an object from the first process; the values of other processes are ignored."""
        received = [value]
        if self.group is not None:
            c10d.checked(
                self.group,
                "broadcast of an object from the first process",
                lambda: dist.broadcast_object_list(received, self.ranks[0], group=self.group),
            )
        return received[0]

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor in place from the first process. Contiguous, on a device that the group supports."""
        if self.group is not None:
            c10d.checked(
                self.group,
                f"broadcast of {tuple(tensor.shape)} {tensor.dtype} from the first process",
                lambda: dist.broadcast(tensor, self.ranks[0], group=self.group),
                compare=False,
            )

    def move_all(self, moves: Sequence[tuple[int, int]], data: Callable[[int], torch.Tensor]) -> None:
        """Send bytes in host memory between pairs of ranks, in this order on all ranks.

        Args:
            moves: pairs of source and target, the same list on all ranks.
            data: the tensor of a move, by its number: what the source sends, and where the target receives it.
        """

        def run() -> None:
            for number, (source, target) in enumerate(moves):
                if self.rank == source:
                    dist.send(data(number), target, group=self.group)
                elif self.rank == target:
                    dist.recv(data(number), source, group=self.group)

        c10d.checked(self.group, f"{len(moves)} parts of a checkpoint between ranks", run)

    def in_host_memory(self) -> Processes:
        """The same processes with a group that moves host memory. Every process calls it."""
        return self if self.group is None or self.device(torch.device("cpu")).type == "cpu" else self.with_own_group()

    def device(self, wanted: torch.device) -> torch.device:
        """A device that the group's backends support: the wanted one if possible."""
        types = [entry.split(":")[0] for entry in str(dist.get_backend_config(self.group)).split(",")]
        if wanted.type in types:
            return wanted
        return torch.device("cpu" if "cpu" in types else torch.accelerator.current_accelerator() or types[0])

    def with_own_group(self) -> Processes:
        """The same processes with a separate group, so that a thread can communicate while the program continues."""
        if self.group is None:
            return self
        world = dist.group.WORLD
        if _groups.get((), world) is not world:  # groups of an earlier world are destroyed
            _groups.clear()
        _groups[()] = world
        made = _groups.get(self.ranks)
        if made is None:
            made = _groups[self.ranks] = c10d.checked(
                self.group, "creation of a group for a checkpoint", lambda: c10d.new_group(self.ranks, backend="gloo")
            )
        return Processes(made)


_groups: dict[tuple[int, ...], Any] = of_one_rank({})  # groups by ranks; the key () has the world they belong to


def _portable(error: BaseException | None) -> tuple[str, ShardwiseError | str] | None:
    """An error in a form that can be sent: the host, and errors of this library unchanged, others as text."""
    if error is None:
        return None
    return socket.gethostname(), error if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"


def _of_rank(rank: int, host: str, error: ShardwiseError | str) -> Exception:
    if isinstance(error, ShardwiseError):
        error.add_note(f"raised by rank {rank} on {host}")
        return error
    return CheckpointError(f"rank {rank} on {host}: {error}")


def processes_of(outcome: Outcome, tensors: Iterable[torch.Tensor], group: Any = None) -> Processes:
    """The processes that save or load these tensors: this process for virtual ranks, else the process group.

    If the tensors cannot be saved or loaded together, the error is stored in `outcome`, for the next exchange.
    """
    here: set[str] = set()  # names of the fabrics that run the meshes

    def look() -> None:
        for tensor in tensors:
            if is_of_ranks(tensor):
                raise UnsupportedError(
                    "the state contains a RankTensor, the local tensors of virtual ranks",
                    hint="make a DTensor of it with DTensor.from_local",
                )
            if isinstance(tensor, DTensor):
                here.add(tensor.device_mesh.fabric)
        if not all(fabrics[name].has_values for name in here):
            raise UnsupportedError(
                "a dry run has no values to save or load", hint="create the tensors on a virtual mesh or under torchrun"
            )
        if len(here) > 1:
            raise UnsupportedError(
                "the state contains tensors of virtual ranks and of processes", hint="save them as two checkpoints"
            )

    looking = Outcome()  # runs also after an error, which must still be sent to the other processes
    looking.attempt(look, None)
    outcome.error = outcome.error or looking.error
    surrounding = here.pop() if len(here) == 1 else mesh_module.chosen_fabric()
    if not fabrics[surrounding].one_rank or not dist.is_initialized():
        return Processes()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            "this process is not in its process_group", hint="call it only on the ranks of the group"
        )
    if dist.get_backend(group) == "fake":
        raise UnsupportedError("the fake process group has no other ranks", hint="use virtual ranks or real processes")
    return Processes(dist.group.WORLD if group is None else group)
