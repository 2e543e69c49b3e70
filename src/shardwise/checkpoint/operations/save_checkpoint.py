"""save: each rank writes its blocks to its own file, the first process writes the index and renames the directory.

A save performs three exchanges: the description of the state and the staging directory; the written blocks; that the
checkpoint is published. The steps after the first exchange can run on a thread (`async_save`). Every step runs inside
`Outcome.attempt`, so that an error of one process is raised on all of them at the next exchange.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.checkpoint_index import (
    Index,
    StoredBlock,
    StoredTensor,
    parse_index,
    write_index,
)
from shardwise.checkpoint.format.json_values import join
from shardwise.checkpoint.format.state_tree import (
    StateTree,
    encode_state,
    expand,
    merge,
    stored_entries,
    tensors_in,
)
from shardwise.checkpoint.format.stored_dtypes import DTYPES, NAMES
from shardwise.checkpoint.io import atomic_directory as atomic
from shardwise.checkpoint.io.block_writer import BlockToWrite, write_blocks
from shardwise.checkpoint.io.checkpoint_places import AnyStaging, Place, begin_save, checkpoints_in, place_of, remove
from shardwise.checkpoint.io.host_memory import ALIGNMENT, HostBuffer, kept_buffer
from shardwise.checkpoint.io.progress_bar import Progress
from shardwise.checkpoint.operations.background_save import Saving, finish_pending, start_pending
from shardwise.checkpoint.operations.checkpoint_series import prune, prune_disks
from shardwise.checkpoint.operations.local_disks import check_disks, host_of_disk
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes, processes_of
from shardwise.checkpoint.operations.unchanged_blocks import BaseCheckpoint, Unchanged
from shardwise.checkpoint.partition.boxes import HeldBox, full_box, held_boxes
from shardwise.checkpoint.partition.write_assignment import TensorToWrite, WriteShare, assign_writes
from shardwise.errors import AgreementError, CheckpointError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = ["STAGE", "SaveJob", "TensorDescription", "async_save", "execute_save", "save"]

STAGE = "_shardwise_stage"  # on a parameter of a stage of a pipeline: which one, in words
AHEAD = 86_400 * 10**9  # nanoseconds that another clock may be ahead of this one
TICK = 1_000_000  # nanoseconds between the times of two checkpoints, if the clock does not tell them apart
_PART = re.compile(r"blocks-\d+-(\d+)\.safetensors")
Written = tuple[dict[str, int], list[tuple[str, StoredBlock]]]


class TensorDescription(NamedTuple):
    """The description of a tensor that all processes must agree on."""

    dtype: str
    shape: tuple[int, ...]
    layout: str


class SaveJob(NamedTuple):
    """A prepared save: the contents of the index, and the blocks that this process writes for each rank."""

    staging: AnyStaging
    processes: Processes
    tensors: dict[str, TensorDescription]
    state: Any
    files: dict[int, list[tuple[WriteShare, BlockToWrite]]]
    keep: int | None = None
    sums: Any = None  # checksums of blocks that this process reads from another checkpoint
    check: Callable[[list[Any]], None] | None = None  # verifies the `sums` of all processes before publication
    base: str | Path | None = None  # an earlier checkpoint, whose files are linked where they have not changed
    saved: int | None = None  # the time of the save, if it is that of another checkpoint


def save(
    state: Any,
    path: str | Path,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    base: str | Path | None = None,
    process_group: Any = None,
) -> None:
    """Write a state to a checkpoint: a directory that is created atomically.

    Every process of the group calls it with the same path. Each rank writes its blocks; replicated blocks are written
    once.

    Args:
        state: a nested dict of DTensors, plain tensors, numbers, strings, lists, tuples, None, and of modules,
            optimizers and other objects with a `state_dict`.
        path: the directory to create; or a URL of fsspec. Where hosts do not share the file system, every host gets the
            files of its ranks and the complete index.
        keep: after publication, remove all but this many complete checkpoints whose names differ only in the final
            number.
        overwrite: replace a checkpoint of this name, atomically.
        base: an earlier checkpoint. Blocks that did not change since then are not written again: files of it are linked
            into the new checkpoint, which is complete without it.
        process_group: the processes that take part; default: all.

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
    outcome = Outcome()
    job = prepare_save(outcome, state, path, keep, overwrite, process_group, copied=False)
    execute_save(outcome, job._replace(base=base))


