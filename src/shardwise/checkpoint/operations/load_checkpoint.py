"""load: each rank reads the bytes of its own blocks; the state changes only after everything is verified.

Files are read twice: first through a small buffer, for the checksums; then, from the system's page cache, into the
tensors, with a sum that must be the same as before. That is faster than a copy in host memory, and takes none. URLs are
read once, and staged in host memory. Checksums are additive: the sums of all ranks are compared with the index, so no
byte of another rank is read to verify a block. A load performs four exchanges: the comparison of state and checkpoint;
the checksums; that every rank is ready to change; that every rank has changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.format.checkpoint_index import INDEX, Index, StoredTensor, parse_index
from shardwise.checkpoint.format.json_values import Name, decode, join
from shardwise.checkpoint.format.state_tree import (
    ExpandedObject,
    entries,
    expand,
    rebuild,
    stored_entries,
    tensor_name,
    tensors_in,
)
from shardwise.checkpoint.io.box_reader import (
    PartSums,
    Sums,
    check_sums,
    note_sums,
    parts_of,
    read_again,
    read_box,
    sum_box,
)
from shardwise.checkpoint.io.checkpoint_places import open_place
from shardwise.checkpoint.io.host_memory import HostBuffer
from shardwise.checkpoint.io.progress_bar import Progress
from shardwise.checkpoint.io.range_reader import (
    MOST_OPEN,
    Absent,
    FileReader,
    OpenDirectory,
    ReadableDirectory,
    Replaced,
    retry_replaced,
)
from shardwise.checkpoint.operations.apply_load import (
    LoadChanges,
    StagedValues,
    WaitingValues,
    change_all,
    has_tensors,
    is_filled,
    memory_of,
    put_values,
)
from shardwise.checkpoint.operations.background_save import finish_pending
from shardwise.checkpoint.operations.local_disks import AbsentDirectory, fetch_parts, find_index
from shardwise.checkpoint.operations.process_exchange import Outcome, Processes, processes_of
from shardwise.checkpoint.operations.unstepped_optimizer import optimizer_state
from shardwise.checkpoint.partition.boxes import Box, boxes_of, full_box
from shardwise.core.spec import TensorMeta
from shardwise.dispatch.views import materialize
from shardwise.errors import CheckpointError, CheckpointMismatchError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = [
    "Loaded",
    "StateMatch",
    "load",
    "mismatch",
    "open_index",
    "read",
    "read_index",
    "read_values",
    "unfillable",
]

Boxes = list[tuple[Box, tuple[slice, ...]]]  # of a local tensor, each with its slices there
LocalTensors = Sequence[tuple[torch.Tensor, Boxes]]


class Loaded(NamedTuple):
    """The result of a load: the loaded state, the entries that did not match, and the bytes read into the tensors."""

    state: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]
    bytes_read: int


class StateMatch(NamedTuple):
    """The comparison of a state with a checkpoint: tensors and objects to load, and entries that do not match."""

    tensors: list[tuple[torch.Tensor, StoredTensor]]
    objects: dict[Name, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]
    last: frozenset[str] = frozenset()  # objects with tensors on any rank: loaded after the tensors
    given: frozenset[str] = frozenset()  # those of them that need more than filled tensors, on any rank


def load(
    state: Any, path: str | Path, *, strict: bool = True, staged: bool = True, process_group: Any = None
) -> Loaded:
    """Load a checkpoint into a state. The checkpoint may be from any mesh and layout.

    Every process of the group calls it. Tensors are filled in place, plain objects are replaced, modules and optimizers
    load their state, optimizers also before their first step. If the checkpoint is damaged, all ranks raise an error
    and nothing has changed.

    Args:
        state: as passed to `save`, with tensors in the wanted layouts.
        path: the directory of the checkpoint.
        strict: raise an error that lists all missing and unexpected entries, and all of another shape or dtype. With
            False, load the entries that match; the result lists the others.
        staged: verify everything before the first tensor changes. With False values are read directly into the tensors,
            which takes less time; a damaged checkpoint still raises, but the tensors are partly overwritten. For
            programs that end on such an error.
        process_group: the processes that take part; default: all.

    Example:
        >>> import shardwise as sw, tempfile
        >>> path = tempfile.mkdtemp() + "/first"
        >>> sw.checkpoint.save({"w": torch.ones(2, 2), "names": ("a", "b")}, path)
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> w = sw.zeros(2, 2, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> sw.checkpoint.load({"w": w, "extra": 0}, path, strict=False)[1:4]
        (('extra',), ('names',), {})
    """
    try:
        return retry_replaced(lambda: _load(state, path, strict, staged, process_group, anywhere=False))
    except Absent:  # raised on all ranks; it may be on the disk of another host
        return retry_replaced(lambda: _load(state, path, strict, staged, process_group, anywhere=True))


def _load(state: Any, path: str | Path, strict: bool, staged: bool, group: Any, *, anywhere: bool) -> Loaded:
    """One attempt to load; all processes retry together if the checkpoint is replaced meanwhile.

    With `anywhere`, a process whose disk does not have the checkpoint takes the index of one whose disk does.
    """
    outcome = Outcome()
    outcome.attempt(finish_pending, None)
    with contextlib.ExitStack() as opened:
        if anywhere:
            source, data = find_index(outcome, processes_of(outcome, tensors_in(state), group), str(path), opened)
            index = outcome.attempt(lambda: _anywhere(path, source, _checked(data)), Index({}, {}, {}))
        else:
            source = outcome.attempt(lambda: opened.enter_context(open_place(path)), None)
            index = outcome.attempt(lambda: read_index(_given(source)), Index({}, {}, {}))
        tree = outcome.attempt(
            lambda: expand(state, lambda owner, at: optimizer_state(owner, at, index), exact=False), None
        )
        root, expanded = ({}, ()) if tree is None else tree
        processes = processes_of(outcome, tensors_in(state if tree is None else root), group)
        fit = _agreed_match(outcome, processes, path, root, expanded, index, strict)
        files = outcome.attempt(
            lambda: opened.enter_context(FileReader(_given(source), index.files, hosts=index.hosts)), None
        )
        if index.hosts and not processes.alone:
            fetch_parts(outcome, processes, source, files, index, _boxes(fit))
        waiting = _read_and_verify(outcome, processes, source, files, index, fit, staged)
        tensors = [tensor for tensor, _ in fit.tensors]
        make = lambda: LoadChanges(  # noqa: E731
            processes.rank, tensors, waiting, state, expanded, fit.objects, fit.last, fit.given
        )
        change_all(outcome, processes, make)
    return Loaded(state, fit.missing, fit.unexpected, fit.mismatched, files.bytes_read if files else 0)


def _given(source: ReadableDirectory | None) -> ReadableDirectory:
    assert source is not None, "no step runs after a failed one"
    return source


def read(path: str | Path) -> Any:
    """Read the full state of a checkpoint as plain tensors and objects, in this process only.

    Example:
        >>> import shardwise as sw, tempfile
        >>> path = tempfile.mkdtemp() + "/first"
        >>> sw.checkpoint.save({"w": torch.ones(2), "rates": [0.1, (0.2,)]}, path)
        >>> sw.checkpoint.read(path)
        {'w': tensor([1., 1.]), 'rates': [0.1, (0.2,)]}
    """
    finish_pending()
    return retry_replaced(lambda: _read(path))


def _read(path: str | Path) -> Any:
    with open_place(path) as source:
        index = read_index(source)
        total = sum(tensor.nbytes for tensor in index.tensors.values())
        with (
            Progress("loading", total, shown=True) as progress,
            FileReader(source, index.files, progress.add, hosts=index.hosts) as files,
        ):
            return read_values(index, files)


def read_values(index: Index, files: FileReader) -> Any:
    """The full state of a checkpoint, verified."""
    tensors: dict[str, torch.Tensor] = {}
    for stored in index.tensors.values():
        box = full_box(stored.shape)
        tensors[stored.name], found = read_box(files, stored, box)
        check_sums(index, [{(stored.name, box): found}])
    return rebuild(index.state, tensors)


# ---------------------------------------------------------------- comparing checkpoint and state


def read_index(source: ReadableDirectory) -> Index:
    """Read and validate the index of a checkpoint: its state must name exactly the stored tensors."""
    return _checked(source.read(INDEX, "the index"))


def _anywhere(path: str | Path, source: ReadableDirectory | None, index: Index) -> Index:
    """An index that may be of another host. Without hosts in it, all processes must have the files."""
    if isinstance(source, AbsentDirectory) and index.files and not index.hosts:
        raise CheckpointError(
            f"there is no checkpoint {path} on all hosts, and it was saved to a disk that all hosts shared",
            hint="mount that file system on all hosts, or copy the checkpoint to all of them",
        )
    return index


def _checked(data: bytes) -> Index:
    index = parse_index(data)
    named = {name for _, value in stored_entries(index.state).values() if (name := tensor_name(value)) is not None}
    if named != set(index.tensors):
        odd = sorted(named ^ set(index.tensors))
        raise CheckpointError(f"the state of the checkpoint and its tensors differ in {', '.join(odd[:8])}")
    return index


def open_index(path: str | Path) -> Index:
    """Read the index of the checkpoint at a path."""

    def read_once() -> Index:
        with open_place(path) as source:
            return read_index(source)

    return retry_replaced(read_once)


def _agreed_match(
    outcome: Outcome,
    processes: Processes,
    path: str | Path,
    root: Any,
    expanded: Sequence[ExpandedObject],
    index: Index,
    strict: bool,
) -> StateMatch:
    """Compare the states of all processes with the checkpoint; if strict, all raise if one does not match."""
    fit = outcome.attempt(lambda: _fit(root, expanded, index), StateMatch([], {}, (), (), {}))
    wanted = outcome.attempt(lambda: {join(at) for at, _ in entries(root)}, set[str]())
    outcome.value = (wanted, fit.missing, fit.mismatched, fit.last, fit.given)
    fact = lambda: (sorted(wanted), fit.missing, fit.mismatched, sorted(fit.last), sorted(fit.given))  # noqa: E731
    gathered, digests = processes.exchange_if_different(outcome, fact, index.digest)
    if len(set(digests)) > 1:
        raise Replaced(
            f"the ranks find different checkpoints at {path}",
            hint="use a path on a shared file system, and a checkpoint that no job overwrites",
        )

    def compare() -> StateMatch:
        everybody = set().union(*(names for names, *_ in gathered))
        missing = sorted({name for _, names, *_ in gathered for name in names})
        mismatched = {name: why for _, _, wrong, *_ in gathered for name, why in wrong.items()}
        agreed = fit._replace(
            tensors=[pair for pair in fit.tensors if pair[1].name not in mismatched],  # loaded on all ranks or none
            unexpected=tuple(name for name in fit.unexpected if name not in everybody),
            mismatched={name: why for name, why in mismatched.items() if name in wanted} | fit.mismatched,
            last=frozenset().union(*(last for *_, last, _ in gathered)),
            given=frozenset().union(*(given for *_, given in gathered)),
        )
        if strict and (missing or agreed.unexpected or mismatched):
            raise mismatch(tuple(missing), agreed.unexpected, mismatched)
        return agreed

    return outcome.attempt(compare, fit)


def _fit(root: Any, expanded: Sequence[ExpandedObject], index: Index) -> StateMatch:
    stored = stored_entries(index.state)
    tensors: list[tuple[torch.Tensor, StoredTensor]] = []
    objects: dict[Name, Any] = {}
    missing: list[str] = []
    mismatched: dict[str, str] = {}
    seen: set[str] = set()
    for path, value in entries(root):
        name = join(path)
        seen.add(name)
        if name not in stored:
            missing.append(name)
            continue
        name_stored = tensor_name(stored[name][1])
        if name_stored is not None and isinstance(value, torch.Tensor):
            why = _differs(value, index.tensors[name_stored])
            if why is None:
                tensors.append((value, index.tensors[name_stored]))
            else:
                mismatched[name] = why
        elif name_stored is None and not isinstance(value, torch.Tensor):
            objects[path] = decode(stored[name][1])
        else:
            kinds = ("a tensor", "a plain object")
            mismatched[name] = "is {} in the checkpoint, {} in the state".format(*kinds[:: 1 if name_stored else -1])
    for owner in expanded:
        mismatched |= _group_mismatch(owner, objects)
    tensors = _without_conflicts(tensors, mismatched)
    unexpected = tuple(name for name in stored if name not in seen)
    last = [owner for owner in expanded if has_tensors(owner)]
    inside = {path[:size] for path in objects for size in range(len(path) + 1)}
    given = [owner for owner in expanded if owner.path in inside or not is_filled(owner)]
    return StateMatch(
        tensors, objects, tuple(missing), unexpected, mismatched,
        frozenset(join(owner.path) for owner in last), frozenset(join(owner.path) for owner in given),
    )  # fmt: skip


def _without_conflicts(
    tensors: list[tuple[torch.Tensor, StoredTensor]], mismatched: dict[str, str]
) -> list[tuple[torch.Tensor, StoredTensor]]:
    """The tensors to load, without those whose memory another one is filled in with other values.

    Tied weights are such a pair if the checkpoint is of a model where they are not tied.
    """
    first: dict[frozenset[Any], StoredTensor] = {}
    kept = []
    for tensor, stored in tensors:
        memory = memory_of(tensor)
        other = first.setdefault(memory, stored) if memory else stored
        if _contents(other) == _contents(stored):
            kept.append((tensor, stored))
        else:
            mismatched[stored.name] = (
                f"has the memory of {other.name} in the state, and other values or blocks in the checkpoint"
            )
    return kept


def _contents(stored: StoredTensor) -> set[tuple[Box, int]]:
    return {(block.box, block.checksum) for block in stored.blocks}


def _differs(tensor: torch.Tensor, stored: StoredTensor) -> str | None:
    have, want = TensorMeta(stored.shape, dtype=stored.dtype), TensorMeta(tensor.shape, dtype=tensor.dtype)
    if have is not want:
        return f"is {have} in the checkpoint, {want} in the state"
    return unfillable(tensor)


def unfillable(tensor: torch.Tensor) -> str | None:
    """Why a tensor of the state cannot be filled, None if it can. Checked early, before any tensor changes."""
    if isinstance(tensor, DTensor):
        if tensor.spec.partial_axes:
            return f"is {tensor.spec} in the state, and a Partial cannot be filled: use Replicate() or Shard()"
        if tensor._copied_view is not None:
            return "is a view in the state that shares no memory with its base: load the base, or a clone() of the view"
    elif hasattr(tensor, "__tensor_flatten__"):
        return f"is of type {type(tensor).__module__}.{type(tensor).__qualname__} in the state, which cannot be filled"
    if tensor.device.type == "meta":
        return "has no memory in the state: it is on the meta device"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {tensor.layout} tensor of {tensor.dtype} in the state, which cannot be filled"
    for local, _ in _locals(tensor):
        if _shares_elements(local):
            return "is expanded in the state: its elements share memory, and cannot be filled separately"
        if local.untyped_storage().nbytes() < local.dtype.itemsize * (local.storage_offset() + local.numel()):
            return "has no memory in the state: its storage was freed"
    return None


def _shares_elements(local: torch.Tensor) -> bool:
    """Whether two indices may refer to one element: expanded tensors, windows that overlap."""
    if local.is_contiguous():
        return False
    reach = 0  # how far the dims with smaller strides reach
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _group_mismatch(expanded: ExpandedObject, objects: Mapping[Name, Any]) -> dict[str, str]:
    """Parameter groups of an optimizer that its load_state_dict would refuse."""
    at = (*expanded.path, "param_groups")
    if not isinstance(expanded.owner, torch.optim.Optimizer) or not isinstance(objects.get(at), list):
        return {}
    counts = [
        [len(group["params"]) if isinstance(group, dict) and "params" in group else None for group in groups]
        for groups in (objects[at], expanded.state["param_groups"])
    ]
    if counts[0] == counts[1]:
        return {}
    return {join(at): "is {} in the checkpoint, {} in the state, as numbers of parameters".format(*counts)}


def mismatch(missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: dict[str, str]) -> Exception:
    """The error that lists all entries that do not match."""
    lines = ["the checkpoint does not match the state:"]
    lines += [f"    missing from the checkpoint: {name}" for name in missing]
    lines += [f"    in the checkpoint, not in the state: {name}" for name in unexpected]
    lines += [f"    {name} {why}" for name, why in mismatched.items()]
    return CheckpointMismatchError(
        "\n".join(lines),
        hint="strict=False loads the entries that match",
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
    )


# ---------------------------------------------------------------- reading


def _read_and_verify(
    outcome: Outcome,
    processes: Processes,
    source: ReadableDirectory | None,
    files: FileReader | None,
    index: Index,
    fit: StateMatch,
    staged: bool,
) -> list[WaitingValues]:
    """Read the values of this process, and verify them with the other processes. Returns the values that wait."""
    waiting: list[WaitingValues] = []
    sums: Sums = {}

    def read_mine() -> None:
        assert files is not None, "no step runs after a failed one"
        placed = [(list(_locals(tensor)), stored) for tensor, stored in fit.tensors]
        total = sum(local.nbytes for parts, _ in placed for local, _ in parts)
        again = staged and isinstance(source, OpenDirectory | AbsentDirectory) and _stay_open(index, fit)
        memory = HostBuffer(total) if staged and not again else None
        with Progress("loading", total, shown=processes.is_first) as progress:
            files.count = progress.add
            for parts, stored in placed:
                if again:
                    waiting.append(_verify(files, parts, stored, sums))
                else:
                    waiting.extend(_stage(files, parts, stored, sums, memory))
        files.count = lambda read: None
        if again:
            files.bytes_read = 0  # counted when they are read into the tensors

    outcome.attempt(read_mine, None)
    outcome.value = sums
    gathered = processes.exchange(outcome)
    outcome.attempt(lambda: check_sums(index, gathered), None)
    return waiting


def _stay_open(index: Index, fit: StateMatch) -> bool:
    """Whether all files that this process reads stay open: then they are read again whatever happens to their names."""
    if len(index.files) <= MOST_OPEN:
        return True
    needed = {block.file for stored, box in _boxes(fit) for _, block, _ in parts_of(stored, box)}
    return len(needed) <= MOST_OPEN


def _boxes(fit: StateMatch) -> Iterator[tuple[StoredTensor, Box]]:
    """The boxes that this process loads."""
    for tensor, stored in fit.tensors:
        for _, boxes in _locals(tensor):
            for box, _ in boxes:
                yield stored, box


def _verify(files: FileReader, parts: LocalTensors, stored: StoredTensor, sums: Sums) -> VerifiedTensor:
    """Note the checksums of a tensor's local tensors."""
    before: dict[Box, PartSums] = {}
    for _, boxes in parts:
        for box, _ in boxes:
            if box not in before:
                found, before[box] = sum_box(files, stored, box)
                note_sums(sums, stored, box, found)
    return VerifiedTensor(stored.name, files, parts, stored, before)


class VerifiedTensor(NamedTuple):
    """A tensor whose values in the files are verified."""

    name: str
    files: FileReader
    parts: LocalTensors
    stored: StoredTensor
    before: Mapping[Box, PartSums]

    def put(self) -> None:
        """Read the values into the tensor. They must be those that were verified."""
        read = lambda box, place: read_again(self.files, self.stored, box, place, self.before[box])  # noqa: E731
        for local, boxes in self.parts:
            _put(local, _values(local, boxes, HostBuffer.of(local), read))


def _stage(
    files: FileReader, parts: LocalTensors, stored: StoredTensor, sums: Sums, memory: HostBuffer | None
) -> Iterator[StagedValues]:
    """Read the values of a tensor's local tensors and note their checksums; without `memory`, write them at once."""

    def read(box: Box, place: HostBuffer) -> torch.Tensor:
        values, found = read_box(files, stored, box, place)
        note_sums(sums, stored, box, found)
        return values

    for local, boxes in parts:
        values = _values(local, boxes, HostBuffer.of(local) if memory is None else memory, read)
        if memory is not None:
            yield StagedValues(local, values, stored.name)
        else:
            _put(local, values)


def _values(
    local: torch.Tensor,
    boxes: Boxes,
    place: HostBuffer,
    read: Callable[[Box, HostBuffer], torch.Tensor],
) -> torch.Tensor:
    """Values of a local tensor, in memory of `place`; `read` reads a box."""
    if len(boxes) == 1:
        return read(boxes[0][0], place)
    _, values = place.take(tuple(local.shape), local.dtype)
    for box, within in boxes:
        values[within] = read(box, HostBuffer(0))
    return values


def _put(local: torch.Tensor, values: torch.Tensor) -> None:
    """Write values to a local tensor, if they are not in its memory already."""
    if values.data_ptr() != local.data_ptr():
        put_values(local, values)


def _locals(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Boxes]]:
    """The non-empty local tensors of a tensor in this process, each with its boxes."""
    if not isinstance(tensor, DTensor):
        box = full_box(tensor.shape)
        if box.numel:
            yield tensor, [(box, box.inside(box))]
        return
    if tensor.spec.is_lazy:  # it will be written to
        materialize(tensor)
    spec = tensor.spec
    for coordinate, local in fabric_of(spec.mesh).parts(spec.mesh, tensor._local_tensor):
        boxes = boxes_of(spec.block(coordinate))
        if boxes:
            yield local, boxes
