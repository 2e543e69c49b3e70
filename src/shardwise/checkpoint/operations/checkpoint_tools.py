"""Tools for checkpoints without a model: inspect, verify, diff, reshard.

All of them process one block at a time, so memory is bounded by the largest block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.checkpoint_index import Index, StoredTensor
from shardwise.checkpoint.format.json_values import decode
from shardwise.checkpoint.format.state_tree import stored_entries, tensor_name
from shardwise.checkpoint.format.stored_dtypes import NAMES
from shardwise.checkpoint.io.block_writer import BlockToWrite, as_bytes
from shardwise.checkpoint.io.box_reader import Sums, check_sums, read_box, sum_box
from shardwise.checkpoint.io.checkpoint_places import AnyStaging, begin_save, open_place, place_of
from shardwise.checkpoint.io.progress_bar import Progress
from shardwise.checkpoint.io.range_reader import FileReader, ReadableDirectory, Replaced, retry_replaced
from shardwise.checkpoint.io.safetensors_header import read_header
from shardwise.checkpoint.operations.background_save import finish_pending
from shardwise.checkpoint.operations.load_checkpoint import open_index, read_index
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes, processes_of
from shardwise.checkpoint.operations.save_checkpoint import SaveJob, TensorDescription, execute_save
from shardwise.checkpoint.partition.boxes import held_boxes
from shardwise.checkpoint.partition.write_assignment import TensorToWrite, WriteShare, assign_writes
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Replicate, Shard
from shardwise.core.spec import DTensorSpec, TensorMeta
from shardwise.errors import CheckpointError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.fabric.world import as_mesh

__all__ = ["Difference", "Summary", "TensorSummary", "diff", "inspect", "reshard", "verify"]

Placements = Callable[[str, tuple[int, ...]], Sequence[Any]]


class TensorSummary(NamedTuple):
    """A tensor of a checkpoint: its name, dtype, shape, bytes, and number of blocks."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    blocks: int


class Summary(NamedTuple):
    """The contents of a checkpoint, according to its index."""

    tensors: tuple[TensorSummary, ...]
    objects: dict[str, Any]
    files: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class Difference(NamedTuple):
    """A difference between two checkpoints."""

    name: str
    what: str


def inspect(path: str | Path) -> Summary:
    """The contents of a checkpoint. Reads only the index.

    Example:
        >>> import shardwise as sw, tempfile
        >>> path = tempfile.mkdtemp() + "/first"
        >>> sw.checkpoint.save({"w": torch.ones(2, 2), "step": 3}, path)
        >>> summary = sw.checkpoint.inspect(path)
        >>> summary.tensors[0].name, summary.nbytes, summary.objects
        ('w', 16, {'step': 3})
    """
    index = open_index(path)
    tensors = tuple(TensorSummary(t.name, t.dtype, t.shape, t.nbytes, len(t.blocks)) for t in index.tensors.values())
    return Summary(tensors, _objects(index), dict(index.files))


def _objects(index: Index) -> dict[str, Any]:
    entries = stored_entries(index.state).items()
    return {name: decode(value) for name, (_, value) in entries if tensor_name(value) is None}


def verify(path: str | Path) -> list[str]:
    """Read a full checkpoint, and return a line for each problem; an empty list if it is intact.

    Example:
        >>> import shardwise as sw, tempfile
        >>> path = tempfile.mkdtemp() + "/first"
        >>> sw.checkpoint.save({"w": torch.ones(2, 2)}, path)
        >>> sw.checkpoint.verify(path)
        []
        >>> __import__("os").truncate(path + "/blocks-00000.safetensors", 100)
        >>> sw.checkpoint.verify(path)[0].splitlines()[0]
        'blocks-00000.safetensors is not a safetensors file: its header size is 4088 bytes'
    """
    finish_pending()
    try:
        return retry_replaced(lambda: _verify(path))
    except CheckpointError as error:
        return [str(error)]


def _verify(path: str | Path) -> list[str]:
    with open_place(path) as source:
        index = read_index(source)
        _objects(index)
        found = list(_header_problems(source, index))
        total = sum(tensor.nbytes for tensor in index.tensors.values())
        with (
            Progress("verifying", total, shown=True) as progress,
            FileReader(source, index.files, progress.add, hosts=index.hosts) as files,
        ):
            for stored in index.tensors.values():
                for block in stored.blocks:
                    single = stored._replace(blocks=(block,))
                    try:
                        sums, _ = sum_box(files, single, block.box)
                        check_sums(index._replace(tensors={stored.name: single}), [{(stored.name, block.box): sums}])
                    except Replaced:
                        raise
                    except CheckpointError as error:
                        found.append(error.problem)
    return found