def async_save(
    state: Any,
    path: str | Path,
    *,
    keep: int | None = None,
    overwrite: bool = False,
    base: str | Path | None = None,
    process_group: Any = None,
) -> Saving:
    """Like `save`, but returns when the state is copied to host memory; a thread writes it in the background.

    An error in the thread is raised on all ranks by the next `save`, `async_save` or `load`, or by `wait()` of the
    result. One save runs at a time: the next call waits for it.

    Args:
        state: as in `save`. Each rank copies only the blocks that it writes.
        path: as in `save`.
        keep: as in `save`.
        overwrite: as in `save`.
        base: as in `save`; compared in the background.
        process_group: as in `save`.

    Example:
        >>> import shardwise as sw, tempfile
        >>> x = sw.ones(4, device_mesh=sw.init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)])
        >>> saving = sw.checkpoint.async_save({"x": x}, tempfile.mkdtemp() + "/step-1")
        >>> _ = x.zero_()  # the checkpoint has ones
        >>> saving.wait()
    """
    outcome = Outcome()
    job = prepare_save(outcome, state, path, keep, overwrite, process_group, copied=True)
    try:
        background = job._replace(processes=job.processes.with_own_group(), base=base)
    except BaseException:
        if job.processes.is_first:
            job.staging.discard()
        raise
    interrupt = None if isinstance(outcome.error, Exception) else outcome.error

    def write_in_background() -> None:  # runs also after an error, which must be sent to the other processes
        try:
            execute_save(outcome, background)
        except BaseException as error:
            if error is not interrupt:
                raise

    saving = start_pending(write_in_background)
    if interrupt is not None:
        raise interrupt
    return saving


# ---------------------------------------------------------------- preparing


def prepare_save(
    outcome: Outcome, state: Any, path: str | Path, keep: int | None, overwrite: bool, group: Any, *, copied: bool
) -> SaveJob:
    """Prepare a save, with the first exchange. With `copied`, copy this process's blocks to host memory.

    An error after the exchange is stored in `outcome`, for the next exchange in `execute_save`.
    """
    outcome.attempt(finish_pending, None)
    tree = outcome.attempt(lambda: expand(state), None)
    processes = processes_of(outcome, tensors_in(state if tree is None else tree.root), group)
    processes.settle_checks(outcome)
    nothing: tuple[Any, dict[str, torch.Tensor]] = ({}, {})
    encoded, tensors = outcome.attempt(lambda: encode_state(tree.root if tree else {}), nothing)

    def look() -> tuple[Place, dict[str, TensorDescription], AnyStaging | None]:
        target = place_of(path)
        target = target.absolute() if isinstance(target, Path) else target
        owners = {} if tree is None else _owners(tree)
        known = {
            name: describe(name, tensor, processes, owners.get(name) or owners.get(name.rpartition("/")[0], ""))
            for name, tensor in tensors.items()
        }
        if not processes.is_first:
            return target, known, None
        return target, known, begin_save(target, keep, overwrite)

    target, known, staging = outcome.attempt(look, (Path(), {}, None))
    outcome.value = (str(target), known, encoded)
    try:
        gathered, places = processes.exchange_if_different(
            outcome, lambda: (str(target), known, sorted(stored_entries(encoded))), staging
        )
    except BaseException:
        if staging is not None:
            staging.discard()
        raise

    def decide() -> SaveJob:
        everything, agreed = _agreed(gathered)
        shares = _shares(processes, tensors, [known for _, known, _ in gathered])
        mine = {rank: of_rank for rank, of_rank in shares.items() if processes.alone or rank == processes.rank}
        memory = kept_buffer(_bytes_of(mine, tensors)) if copied else None
        files = {
            rank: [(share, _item(share, tensors[share.name], memory)) for share in of_rank]
            for rank, of_rank in mine.items()
        }
        return SaveJob(places[0], processes, everything, agreed, files, keep)

    return outcome.attempt(decide, SaveJob(places[0], processes, {}, {}, {}, keep))


