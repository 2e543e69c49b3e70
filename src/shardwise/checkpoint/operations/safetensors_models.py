"""Models in the Hugging Face layout: `model.safetensors`, or numbered files with an index.

Each rank reads and writes only its slices of the tensors. The layout has no checksums, but headers are validated, and
the model changes only after everything was read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.checkpoint.format.state_tree import tensors_in
from shardwise.checkpoint.io import atomic_directory as atomic
from shardwise.checkpoint.io.atomic_directory import Staging
from shardwise.checkpoint.io.block_writer import BlockToWrite, as_bytes, block_header
from shardwise.checkpoint.io.progress_bar import Progress
from shardwise.checkpoint.io.range_reader import FileReader, OpenDirectory, retry_replaced
from shardwise.checkpoint.io.safetensors_header import INDEXED, SINGLE, FileTensor, find_tensors
from shardwise.checkpoint.operations.apply_load import LoadChanges, StagedValues, change_all, put_values
from shardwise.checkpoint.operations.background_save import finish_pending
from shardwise.checkpoint.operations.load_checkpoint import Loaded, mismatch, unfillable
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes, processes_of
from shardwise.checkpoint.operations.save_checkpoint import describe, local_of
from shardwise.checkpoint.partition.assembled_tensors import Assembled
from shardwise.checkpoint.partition.boxes import HeldBox, block_holders, byte_runs, full_box
from shardwise.checkpoint.partition.fused_tensors import FileSlice, Source, file_shapes, file_slices, source_of
from shardwise.checkpoint.partition.write_assignment import TensorToWrite, WriteShare, assign_writes
from shardwise.errors import AgreementError, CheckpointError, NotationError, UnsupportedError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor
from shardwise.text import parse_bytes

__all__ = ["export_safetensors", "load_safetensors", "parse_size"]

GAP = 512  # runs with shorter gaps are read together with the gaps
Mapped = Mapping[str, Source] | None


def load_safetensors(
    model: Any,
    source: str | Path,
    mapping: Mapped = None,
    *,
    strict: bool = True,
    staged: bool = True,
    process_group: Any = None,
) -> Loaded:
    """Read a model's parameters and buffers from safetensors files directly into their shards.

    Every process calls it; each rank reads only its slices. Values are converted to the dtype of the model's tensor.

    Args:
        model: a module, or a dict of tensors by name.
        source: a file, or a directory with `model.safetensors` or with numbered files and their index.
        mapping: for tensors of the model that are renamed or split in the files: the name there, or a `Fused`.
        strict: raise an error that lists all missing and unexpected tensors, and all of another shape. With False, load
            the tensors that match; the result lists the others.
        staged: change the model only after everything was read, which takes its size in host memory once more. With
            False, each tensor is filled as it is read; after an error, the model is partly loaded.
        process_group: the processes that take part; default: all.

    Example:
        >>> import shardwise as sw, tempfile
        >>> folder, mesh = tempfile.mkdtemp() + "/model", sw.init_device_mesh("cpu", (2,))
        >>> sw.checkpoint.export_safetensors({"q": torch.zeros(2, 2), "k": torch.ones(2, 2)}, folder)
        >>> qk = sw.zeros(4, 2, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> fused = sw.checkpoint.Fused(("q", "k"), (2, 2))
        >>> _ = sw.checkpoint.load_safetensors({"qk": qk}, folder, {"qk": fused})
        >>> qk.full_tensor()[:, 0]
        tensor([0., 0., 1., 1.])
    """
    return retry_replaced(lambda: _load(model, source, mapping, strict, staged, process_group))


def _load(model: Any, source: str | Path, mapping: Mapped, strict: bool, wait: bool, group: Any) -> Loaded:
    """One attempt to load; all processes retry together if the directory is replaced meanwhile."""
    outcome = Outcome()
    outcome.attempt(finish_pending, None)
    tensors = outcome.attempt(lambda: _tensors_of(model), {})
    processes = processes_of(outcome, tensors.values() or tensors_in(model), group)
    staged: list[StagedValues] = []
    with contextlib.ExitStack() as opened:

        def look() -> tuple[OpenDirectory | None, dict[str, int], dict[str, FileTensor], FileMatch]:
            place = Path(source)
            single = not place.is_dir()
            directory = opened.enter_context(OpenDirectory(place.parent if single else place))
            files, found = find_tensors(directory, place.name if single else None)
            return directory, files, found, _fit(tensors, mapping, found)

        directory, files, found, fit = outcome.attempt(look, (None, {}, {}, FileMatch([], [], [], {})))
        outcome.value = fit[1:]
        gathered, _ = processes.exchange_if_different(outcome, lambda: fit[1:])

        def compare() -> FileMatch:
            others = [set(unexpected) for _, unexpected, _ in gathered]
            agreed = fit._replace(unexpected=[name for name in fit.unexpected if all(name in one for one in others)])
            missing = sorted({name for names, _, _ in gathered for name in names})
            wrong = {name: why for _, _, wrongs in gathered for name, why in wrongs.items()}
            if strict and (missing or agreed.unexpected or wrong):
                raise mismatch(tuple(missing), tuple(agreed.unexpected), wrong)
            return agreed

        fit = outcome.attempt(compare, fit)

        def read_mine() -> int:
            assert directory is not None, "no step runs after a failed one"
            total = sum(tensors[name].nbytes for name in fit.fitting)
            with (
                Progress("loading", total, shown=processes.is_first) as progress,
                FileReader(directory, files, progress.add, links=True, gap=GAP) as reader,
            ):
                for name in fit.fitting:
                    held = source_of(name, mapping)
                    if wait:
                        staged.extend(_stage(reader, name, tensors[name], held, found))
                    else:
                        _fill(reader, name, tensors[name], held, found)
            return reader.bytes_read

        read_bytes = outcome.attempt(read_mine, 0)
        filled = [tensors[name] for name in fit.fitting]
        change_all(outcome, processes, lambda: LoadChanges(processes.rank, filled, staged))
    return Loaded(model, tuple(fit.missing), tuple(fit.unexpected), fit.wrong, read_bytes)


def _tensors_of(model: Any) -> dict[str, torch.Tensor]:
    state = model if isinstance(model, Mapping) else model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


class FileMatch(NamedTuple):
    """The comparison of a model with files: tensors to load, missing and unexpected ones, and mismatches."""

    fitting: list[str]
    missing: list[str]
    unexpected: list[str]
    wrong: dict[str, str]


def _fit(tensors: Mapping[str, torch.Tensor], mapping: Mapped, found: Mapping[str, FileTensor]) -> FileMatch:
    """Compare the tensors of a model with the files."""
    fitting: list[str] = []
    missing: dict[str, list[str]] = {}
    wrong: dict[str, str] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        wanted = file_shapes(name, tuple(tensor.shape), source_of(name, mapping))
        used |= set(wanted)
        lost = [part for part in wanted if part not in found]
        odd = [part for part in wanted if part in found and found[part].shape != wanted[part]]
        if lost:
            missing[name] = lost
        elif odd:
            part = odd[0]
            wrong[name] = (
                f"needs {part} of shape {list(wanted[part])}, which has shape {list(found[part].shape)} in the files"
            )
        elif (why := unfillable(tensor)) is not None:
            wrong[name] = why
        else:
            fitting.append(name)
    filled = {_memory(tensors[name]) for name in fitting}  # tied weights have one name in the files
    lost = [part for name, parts in missing.items() if _memory(tensors[name]) not in filled for part in parts]
    return FileMatch(fitting, lost, sorted(set(found) - used), wrong)


def _memory(tensor: torch.Tensor) -> Any:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    first = getattr(local, "tensors", (local,))[0]
    return (first.data_ptr(), tuple(tensor.shape)) if first.numel() else object()


def _stage(
    reader: FileReader, name: str, tensor: torch.Tensor, source: Source, found: Mapping[str, FileTensor]
) -> Iterator[StagedValues]:
    for spec, coordinate, local in _locals(tensor):
        values = torch.empty(local.shape, dtype=local.dtype)
        for piece in file_slices(name, tuple(tensor.shape), source, spec, coordinate):
            values[piece.within] = _read_slice(reader, piece, found)
        yield StagedValues(local, values, name)


def _fill(reader: FileReader, name: str, tensor: torch.Tensor, source: Source, found: Mapping[str, FileTensor]) -> None:
    """Read a tensor into its locals. Beside them it takes the memory of one slice, in the dtype of the files."""
    for spec, coordinate, local in _locals(tensor):
        for piece in file_slices(name, tuple(tensor.shape), source, spec, coordinate):
            put_values(local.detach()[piece.within], _read_slice(reader, piece, found))


def _read_slice(reader: FileReader, piece: FileSlice, found: Mapping[str, FileTensor]) -> torch.Tensor:
    file, start, dtype, shape = found[piece.name]
    data = np.empty(piece.box.numel * dtype.itemsize, dtype=np.uint8)
    where = piece.box.inside(full_box(shape))
    reader.read_part(file, start, shape, where, dtype.itemsize, data, f"tensor {piece.name}")
    return _placed(torch.from_numpy(data).view(dtype).reshape(piece.box.sizes), piece.dims)


def _placed(values: torch.Tensor, dims: tuple[int | None, ...] | None) -> torch.Tensor:
    """Values of a box in the files, with the dims of the model's tensor."""
    if dims is None:
        return values
    values = values.permute([dim for dim in dims if dim is not None])
    for at, dim in enumerate(dims):
        if dim is None:
            values = values.unsqueeze(at)
    return values


def _locals(tensor: torch.Tensor) -> Iterator[tuple[Any, tuple[int, ...], torch.Tensor]]:
    if not isinstance(tensor, DTensor):
        yield None, (), tensor
        return
    for coordinate, local in fabric_of(tensor.device_mesh).parts(tensor.device_mesh, tensor._local_tensor):
        yield tensor.spec, coordinate, local


# ---------------------------------------------------------------- writing


class PlannedFile(NamedTuple):
    """A file to export: its name, header and size, and its tensors with their first bytes."""

    file: str
    header: bytes
    size: int
    starts: dict[str, tuple[int, BlockToWrite]]


def export_safetensors(
    model: Any,
    directory: str | Path,
    max_shard_size: int | str = "5GB",
    mapping: Mapped = None,
    *,
    process_group: Any = None,
) -> None:
    """Write a model's parameters and buffers as safetensors files for other libraries.

    Every process calls it; each rank writes its slices into the files. Writes one file `model.safetensors`, or numbered
    files with an index if it would be larger than `max_shard_size`.

    Args:
        model: a module, or a dict of tensors by name.
        directory: the directory of the files; it may exist, but must not have such files.
        max_shard_size: the most bytes of tensors in a file, as a number or as "5GB", "200MiB".
        mapping: as in `load_safetensors`: the parts of fused tensors are written as separate tensors.
        process_group: the processes that take part; default: all.

    Example:
        >>> import tempfile, shardwise as sw
        >>> folder = tempfile.mkdtemp()
        >>> sw.checkpoint.export_safetensors(torch.nn.Linear(256, 64), folder, "64KiB")
        >>> sorted(path.name for path in Path(folder).iterdir())[:2]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    outcome = Outcome()
    outcome.attempt(finish_pending, None)
    tensors = outcome.attempt(lambda: _tensors_of(model), {})
    processes = processes_of(outcome, tensors.values() or tensors_in(model), process_group)

    def decide() -> tuple[list[PlannedFile], Staging | None]:
        for name, tensor in tensors.items():
            describe(name, tensor, processes)
        plan = _plan(tensors, mapping, parse_size(max_shard_size))
        return plan, _make_files(Path(directory).absolute(), plan) if processes.is_first else None

    plan, staging = outcome.attempt(decide, ([], None))
    try:
        outcome.value = [planned.header for planned in plan]
        gathered, places = processes.exchange_if_different(outcome, lambda: outcome.value, staging)
        outcome.attempt(lambda: _check_same(gathered), None)
        outcome.attempt(lambda: _write_mine(places[0].directory, tensors, mapping, plan, processes), None)
        outcome.value = None
        processes.exchange(outcome)
        if staging is not None:
            done = staging
            outcome.attempt(lambda: _publish(done, plan), None)
        processes.exchange(outcome)
    finally:
        if staging is not None:
            atomic.discard(staging)


def _check_same(gathered: Sequence[list[bytes]]) -> None:
    if any(headers != gathered[0] for headers in gathered[1:]):
        raise AgreementError("the ranks export different tensors", hint="pass the same model on every rank")


def parse_size(size: int | str) -> int:
    """Bytes of "5GB", "200MiB" or a number.

    Example:
        >>> parse_size("2KiB"), parse_size("1.5GB"), parse_size(7)
        (2048, 1500000000, 7)
    """
    if isinstance(size, int) and size > 0:
        return size
    try:
        return parse_bytes(size if isinstance(size, str) else "")
    except NotationError:
        raise CheckpointError(f"{size!r} is not a size", hint='use a number of bytes, or "5GB", "200MiB"') from None


def _plan(tensors: Mapping[str, torch.Tensor], mapping: Mapped, most: int) -> list[PlannedFile]:
    """Assign the tensors to files, in the order of the model."""
    files: list[list[BlockToWrite]] = [[]]
    if any(isinstance(source, Assembled) for source in (mapping or {}).values()):
        raise UnsupportedError(
            "export_safetensors writes tensors as they are, or the parts of Fused ones, not slices of assembled ones",
            hint="leave them out of the mapping",
        )
    for name, tensor in tensors.items():
        for part, shape in file_shapes(name, tuple(tensor.shape), source_of(name, mapping)).items():
            item = BlockToWrite(part, tensor.dtype, shape, lambda: torch.empty(0))
            if files[-1] and sum(other.nbytes for other in files[-1]) + item.nbytes > most:
                files.append([])
            files[-1].append(item)
    planned = []
    for number, items in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header, starts = block_header(items)
        size = len(header) + sum(item.nbytes for item in items)
        planned.append(PlannedFile(file, header, size, {i.key: (s, i) for i, s in zip(items, starts, strict=True)}))
    return planned


def _make_files(target: Path, plan: list[PlannedFile]) -> Staging:
    """Create the files in a staging directory, with their headers and final sizes."""
    _check_free(target)
    staging = atomic.prepare(target)
    try:
        with atomic.disk_errors(f"{target} cannot be written"):
            for planned in plan:
                with (staging.directory / planned.file).open("xb") as file:
                    file.write(planned.header)
                    file.truncate(planned.size)
    except BaseException:
        atomic.discard(staging)
        raise
    return staging


def _check_free(target: Path) -> None:
    with atomic.disk_errors(f"{target} cannot be written"):
        taken = sorted(path.name for path in target.glob("model*.safetensors*"))
    if taken:
        raise CheckpointError(f"{target} has {taken[0]} already", hint="export to another directory")


def _write_mine(
    directory: Path, tensors: Mapping[str, torch.Tensor], mapping: Mapped, plan: list[PlannedFile], processes: Processes
) -> None:
    """Write the slices that are assigned to this process."""
    owner_of: dict[str, str] = {}
    shared: list[TensorToWrite] = []
    for name, tensor in tensors.items():
        by_part: dict[str, list[HeldBox]] = {}
        for part, held in _held(name, tensor, source_of(name, mapping), processes):
            by_part.setdefault(part, []).append(held)
        for part, held in by_part.items():
            owner_of[part] = name
            shared.append(TensorToWrite(part, tensor.dtype.itemsize, held))
    shares = assign_writes(shared)
    mine = [s for rank, of_rank in shares.items() if processes.alone or rank == processes.rank for s in of_rank]
    total = sum(share.box.numel * tensors[owner_of[share.name]].dtype.itemsize for share in mine)
    places = {part: (planned.file, *place) for planned in plan for part, place in planned.starts.items()}
    with (
        Progress("exporting", total, shown=processes.is_first) as progress,
        atomic.disk_errors(f"{directory} cannot be written"),
    ):
        for planned in plan:
            fd = os.open(directory / planned.file, os.O_WRONLY)
            try:
                for share in mine:
                    if places[share.name][0] == planned.file:
                        progress.add(_write_share(fd, share, tensors[owner_of[share.name]], *places[share.name][1:]))
                os.fsync(fd)
            finally:
                os.close(fd)


def _held(name: str, tensor: torch.Tensor, source: Source, processes: Processes) -> Iterator[tuple[str, HeldBox]]:
    """The slices of a tensor, each with its name in the files and the ranks that hold it."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        for part, box, within, _ in file_slices(name, shape, source, None, ()):
            yield part, HeldBox(box, within, processes.ranks)
        return
    for coordinate, ranks in block_holders(tensor.spec):
        for part, box, within, _ in file_slices(name, shape, source, tensor.spec, coordinate):
            yield part, HeldBox(box, within, ranks)


def _write_share(fd: int, share: WriteShare, tensor: torch.Tensor, start: int, item: BlockToWrite) -> int:
    held, box = share.source, share.box
    data = as_bytes(local_of(tensor, held)[held.within][box.inside(held.box)].cpu())
    at = 0
    for first, count, pitch, length in byte_runs(item.sizes, box.inside(full_box(item.sizes)), item.dtype.itemsize):
        for row in range(count):
            view = data[at : at + length].data
            place = start + first + row * pitch
            while len(view):
                done = os.pwrite(fd, view, place)
                view, place = view[done:], place + done
            at += length
    return at


def _publish(staging: Staging, plan: list[PlannedFile]) -> None:
    """Move the files to their directory, the index last. The first of two concurrent jobs succeeds."""
    target, files = staging.target, [planned.file for planned in plan]
    with atomic.disk_errors(f"{target} cannot be written"):
        if len(plan) > 1:
            named = {part: planned.file for planned in plan for part in planned.starts}
            total = sum(planned.size - len(planned.header) for planned in plan)
            content = {"metadata": {"total_size": total}, "weight_map": named}
            atomic.write_flushed(staging.directory / INDEXED, json.dumps(content, indent=2).encode())
            files.append(INDEXED)
        if not target.exists():
            atomic.publish(staging)
            return
        _check_free(target)
        moved: list[Path] = []
        try:
            for file in files:
                atomic.rename_new(staging.directory / file, target / file)
                moved.append(target / file)
        except BaseException:
            for path in moved:
                path.unlink(missing_ok=True)
            raise
        atomic.flush_directory(target)
