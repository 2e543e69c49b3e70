"""The layout of Hugging Face models: `model.safetensors`, or numbered files with an index, read and written in slices.

Each rank reads and writes its own slices of the files' tensors; none holds a whole one. There are no checksums in this
layout, but headers are checked, and nothing changes in the model before everything was read.
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

from shardwise.checkpoint import atomic
from shardwise.checkpoint.atomic import Staging
from shardwise.checkpoint.background import finish_pending
from shardwise.checkpoint.boxes import Held, holders, rows_of, whole
from shardwise.checkpoint.files import Item, as_bytes, block_header
from shardwise.checkpoint.headers import INDEXED, SINGLE, FileTensor, find_tensors
from shardwise.checkpoint.mapping import Source, file_shapes, pieces_of, source_of
from shardwise.checkpoint.owners import Share, Shared, share_out
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.ranges import FileReader, OpenDirectory, retry_replaced
from shardwise.checkpoint.reading import Changes, Loaded, Staged, change_all, mismatch, unfillable
from shardwise.checkpoint.together import Processes, Turn, processes_of
from shardwise.checkpoint.tree import tensors_in
from shardwise.checkpoint.writing import describe, local_of
from shardwise.errors import AgreementError, CheckpointError, NotationError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor
from shardwise.text import parse_bytes

__all__ = ["export_safetensors", "load_safetensors", "parse_size"]

Mapped = Mapping[str, Source] | None


def load_safetensors(
    model: Any, source: str | Path, mapping: Mapped = None, *, strict: bool = True, process_group: Any = None
) -> Loaded:
    """Read a model's parameters and buffers from safetensors files straight into their shards.

    Every process calls it; each rank reads its slices only. Values are converted to the dtype of the model's tensor.

    Args:
        model: a module, or a dict of tensors by name.
        source: a file, or a directory with `model.safetensors` or with numbered files and their index.
        mapping: for tensors of the model whose name or form differs in the files: the name there, or a `Fused`.
        strict: what is missing, unexpected or of another shape is an error that lists it all; with False, what fits is
            loaded, and the result has the lists.
        process_group: the processes that take part, if not all.

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
    return retry_replaced(lambda: _load(model, source, mapping, strict, process_group))


def _load(model: Any, source: str | Path, mapping: Mapped, strict: bool, group: Any) -> Loaded:
    """One attempt to load; all processes start over together if the directory is replaced meanwhile."""
    turn = Turn()
    turn.attempt(finish_pending, None)
    tensors = turn.attempt(lambda: _tensors_of(model), {})
    processes = processes_of(turn, tensors.values() or tensors_in(model), group)
    staged: list[Staged] = []
    with contextlib.ExitStack() as opened:

        def look() -> tuple[OpenDirectory | None, dict[str, int], dict[str, FileTensor], Fitting]:
            place = Path(source)
            single = not place.is_dir()
            directory = opened.enter_context(OpenDirectory(place.parent if single else place))
            files, found = find_tensors(directory, place.name if single else None)
            return directory, files, found, _fit(tensors, mapping, found)

        directory, files, found, fit = turn.attempt(look, (None, {}, {}, Fitting([], [], [], {})))
        turn.says = fit[1:]
        told, _ = processes.tell_if_different(turn, lambda: fit[1:])

        def compare() -> Fitting:
            others = [set(unexpected) for _, unexpected, _ in told]
            agreed = fit._replace(unexpected=[name for name in fit.unexpected if all(name in one for one in others)])
            missing = sorted({name for names, _, _ in told for name in names})
            wrong = {name: why for _, _, wrongs in told for name, why in wrongs.items()}
            if strict and (missing or agreed.unexpected or wrong):
                raise mismatch(tuple(missing), tuple(agreed.unexpected), wrong)
            return agreed

        fit = turn.attempt(compare, fit)

        def read_mine() -> int:
            assert directory is not None, "an attempt after a failed one does nothing"
            total = sum(tensors[name].nbytes for name in fit.fitting)
            with (
                Progress("loading", total, shown=processes.is_first) as progress,
                FileReader(directory, files, progress.add, links=True) as reader,
            ):
                for name in fit.fitting:
                    staged.extend(_stage(reader, name, tensors[name], source_of(name, mapping), found))
            return reader.bytes_read

        read_bytes = turn.attempt(read_mine, 0)
        filled = [tensors[name] for name in fit.fitting]
        change_all(turn, processes, lambda: Changes(processes.rank, filled, staged))
    return Loaded(model, tuple(fit.missing), tuple(fit.unexpected), fit.wrong, read_bytes)