def _owners(tree: StateTree) -> dict[str, str]:
    """What entries belong to, where processes may give one name to different tensors, as the stages of a pipeline do.

    For each numbered entry of an optimizer it is the parameter, if that is in the state as well, or its stage; for a
    parameter of a stage the stage.
    """
    names: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, owner, _ in tree.expanded:
        if callable(getattr(owner, "named_parameters", None)):
            for name, parameter in owner.named_parameters():
                entry = join((*path, name))
                names[id(parameter)] = entry
                found[entry] = getattr(parameter, STAGE, "")
    for path, owner, _ in tree.expanded:
        if isinstance(owner, torch.optim.Optimizer):
            parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(parameters):
                found[join((*path, "state", number))] = names.get(id(parameter)) or getattr(parameter, STAGE, "")
    return found


def describe(name: str, tensor: torch.Tensor, processes: Processes, owner: str = "") -> TensorDescription:
    """The description of a tensor; raises if a checkpoint cannot store it."""
    if not isinstance(tensor, DTensor) and hasattr(tensor, "__tensor_flatten__"):
        raise CheckpointError(
            f"{name} is of type {type(tensor).__module__}.{type(tensor).__qualname__}, which a checkpoint cannot store",
            hint="supported are plain tensors and DTensors of Shardwise; sw.from_torch() converts torch's DTensors",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which a checkpoint cannot store")
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
                f"{name} is on ranks {sorted(outside)[:8]}, which do not take part",
                hint="use a larger process_group",
            )
    if owner:
        layout += f", of {owner}"
    return TensorDescription(NAMES[tensor.dtype], tuple(tensor.shape), layout)


def _agreed(
    gathered: Sequence[tuple[str, dict[str, TensorDescription], Any]],
) -> tuple[dict[str, TensorDescription], Any]:
    """Merge the tensors and states of all processes; some may have entries that others do not have."""
    target, tensors, state = gathered[0]
    tensors = dict(tensors)
    for other_target, others, other_state in gathered[1:]:
        if other_target != target:
            raise AgreementError(f"the ranks save to different paths: {target} and {other_target}")
        if others is gathered[0][1]:
            continue
        state = merge(state, other_state)
        for name, described in others.items():
            if tensors.setdefault(name, described) != described:
                raise AgreementError(
                    f"the ranks have different tensors named {name}:\n    {tensors[name]}\n    {described}",
                    hint="tensors of one name must be shards or replicas of one tensor; rename the others, and save "
                    "optimizers of different parameters as checkpoint.NamedOptimizer(model, optimizer)",
                )
    return tensors, state


def _shares(
    processes: Processes, tensors: Mapping[str, torch.Tensor], known: Sequence[Mapping[str, TensorDescription]]
) -> dict[int, list[WriteShare]]:
    """The assignment of boxes to ranks for the tensors in this process; the same on all ranks of a tensor."""
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
            box = full_box(tensor.shape)
            among = everyone
            if not processes.alone:
                among = tuple(rank for rank, names in zip(everyone, known, strict=True) if name in names)
            held = (HeldBox(box, box.inside(box), among),) if box.numel else ()
        shared.append(TensorToWrite(name, tensor.dtype.itemsize, held))
    return assign_writes(shared, complete=all(names.keys() == known[0].keys() for names in known))


