"""save: each rank writes the blocks it owns to a file of its own, one writes the index, the directory gets its name.

A save performs three exchanges: what the state is, and where it is staged; what was written; that it has its name.
What follows the first can run on a thread of its own (`async_save`). Every step runs inside `Turn.attempt`, so that an
error of one process is raised by all of them at the next exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint import atomic
from shardwise.checkpoint.atomic import Staging
from shardwise.checkpoint.background import Saving, finish_pending, start_pending
from shardwise.checkpoint.boxes import Held, held_boxes, whole
from shardwise.checkpoint.dtypes import DTYPES, NAMES
from shardwise.checkpoint.files import Item, write_blocks
from shardwise.checkpoint.index import INDEX, Index, StoredBlock, StoredTensor, parse_index, write_index
from shardwise.checkpoint.owners import Share, Shared, share_out
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.together import Processes, Turn, processes_of
from shardwise.checkpoint.tree import encode_state, expand, merge, stored_entries, tensors_in
from shardwise.errors import AgreementError, CheckpointError
from shardwise.fabric.base import fabric_of, settle_checks
from shardwise.tensor import DTensor

__all__ = ["Described", "Job", "async_save", "run_job", "save"]

Written = tuple[dict[str, int], list[tuple[str, StoredBlock]]]


class Described(NamedTuple):
    """What all processes must know of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    layout: str


class Job(NamedTuple):
    """A save that is decided on: what goes to the index, and what this process writes for which rank."""

    staging: Staging
    processes: Processes
    tensors: dict[str, Described]
    state: Any
    files: dict[int, list[tuple[Share, Item]]]
    keep: int | None = None
    sums: Any = None  # what this process found out while its blocks were read from elsewhere,
    check: Callable[[list[Any]], None] | None = None  # and who looks at that of all of them before the end


def save(
    state: Any, path: str | Path, *, keep: int | None = None, overwrite: bool = False, process_group: Any = None
) -> None:
    """Write a state to a checkpoint, a directory that appears whole or not at all.

    Every process of the group calls it with the same path. Each rank writes the blocks that it owns; what several hold
    is written once.

    Args:
        state: a dict, nested as you like, of DTensors, plain tensors, numbers, strings, lists, tuples, None, and of
            modules, optimizers and whatever else has a `state_dict`.
        path: the directory to make, on a file system that all processes see.
        keep: once the new one is whole, remove all but this many of those whose names differ in the number at the
            end only.
        overwrite: replace a checkpoint of this name, in one step.
        process_group: the processes that take part, if not all.

    Example:
        >>> import shardwise as sw, tempfile
        >>> mesh = sw.init_device_mesh("cpu", (4,))
        >>> x = sw.distribute_tensor(torch.arange(8.0), mesh, [sw.Shard(0)])
        >>> folder = tempfile.mkdtemp()
        >>> sw.checkpoint.save({"x": x, "step": 3}, f"{folder}/step-3")
        >>> y = sw.zeros(8, device_mesh=mesh, placements=[sw.Replicate()])
        >>> sw.checkpoint.load({"x": y, "step": 0}, f"{folder}/step-3").state["step"], y.full_tensor()
        (3, tensor([0., 1., 2., 3., 4., 5., 6., 7.]))
    """
    turn = Turn()
    run_job(turn, prepare_job(turn, state, path, keep, overwrite, process_group, copied=False))


def async_save(
    state: Any, path: str | Path, *, keep: int | None = None, overwrite: bool = False, process_group: Any = None
) -> Saving:
    """Like `save`, but returns once the state is copied to host memory; a thread writes it while the program goes on.

    An error in the thread is raised by the next `save`, `async_save` or `load`, or by `wait()` of what is returned, on
    all ranks. One save is under way at a time: the next call waits for it.

    Args:
        state: as in `save`. Each rank copies the blocks it writes, no more.
        path: as in `save`.
        keep: as in `save`.
        overwrite: as in `save`.
        process_group: as in `save`.

    Example:
        >>> import shardwise as sw, tempfile
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> saving = sw.checkpoint.async_save({"x": x}, tempfile.mkdtemp() + "/step-1")
        >>> _ = x.zero_()  # the checkpoint holds ones
        >>> saving.wait()
    """
    turn = Turn()
    job = prepare_job(turn, state, path, keep, overwrite, process_group, copied=True)
    try:
        apart = job._replace(processes=job.processes.apart())
    except BaseException:
        if job.processes.is_first:
            atomic.discard(job.staging)
        raise
    interrupt = None if isinstance(turn.error, Exception) else turn.error

    def write_in_background() -> None:  # also after an error, for the others to hear of it
        try:
            run_job(turn, apart)
        except BaseException as error:
            if error is not interrupt:
                raise

    saving = start_pending(write_in_background)
    if interrupt is not None:
        raise interrupt
    return saving