def _tensors_of(model: Any) -> dict[str, torch.Tensor]:
    state = model if isinstance(model, Mapping) else model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


class Fitting(NamedTuple):
    """Which tensors can be loaded; what is missing from the files, what is there besides, what has another shape."""

    fitting: list[str]
    missing: list[str]
    unexpected: list[str]
    wrong: dict[str, str]


def _fit(tensors: Mapping[str, torch.Tensor], mapping: Mapped, found: Mapping[str, FileTensor]) -> Fitting:
    """How the tensors and the files fit."""
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
                f"needs {part} of shape {list(wanted[part])}, which has {list(found[part].shape)} in the files"
            )
        elif (why := unfillable(tensor)) is not None:
            wrong[name] = why
        else:
            fitting.append(name)
    filled = {_memory(tensors[name]) for name in fitting}  # a tied weight stands in the files under one name
    lost = [part for name, parts in missing.items() if _memory(tensors[name]) not in filled for part in parts]
    return Fitting(fitting, lost, sorted(set(found) - used), wrong)


def _memory(tensor: torch.Tensor) -> Any:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    first = getattr(local, "tensors", (local,))[0]
    return (first.data_ptr(), tuple(tensor.shape)) if first.numel() else object()


def _stage(
    reader: FileReader, name: str, tensor: torch.Tensor, source: Source, found: Mapping[str, FileTensor]
) -> Iterator[Staged]:
    for spec, coordinate, local in _locals(tensor):
        values = torch.empty(local.shape, dtype=local.dtype)
        for part, box, within in pieces_of(name, tuple(tensor.shape), source, spec, coordinate):
            file, start, dtype, shape = found[part]
            data = np.empty(box.numel * dtype.itemsize, dtype=np.uint8)
            where = box.inside(whole(shape))
            reader.read_part(file, start, shape, where, dtype.itemsize, data, f"tensor {part}")
            values[within] = torch.from_numpy(data).view(dtype).reshape(box.sizes).to(local.dtype)
        yield Staged(local, values, name)


def _locals(tensor: torch.Tensor) -> Iterator[tuple[Any, tuple[int, ...], torch.Tensor]]:
    if not isinstance(tensor, DTensor):
        yield None, (), tensor
        return
    for coordinate, local in fabric_of(tensor.device_mesh).parts(tensor.device_mesh, tensor._local_tensor):
        yield tensor.spec, coordinate, local


# ---------------------------------------------------------------- writing


class Planned(NamedTuple):
    """A file to be exported: its name, its header, and the tensors in it with the place where each starts."""

    file: str
    header: bytes
    size: int
    starts: dict[str, tuple[int, Item]]