def _header_problems(directory: ReadableDirectory, index: Index) -> Iterator[str]:
    """The blocks whose positions differ between a file's header and the index."""
    for file in index.files:
        try:
            _, inside = read_header(directory, file)
        except Replaced:
            raise
        except CheckpointError as error:
            yield error.problem
            continue
        for stored in index.tensors.values():
            for block in stored.blocks:
                key = f"{stored.name}@{','.join(map(str, block.box.offset))}"
                if block.file == file and (key not in inside or inside[key].start != block.start):
                    yield f"{file}: its header and the index disagree on the position of {key}"


def diff(a: str | Path, b: str | Path) -> list[Difference]:
    """The differences of two checkpoints: names, shapes, dtypes, values of tensors and objects. Ignores layouts.

    Example:
        >>> import shardwise as sw, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> sw.checkpoint.save({"w": torch.zeros(4), "step": 1}, f"{folder}/a")
        >>> sw.checkpoint.save({"w": torch.tensor([0, 0, 2.0, 0]), "step": 2}, f"{folder}/b")
        >>> for name, what in sw.checkpoint.diff(f"{folder}/a", f"{folder}/b"):
        ...     print(name, what)
        step is 1 in the first, 2 in the second
        w differs in 1 of 4 elements, by at most 2
    """
    finish_pending()
    return retry_replaced(lambda: _diff(a, b))


def _diff(a: str | Path, b: str | Path) -> list[Difference]:
    with open_place(a) as one, open_place(b) as other:
        first, second = read_index(one), read_index(other)
        found = list(_different_entries(first, second))
        both = [name for name in first.tensors if name in second.tensors]
        with (
            FileReader(one, first.files, hosts=first.hosts) as in_a,
            FileReader(other, second.files, hosts=second.hosts) as in_b,
        ):
            for name in both:
                what = _difference(in_a, first.tensors[name], in_b, second.tensors[name])
                if what is not None:
                    found.append(Difference(name, what))
    return found


def _different_entries(first: Index, second: Index) -> Iterator[Difference]:
    here, there = stored_entries(first.state), stored_entries(second.state)
    for name in [*here, *(name for name in there if name not in here)]:
        if name not in there:
            yield Difference(name, "is in the first only")
        elif name not in here:
            yield Difference(name, "is in the second only")
        else:
            a, b = here[name][1], there[name][1]
            if (tensor_name(a) is None) != (tensor_name(b) is None):
                yield Difference(name, "is a tensor in one and a plain object in the other")
            elif tensor_name(a) is None and a != b:
                yield Difference(name, f"is {decode(a)!r:.60} in the first, {decode(b)!r:.60} in the second")


def _difference(in_a: FileReader, a: StoredTensor, in_b: FileReader, b: StoredTensor) -> str | None:
    if a.shape != b.shape or a.dtype is not b.dtype:
        one, other = TensorMeta(a.shape, dtype=a.dtype), TensorMeta(b.shape, dtype=b.dtype)
        return f"is {one} in the first, {other} in the second"
    differing, total, largest = 0, 0, 0.0
    for block in a.blocks:
        left, right = read_box(in_a, a, block.box)[0], read_box(in_b, b, block.box)[0]
        total += left.numel()
        unequal = (as_bytes(left) != as_bytes(right)).reshape(-1, a.dtype.itemsize).any(axis=1)
        if unequal.any():
            differing += int(unequal.sum())
            wide = torch.complex128 if a.dtype.is_complex else torch.float64
            largest = max(largest, (left.to(wide) - right.to(wide)).abs().nan_to_num(torch.inf).max().item())
    return f"differs in {differing:,} of {total:,} elements, by at most {largest:.6g}" if differing else None


# ---------------------------------------------------------------- another layout