def _bytes_of(shares: Mapping[int, Sequence[WriteShare]], tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of a buffer for all of these boxes."""
    boxes = [(share.box.numel, tensors[share.name].dtype.itemsize) for one in shares.values() for share in one]
    return sum(numel * itemsize + ALIGNMENT for numel, itemsize in boxes)


def _item(share: WriteShare, tensor: torch.Tensor, memory: HostBuffer | None) -> BlockToWrite:
    """The block of a share, ready to be written; with `memory`, copied there."""
    held, box = share.source, share.box
    part = local_of(tensor, held).detach()
    if part.shape != box.sizes:
        part = part[held.within][box.inside(held.box)]
    key = f"{share.name}@{','.join(map(str, box.offset))}"
    if memory is None:
        return BlockToWrite(key, tensor.dtype, box.sizes, lambda: part.cpu())
    _, kept = memory.take(box.sizes, tensor.dtype)
    kept.copy_(part)
    return BlockToWrite(key, tensor.dtype, box.sizes, lambda: kept)


def local_of(tensor: torch.Tensor, held: HeldBox) -> torch.Tensor:
    """The local tensor in this process that contains a held box."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    wanted = {mesh.coordinate_of(rank) for rank in held.ranks}
    parts = fabric_of(mesh).parts(mesh, tensor._local_tensor)
    return next(local for coordinate, local in parts if coordinate in wanted)


# ---------------------------------------------------------------- writing


def execute_save(outcome: Outcome, job: SaveJob) -> None:
    """Write the files and the index, and publish the checkpoint; on an error raise on all processes and clean up."""
    processes = job.processes
    done = Outcome()
    try:
        written = _written(outcome, job)
        outcome.value = (written, job.sums)
        gathered = processes.exchange(outcome)
        if any(of_rank is None for of_rank, _ in gathered):
            _save_on_disks(job, written)
            return
        if processes.is_first:
            done.attempt(lambda: finish(job, gathered), None)
        processes.exchange(done)
    except BaseException:
        if processes.is_first:
            job.staging.discard()
        raise


def _save_on_disks(job: SaveJob, written: Written | None) -> None:
    """The rest of a save where some ranks do not see the staging directory, and have written nothing yet.

    Every disk gets its own staging directory, of the same name, and its own checkpoint with the complete index. The
    first rank of a disk publishes it, after all disks have all of their files and the index.
    """
    staging, processes, here = job.staging, job.processes, written is not None
    assert isinstance(staging, atomic.Staging), "URLs are always here"
    outcome = Outcome()
    published = False
    try:
        outcome.attempt(lambda: staging.mark(processes.rank, make=not here), None)
        processes.exchange(outcome)
        disk = outcome.attempt(staging.marked, ())
        leads = processes.rank == next((rank for rank in processes.ranks if rank in disk), None)
        if leads and not processes.is_first:
            outcome.attempt(staging.claim, None)
        outcome.value = disk
        disks = processes.exchange(outcome)
        check_disks(staging, processes, disks)  # on all ranks alike
        if not here:
            written = outcome.attempt(lambda: write_files(staging, job.files, shown=False), None)
        outcome.value = outcome.attempt(lambda: (written, job.sums, host_of_disk(), _time_of(job)), None)
        gathered = processes.exchange(outcome)
        hosts = {name: host for (sizes, _), _, host, _ in gathered for name in sizes} if len(set(disks)) > 1 else {}
        if leads:
            now = max(saved for *_, saved in gathered)  # the index is the same on all disks
            data = outcome.attempt(lambda: _index_data(job, [pair[:2] for pair in gathered], now, hosts), b"")
            outcome.attempt(lambda: staging.write_index(data), None)
        outcome.value = None
        processes.exchange(outcome)
        if leads:
            outcome.attempt(lambda: atomic.publish(staging), None)
            published = outcome.error is None
        processes.exchange(outcome)
    except BaseException:
        if published:
            remove(staging.target)
        if not here:
            staging.discard()
        raise
    if job.keep is not None:
        prune_disks(processes, staging.target, job.keep, leads=leads)


def _written(outcome: Outcome, job: SaveJob) -> Written | None:
    """Write this process's files, except what is unchanged since the base; with a base there is one more exchange.

    None if the staging directory is not here: then nothing is written yet.
    """
    shown = job.processes.is_first
    here = outcome.attempt(job.staging.is_here, False)
    if job.base is None and not (here or shown):
        return None
    outcome.attempt(lambda: _check_here(job, here), None)
    if job.base is None:
        return outcome.attempt(lambda: write_files(job.staging, job.files, shown=shown), None)
    path = job.base
    base = outcome.attempt(lambda: BaseCheckpoint(path, job.staging), None)
    try:
        found = outcome.attempt(lambda: base.unchanged(job.files) if base else Unchanged({}), Unchanged({}))
        outcome.value = outcome.attempt(lambda: (found.used(base.index), base.index.digest) if base else None, None)
        gathered = job.processes.exchange(outcome)
        return outcome.attempt(lambda: _changed_and_linked(base, job, found, gathered, shown), None)
    finally:
        closing = Outcome()  # an error here too must reach the other processes
        closing.attempt(lambda: base.close() if base else None, None)
        outcome.error = outcome.error or closing.error


def _check_here(job: SaveJob, here: bool) -> None:
    if here:
        return
    if job.processes.is_first:
        raise CheckpointError(
            f"the staging directory of {job.staging.target} was removed while it was saved", hint="save again"
        )
    raise CheckpointError(
        f"base={str(job.base)[:200]!r} with {job.staging.target}, on disks that hosts do not share: a directory of the "
        f"first process is not on {host_of_disk()}",
        hint="save without base, or to a file system that all hosts share",
    )


def _changed_and_linked(
    base: BaseCheckpoint | None, job: SaveJob, found: Unchanged, gathered: Sequence[tuple[Any, str]], shown: bool
) -> Written:
    assert base is not None, "no step runs after a failed one"
    if len({digest for _, digest in gathered}) > 1:
        raise CheckpointError(f"the ranks find different checkpoints at {job.base}", hint="save without base")
    links = base.link([used for used, _ in gathered])
    kept = {at: pair for at, pair in found.blocks.items() if pair[1].file in links}
    files = {
        rank: [pair for position, pair in enumerate(shares) if (rank, position) not in kept]
        for rank, shares in job.files.items()
    }
    part = 1 + max([int(match[1]) for match in map(_PART.fullmatch, base.index.files) if match], default=0)
    sizes, stored = write_files(job.staging, {rank: one for rank, one in files.items() if one}, shown=shown, part=part)
    if shown:
        base.make_links(links)
        sizes = sizes | links
    return sizes, stored + list(kept.values())


def finish(job: SaveJob, gathered: Sequence[tuple[Written, Any]]) -> None:
    """Write the index and publish; called on the first process after all blocks are on disk."""
    job.staging.finish(_index_data(job, gathered, _time_of(job)))
    if job.keep is not None:
        with atomic.disk_errors(f"{job.staging.target} is saved, but older checkpoints could not be removed"):
            prune(job.staging.target, job.keep)


def _time_of(job: SaveJob) -> int:
    """The time of a save: later than those of all checkpoints beside it, also if their clocks were ahead.

    Times that no clock in use has are ignored, and a folder that cannot be listed: the checkpoint is written by now.
    """
    if job.saved is not None:
        return job.saved
    now = time.time_ns()
    beside: list[int] = []
    with contextlib.suppress(CheckpointError):
        beside = [int(when * 1e9) + TICK for when, _ in checkpoints_in(job.staging.target.parent)]
    return max([now, *(when for when in beside if when < now + AHEAD)])


def _index_data(
    job: SaveJob, gathered: Sequence[tuple[Written, Any]], now: int, hosts: Mapping[str, str] | None = None
) -> bytes:
    """The index of a checkpoint, from what all ranks have written until now."""
    if job.check is not None:
        job.check([sums for _, sums in gathered])
    files: dict[str, int] = {}
    blocks: dict[str, list[StoredBlock]] = {name: [] for name in job.tensors}
    for (sizes, stored), _ in gathered:
        files.update(sizes)
        for name, block in stored:
            blocks[name].append(block)
    tensors = {
        name: StoredTensor(name, DTYPES[described.dtype], described.shape, tuple(sorted(blocks[name])))
        for name, described in job.tensors.items()
    }
    data = write_index(Index(files, tensors, job.state, hosts=hosts or {}, saved=now))
    parse_index(data)  # an invalid checkpoint is not published
    return data


def write_files(
    staging: AnyStaging, files: dict[int, list[tuple[WriteShare, BlockToWrite]]], *, shown: bool, part: int = 0
) -> Written:
    """Write a file for each rank with blocks to write. Returns the file sizes, and the positions of the blocks."""
    sizes: dict[str, int] = {}
    stored: list[tuple[str, StoredBlock]] = []
    total = sum(item.nbytes for shares in files.values() for _, item in shares)
    with Progress("saving", total, shown=shown) as progress, staging.errors():
        for rank, shares in files.items():
            name = staging.block_name(rank, part)
            # wide elements first, so that every block is aligned to its element size
            ordered = sorted(shares, key=lambda pair: (-pair[1].dtype.itemsize, pair[1].key))
            sizes[name], placed = write_blocks(staging.writer(name), [item for _, item in ordered], progress.add)
            for (share, _), (start, checksum) in zip(ordered, placed, strict=True):
                stored.append((share.name, StoredBlock(share.box, name, start, checksum)))
    return sizes, stored