def export_safetensors(
    model: Any,
    directory: str | Path,
    max_shard_size: int | str = "5GB",
    mapping: Mapped = None,
    *,
    process_group: Any = None,
) -> None:
    """Write a model's parameters and buffers as safetensors files that other libraries read.

    Every process calls it; each rank writes its slices into the files. One file `model.safetensors`, or numbered ones
    with an index where it would be larger than `max_shard_size`.

    Args:
        model: a module, or a dict of tensors by name.
        directory: where the files go; it may exist, without such files in it.
        max_shard_size: the most bytes of tensors in a file, as a number or as "5GB", "200MiB".
        mapping: as in `load_safetensors`: parts of fused tensors are written under names of their own.
        process_group: the processes that take part, if not all.

    Example:
        >>> import tempfile, shardwise as sw
        >>> folder = tempfile.mkdtemp()
        >>> sw.checkpoint.export_safetensors(torch.nn.Linear(256, 64), folder, "64KiB")
        >>> sorted(path.name for path in Path(folder).iterdir())[:2]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    turn = Turn()
    turn.attempt(finish_pending, None)
    tensors = turn.attempt(lambda: _tensors_of(model), {})
    processes = processes_of(turn, tensors.values() or tensors_in(model), process_group)

    def decide() -> tuple[list[Planned], Staging | None]:
        for name, tensor in tensors.items():
            describe(name, tensor, processes)
        plan = _plan(tensors, mapping, parse_size(max_shard_size))
        return plan, _make_files(Path(directory).absolute(), plan) if processes.is_first else None

    plan, staging = turn.attempt(decide, ([], None))
    try:
        turn.says = [planned.header for planned in plan]
        told, places = processes.tell_if_different(turn, lambda: turn.says, staging)
        turn.attempt(lambda: _check_same(told), None)
        turn.attempt(lambda: _write_mine(places[0].directory, tensors, mapping, plan, processes), None)
        turn.says = None
        processes.tell(turn)
        if staging is not None:
            done = staging
            turn.attempt(lambda: _publish(done, plan), None)
        processes.tell(turn)
    finally:
        if staging is not None:
            atomic.discard(staging)


def _check_same(told: Sequence[list[bytes]]) -> None:
    if any(headers != told[0] for headers in told[1:]):
        raise AgreementError("the ranks do not export the same tensors", hint="give every rank the same model")


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
        raise CheckpointError(f"{size!r} is not a size", hint='give bytes, or as in "5GB", "200MiB"') from None


def _plan(tensors: Mapping[str, torch.Tensor], mapping: Mapped, most: int) -> list[Planned]:
    """Which tensors go to which file, in the order of the model."""
    files: list[list[Item]] = [[]]
    for name, tensor in tensors.items():
        for part, shape in file_shapes(name, tuple(tensor.shape), source_of(name, mapping)).items():
            item = Item(part, tensor.dtype, shape, lambda: torch.empty(0))
            if files[-1] and sum(other.nbytes for other in files[-1]) + item.nbytes > most:
                files.append([])
            files[-1].append(item)
    planned = []
    for number, items in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header, starts = block_header(items)
        size = len(header) + sum(item.nbytes for item in items)
        planned.append(Planned(file, header, size, {i.key: (s, i) for i, s in zip(items, starts, strict=True)}))
    return planned


def _make_files(target: Path, plan: list[Planned]) -> Staging:
    """Files of the final sizes with headers in them, in a staging directory."""
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
    directory: Path, tensors: Mapping[str, torch.Tensor], mapping: Mapped, plan: list[Planned], processes: Processes
) -> None:
    """Write the slices that this process answers for, each to its place."""
    owner_of: dict[str, str] = {}
    shared: list[Shared] = []
    for name, tensor in tensors.items():
        by_part: dict[str, list[Held]] = {}
        for part, held in _held(name, tensor, source_of(name, mapping), processes):
            by_part.setdefault(part, []).append(held)
        for part, held in by_part.items():
            owner_of[part] = name
            shared.append(Shared(part, tensor.dtype.itemsize, held))
    shares = share_out(shared)
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


def _held(name: str, tensor: torch.Tensor, source: Source, processes: Processes) -> Iterator[tuple[str, Held]]:
    """The pieces of a tensor by the file's tensor they belong to, each with the ranks that hold it."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        for part, box, within in pieces_of(name, shape, source, None, ()):
            yield part, Held(box, within, processes.ranks)
        return
    for coordinate, ranks in holders(tensor.spec):
        for part, box, within in pieces_of(name, shape, source, tensor.spec, coordinate):
            yield part, Held(box, within, ranks)


def _write_share(fd: int, share: Share, tensor: torch.Tensor, start: int, item: Item) -> int:
    held, box = share.source, share.box
    data = as_bytes(local_of(tensor, held)[held.within][box.inside(held.box)].cpu())
    at = 0
    for first, count, pitch, length in rows_of(item.sizes, box.inside(whole(item.sizes)), item.dtype.itemsize):
        for row in range(count):
            view = data[at : at + length].data
            place = start + first + row * pitch
            while len(view):
                done = os.pwrite(fd, view, place)
                view, place = view[done:], place + done
            at += length
    return at


def _publish(staging: Staging, plan: list[Planned]) -> None:
    """Move the files to their place, the index last; of two jobs that do, the one that is first."""
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