# ---------------------------------------------------------------- deciding


def prepare_job(
    turn: Turn, state: Any, path: str | Path, keep: int | None, overwrite: bool, group: Any, *, copied: bool
) -> Job:
    """Who writes what; with `copied`, this process's blocks are copied to host memory at once.

    An error after the first exchange is kept in `turn`, for `run_job` to tell.
    """
    turn.attempt(finish_pending, None)
    turn.attempt(settle_checks, None)
    tree = turn.attempt(lambda: expand(state), None)
    processes = processes_of(turn, tensors_in(state if tree is None else tree.root), group)
    nothing: tuple[Any, dict[str, torch.Tensor]] = ({}, {})
    encoded, tensors = turn.attempt(lambda: encode_state(tree.root if tree else {}), nothing)

    def look() -> tuple[Path, dict[str, Described], Staging | None]:
        target = Path(path).absolute()
        known = {name: describe(name, tensor, processes) for name, tensor in tensors.items()}
        if not processes.is_first:
            return target, known, None
        atomic.check_target(target, keep, overwrite)
        return target, known, atomic.prepare(target)

    target, known, staging = turn.attempt(look, (Path(), {}, None))
    turn.says = (str(target), known, encoded)
    try:
        told, places = processes.tell_if_different(
            turn, lambda: (str(target), known, sorted(stored_entries(encoded))), staging
        )
    except BaseException:
        if staging is not None:
            atomic.discard(staging)
        raise

    def decide() -> Job:
        everything, agreed = _agreed(told)
        shares = _shares(processes, tensors, [known for _, known, _ in told])
        mine = {rank: of_rank for rank, of_rank in shares.items() if processes.alone or rank == processes.rank}
        files = {
            rank: [(share, _item(share, tensors[share.name], copied)) for share in of_rank]
            for rank, of_rank in mine.items()
        }
        return Job(places[0], processes, everything, agreed, files, keep)

    return turn.attempt(decide, Job(places[0], processes, {}, {}, {}, keep))


def describe(name: str, tensor: torch.Tensor, processes: Processes) -> Described:
    """What others must know of a tensor; an error if a checkpoint cannot hold it."""
    if not isinstance(tensor, DTensor) and hasattr(tensor, "__tensor_flatten__"):
        raise CheckpointError(
            f"{name} is of type {type(tensor).__module__}.{type(tensor).__qualname__}, which a checkpoint cannot hold",
            hint="it holds DTensors of Shardwise and plain tensors; sw.from_torch() converts those of torch",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which a checkpoint cannot hold")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{name} is on the meta device: it has no values")
    layout = "plain"
    if isinstance(tensor, DTensor):
        layout = f"{tensor.spec!r} on {tensor.device_mesh!r}"
        if tensor.spec.partial_axes:
            raise CheckpointError(
                f"{name} is {tensor.spec}: its value is not yet reduced",
                hint="redistribute it to Replicate() or Shard() before it is saved",
            )
        outside = {rank for held in held_boxes(tensor.spec) for rank in held.ranks} - set(processes.ranks)
        if outside and not processes.alone:
            raise CheckpointError(
                f"{name} lies on ranks {sorted(outside)[:8]}, which do not take part",
                hint="give a larger process_group",
            )
    return Described(NAMES[tensor.dtype], tuple(tensor.shape), layout)


def _agreed(told: Sequence[tuple[str, dict[str, Described], Any]]) -> tuple[dict[str, Described], Any]:
    """All tensors and the whole state, where some processes may hold entries that others do not."""
    target, tensors, state = told[0]
    tensors = dict(tensors)
    for other_target, others, other_state in told[1:]:
        if other_target != target:
            raise AgreementError(f"the ranks save to different paths: {target} and {other_target}")
        if others is told[0][1]:
            continue
        state = merge(state, other_state)
        for name, described in others.items():
            if tensors.setdefault(name, described) != described:
                raise AgreementError(
                    f"the ranks do not mean the same tensor by {name}:\n    {tensors[name]}\n    {described}",
                    hint="tensors of one name are parts or copies of one tensor; give others another name",
                )
    return tensors, state


