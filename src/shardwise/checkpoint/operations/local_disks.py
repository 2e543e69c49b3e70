"""Checkpoints on disks that hosts do not share: who shares a disk, and parts of files on the disks of others.

A save finds out who shares a disk by marks: every rank leaves a file with its number in the staging directory, whose
name has a random token, and after an exchange looks for the marks of others. The first rank of each disk publishes the
checkpoint there, with the complete index. A load reads the files that are here. Other parts are sent by a rank that has
the file; their checksums are verified where they arrive.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.format.checkpoint_index import INDEX, Index, StoredTensor
from shardwise.checkpoint.io.atomic_directory import Staging, taken_on_disks
from shardwise.checkpoint.io.box_reader import parts_of
from shardwise.checkpoint.io.checkpoint_places import open_place
from shardwise.checkpoint.io.range_reader import (
    Absent,
    FileReader,
    PartKey,
    ReadableDirectory,
    ReadableFile,
    not_here,
)
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes
from shardwise.checkpoint.partition.boxes import Box
from shardwise.errors import CheckpointError

__all__ = ["AbsentDirectory", "check_disks", "fetch_parts", "find_index", "host_of_disk"]


def host_of_disk() -> str:
    """The name of this host, as an index has it."""
    return socket.gethostname() or "unknown"


def check_disks(staging: Staging, processes: Processes, disks: Sequence[tuple[int, ...]]) -> None:
    """Raise unless the ranks agree on who shares a disk, given the marks that each of them saw."""
    seen = dict(zip(processes.ranks, disks, strict=True))
    for rank, disk in seen.items():
        if rank not in disk or any(seen.get(other) != disk for other in disk):
            raise CheckpointError(
                f"the ranks do not agree on which of them share {staging.target.parent}: rank {rank} sees the marks of "
                f"{list(disk)[:16]}",
                hint="the file system shows new files late: save to another one",
            )
    if staging.before is not None and len(set(disks)) > 1:
        raise taken_on_disks(staging.target)


# ---------------------------------------------------------------- reading


class AbsentDirectory:
    """The directory of a checkpoint on a host that does not have it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> AbsentDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def error(self, problem: str, hint: str) -> CheckpointError:
        """The error for a bad file."""
        return CheckpointError(problem, hint=hint)

    def open(self, file: str, what: str, *, links: bool = False) -> ReadableFile:
        """Raise: there are no files."""
        raise CheckpointError(f"{what}: there is no {self._path}/{file} on {host_of_disk()}")

    def read(self, file: str, what: str, *, links: bool = False) -> bytes:
        """Raise: there are no files."""
        raise CheckpointError(f"{what}: there is no {self._path}/{file} on {host_of_disk()}")

    def contains(self, file: str) -> bool:
        """Whether it has an entry of this name: no."""
        return False


def find_index(
    outcome: Outcome, processes: Processes, path: str, opened: contextlib.ExitStack
) -> tuple[ReadableDirectory | None, bytes]:
    """The directory of a checkpoint, and its index, which is that of another host where this one has none."""
    source: ReadableDirectory | None = None
    data, absent = b"", None

    def look() -> None:
        nonlocal source, data, absent
        try:
            source = opened.enter_context(open_place(path))
            data = source.read(INDEX, "the index")
        except Absent as error:
            absent = error

    outcome.attempt(look, None)
    outcome.value = absent is None
    there = processes.exchange(outcome)
    if absent is not None and not any(there):
        raise processes.own(absent)
    first = there.index(True) if any(there) else 0
    outcome.value = data if processes.ranks[first] == processes.rank else None
    found = processes.exchange(outcome)[first]
    return (AbsentDirectory(str(path)), found) if absent is not None else (source, data)


class PartRequest(NamedTuple):
    """A part of a block, in a file that is not here."""

    tensor: str
    file: str
    start: int
    sizes: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    itemsize: int

    @property
    def key(self) -> PartKey:
        """The part as a reader looks for it."""
        return self.file, self.start, self.bounds

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        size = self.itemsize
        for start, stop in self.bounds:
            size *= stop - start
        return size


def fetch_parts(
    outcome: Outcome,
    processes: Processes,
    source: ReadableDirectory | None,
    files: FileReader | None,
    index: Index,
    wanted: Iterable[tuple[StoredTensor, Box]],
) -> None:
    """Receive the parts of these boxes whose files are on disks of other hosts, and send those that others lack."""
    mine = outcome.attempt(lambda: _missing(source, wanted), [])
    outcome.value = mine
    requests = dict(zip(processes.ranks, processes.exchange(outcome), strict=True))
    asked = sorted({request.file for of_rank in requests.values() for request in of_rank})
    if not asked:
        return
    outcome.value = outcome.attempt(lambda: {name for name in asked if source and source.contains(name)}, set[str]())
    holders = _holders(processes, asked, processes.exchange(outcome))
    plan = [
        (_provider(holders[request.file], number, request, index), rank, request)
        for number, (rank, of_rank) in enumerate(requests.items())
        for request in of_rank
        if rank not in holders[request.file]  # its disk shows the file late: it reads the file itself
    ]

    def data(number: int) -> torch.Tensor:
        sender, _, request = plan[number]
        held = np.zeros(request.nbytes, dtype=np.uint8)
        if sender == processes.rank:  # after an error zeros are sent: the error is raised at the next exchange
            outcome.attempt(lambda: _read(files, request, held), None)
        else:
            assert files is not None, "no step runs after a failed one"
            files.fetched[request.key] = held
        return torch.from_numpy(held)

    processes.in_host_memory().move_all([(sender, receiver) for sender, receiver, _ in plan], data)


def _missing(source: ReadableDirectory | None, wanted: Iterable[tuple[StoredTensor, Box]]) -> list[PartRequest]:
    assert source is not None, "no step runs after a failed one"
    here: dict[str, bool] = {}
    found: dict[PartKey, PartRequest] = {}
    for stored, box in wanted:
        for _, block, part in parts_of(stored, box):
            if block.file not in here:
                here[block.file] = source.contains(block.file)
            if not here[block.file]:
                bounds = tuple([(piece.start, piece.stop) for piece in part.inside(block.box)])
                request = PartRequest(
                    stored.name, block.file, block.start, block.box.sizes, bounds, stored.dtype.itemsize
                )
                found[request.key] = request
    return list(found.values())


def _holders(processes: Processes, asked: Sequence[str], found: Sequence[set[str]]) -> Mapping[str, list[int]]:
    pairs = list(zip(processes.ranks, found, strict=True))
    return {name: [rank for rank, names in pairs if name in names] for name in asked}


def _provider(holders: Sequence[int], number: int, request: PartRequest, index: Index) -> int:
    """The rank that sends a part: those that have its file take turns."""
    if not holders:
        raise not_here(f"tensor {request.tensor}", request.file, index.hosts[request.file])
    return holders[number % len(holders)]


def _read(files: FileReader | None, request: PartRequest, out: np.ndarray) -> None:
    assert files is not None, "no step runs after a failed one"
    part = [slice(start, stop) for start, stop in request.bounds]
    files.read_part(request.file, request.start, request.sizes, part, request.itemsize, out, f"tensor {request.tensor}")