def reshard(
    path: str | Path, out: str | Path, mesh: Any, placements: Placements | None = None, *, process_group: Any = None
) -> None:
    """Copy a checkpoint into the blocks of another mesh, so that loading on that mesh reads long byte ranges.

    Any checkpoint loads on any mesh; this makes frequent loads faster. Under torchrun every process calls it
    and does its part; on a virtual mesh this process does everything, one block at a time.

    Args:
        path: the checkpoint.
        out: the directory to create.
        mesh: the mesh, virtual or of processes.
        placements: a function from a tensor's name and shape to its placements on the mesh; by default all axes shard
            dim 0.
        process_group: the processes that take part; default: all.

    Example:
        >>> import shardwise as sw, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> sw.checkpoint.save({"w": torch.arange(6.0)}, f"{folder}/a")
        >>> sw.checkpoint.reshard(f"{folder}/a", f"{folder}/b", sw.init_device_mesh("cpu", (3,)))
        >>> sw.checkpoint.inspect(f"{folder}/b").tensors[0].blocks, sw.checkpoint.diff(f"{folder}/a", f"{folder}/b")
        (3, [])
    """
    grid = as_mesh(mesh)
    if not fabric_of(grid).has_values:
        raise UnsupportedError("a dry run has no files", hint="use a virtual mesh, or processes")
    processes = Processes() if fabric_of(grid).many_ranks else processes_of(Outcome(), [], process_group)
    retry_replaced(lambda: _reshard(path, out, grid, placements or _by_rows(grid), processes))


def _reshard(path: str | Path, out: str | Path, grid: DeviceMesh, layout: Placements, processes: Processes) -> None:
    outcome = Outcome()
    outcome.attempt(finish_pending, None)
    with contextlib.ExitStack() as opened:

        def look() -> tuple[ReadableDirectory | None, Index, dict[str, DTensorSpec], AnyStaging | None]:
            source = opened.enter_context(open_place(path))
            index = read_index(source)
            specs = {
                name: DTensorSpec(grid, layout(name, stored.shape), TensorMeta(stored.shape, dtype=stored.dtype))
                for name, stored in index.tensors.items()
            }
            if not processes.is_first:
                return source, index, specs, None
            target = place_of(out)
            target = target.absolute() if isinstance(target, Path) else target
            return source, index, specs, begin_save(target, None, False)

        source, index, specs, staging = outcome.attempt(look, (None, Index({}, {}, {}), {}, None))
        outcome.value = (index.digest, staging)
        try:
            gathered = processes.exchange(outcome)
            if len({digest for digest, _ in gathered}) > 1:
                raise Replaced(
                    f"the ranks find different checkpoints at {path}",
                    hint="use a path on a shared file system, and a checkpoint that no job overwrites",
                )
        except BaseException:
            if staging is not None:
                staging.discard()
            raise
        nothing = SaveJob(gathered[0][1], processes, {}, {}, {})
        job = outcome.attempt(lambda: _resharding(opened, source, index, specs, nothing), nothing)
        execute_save(outcome, job)


def _resharding(
    opened: contextlib.ExitStack,
    source: ReadableDirectory | None,
    index: Index,
    specs: dict[str, DTensorSpec],
    job: SaveJob,
) -> SaveJob:
    """The save job that copies this process's boxes from another checkpoint."""
    assert source is not None, "no step runs after a failed one"
    shares = assign_writes(
        [TensorToWrite(name, stored.dtype.itemsize, held_boxes(specs[name])) for name, stored in index.tensors.items()]
    )
    described = {
        name: TensorDescription(NAMES[stored.dtype], stored.shape, repr(specs[name]))
        for name, stored in index.tensors.items()
    }
    sums: Sums = {}
    files = opened.enter_context(FileReader(source, index.files, hosts=index.hosts))
    items = {
        rank: [(share, _copied(files, index, share, sums)) for share in of_rank]
        for rank, of_rank in shares.items()
        if job.processes.alone or rank == job.processes.rank
    }
    check: Callable[[list[Any]], None] = lambda gathered: check_sums(index, gathered)  # noqa: E731
    saved = index.saved or None  # the state is of that time
    return job._replace(tensors=described, state=index.state, files=items, sums=sums, check=check, saved=saved)


def _by_rows(mesh: DeviceMesh) -> Placements:
    return lambda name, shape: [Shard(0) if shape else Replicate()] * mesh.ndim


def _copied(files: FileReader, index: Index, share: WriteShare, sums: Sums) -> BlockToWrite:
    """A block that is read from another checkpoint just before it is written."""
    stored, box = index.tensors[share.name], share.box

    def get() -> torch.Tensor:
        values, sums[share.name, box] = read_box(files, stored, box)
        return values

    return BlockToWrite(f"{share.name}@{','.join(map(str, box.offset))}", stored.dtype, box.sizes, get)