def _shares(
    processes: Processes, tensors: Mapping[str, torch.Tensor], known: Sequence[Mapping[str, Described]]
) -> dict[int, list[Share]]:
    """Who writes what of the tensors in this process. All that hold one of them come to the same answer."""
    everyone = processes.ranks
    if processes.alone:
        virtual = (t.device_mesh.grid_ranks for t in tensors.values() if isinstance(t, DTensor))
        everyone = tuple(sorted({rank for ranks in virtual for rank in ranks})) or (0,)
    shared = []
    for name in sorted(tensors):
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            held = held_boxes(tensor.spec)
        else:
            box = whole(tensor.shape)
            among = everyone
            if not processes.alone:
                among = tuple(rank for rank, names in zip(everyone, known, strict=True) if name in names)
            held = (Held(box, box.inside(box), among),) if box.numel else ()
        shared.append(Shared(name, tensor.dtype.itemsize, held))
    return share_out(shared)


def _item(share: Share, tensor: torch.Tensor, copied: bool) -> Item:
    """The block of a share, as it is to be written."""
    held, box = share.source, share.box
    local = local_of(tensor, held)
    part = local[held.within][box.inside(held.box)].detach()
    key = f"{share.name}@{','.join(map(str, box.offset))}"
    if not copied:
        return Item(key, tensor.dtype, box.sizes, lambda: part.cpu())
    kept = part.to("cpu", copy=True)
    return Item(key, tensor.dtype, box.sizes, lambda: kept)


def local_of(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """The local in this process that has a box of a tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    wanted = {mesh.coordinate_of(rank) for rank in held.ranks}
    parts = fabric_of(mesh).parts(mesh, tensor._local_tensor)
    return next(local for coordinate, local in parts if coordinate in wanted)


# ---------------------------------------------------------------- writing


def run_job(turn: Turn, job: Job) -> None:
    """Write the files and the index, and give the checkpoint its name; or raise on all processes and leave nothing."""
    processes = job.processes
    written = turn.attempt(lambda: write_files(job.staging.directory, job.files, shown=processes.is_first), None)
    turn.says = (written, job.sums)
    done = Turn()
    try:
        told = processes.tell(turn)
        if processes.is_first:
            done.attempt(lambda: finish(job, told), None)
        processes.tell(done)
    except BaseException:
        if processes.is_first:
            atomic.discard(job.staging)
        raise


def finish(job: Job, told: Sequence[tuple[Written, Any]]) -> None:
    """What one process does once all blocks are on disk."""
    if job.check is not None:
        job.check([sums for _, sums in told])
    files: dict[str, int] = {}
    blocks: dict[str, list[StoredBlock]] = {name: [] for name in job.tensors}
    for (sizes, stored), _ in told:
        files.update(sizes)
        for name, block in stored:
            blocks[name].append(block)
    tensors = {
        name: StoredTensor(name, DTYPES[described.dtype], described.shape, tuple(sorted(blocks[name])))
        for name, described in job.tensors.items()
    }
    data = write_index(Index(files, tensors, job.state))
    parse_index(data)  # a checkpoint that could not be read is not given its name
    with atomic.disk_errors(f"{job.staging.target} cannot be saved"):
        atomic.write_flushed(job.staging.directory / INDEX, data)
    atomic.publish(job.staging)
    if job.keep is not None:
        with atomic.disk_errors(f"{job.staging.target} is saved, but older checkpoints are not removed"):
            atomic.prune(job.staging.target, job.keep)


def write_files(directory: Path, files: dict[int, list[tuple[Share, Item]]], *, shown: bool) -> Written:
    """Write a file for each rank that has something to write; the files' sizes, and where the blocks are."""
    sizes: dict[str, int] = {}
    stored: list[tuple[str, StoredBlock]] = []
    total = sum(item.nbytes for shares in files.values() for _, item in shares)
    with Progress("saving", total, shown=shown) as progress, atomic.disk_errors(f"{directory} cannot be written"):
        for rank, shares in files.items():
            name = f"blocks-{rank:05d}.safetensors"
            # wide elements first, so that every block begins at a multiple of its element's size
            ordered = sorted(shares, key=lambda pair: (-pair[1].dtype.itemsize, pair[1].key))
            sizes[name], placed = write_blocks(directory / name, [item for _, item in ordered], progress.add)
            for (share, _), (start, checksum) in zip(ordered, placed, strict=True):
                stored.append((share.name, StoredBlock(share.box, name, start, checksum)))
    return sizes, stored
