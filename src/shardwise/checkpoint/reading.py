"""load: each rank reads the bytes of its own blocks, everything is verified, and only then does the state change.

What is read goes to host memory first, which costs one more copy of this process's part of the state. Checksums are
sums: each rank adds up what it read, and the sums of all ranks are compared with the index, so that nothing is read for
the sake of verifying.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.background import finish_pending
from shardwise.checkpoint.blocks import Memory, Sums, check_sums, note_sums, read_box
from shardwise.checkpoint.boxes import Box, boxes_of, whole
from shardwise.checkpoint.index import INDEX, Index, StoredTensor, parse_index
from shardwise.checkpoint.optimizers import optimizer_state
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.ranges import FileReader, read_all
from shardwise.checkpoint.together import Processes, Turn, processes_of
from shardwise.checkpoint.tree import Expanded, entries, expand, filled, rebuild, stored_entries, tensor_name
from shardwise.checkpoint.values import Name, decode, join
from shardwise.core.spec import TensorMeta
from shardwise.errors import CheckpointError, CheckpointMismatchError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = ["Loaded", "load", "mismatch", "open_index", "read"]


class Loaded(NamedTuple):
    """What a load did: the state with what was loaded in it, what did not fit, and the bytes this process read."""

    state: Any
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]
    bytes_read: int


class Fit(NamedTuple):
    """How a state and a checkpoint fit: the tensors and objects to load, and what does not fit."""

    tensors: list[tuple[torch.Tensor, StoredTensor]]
    objects: dict[Name, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, str]


class Staged(NamedTuple):
    """A local tensor and the values it is to get, in host memory."""

    local: torch.Tensor
    values: torch.Tensor


def load(
    state: Any, path: str | Path, *, strict: bool = True, staged: bool = True, process_group: Any = None
) -> Loaded:
    """Fill a state from a checkpoint, whatever mesh and layout it was saved from.

    Every process of the group calls it. Tensors are filled in place, plain objects are replaced, modules and optimizers
    get their state; an optimizer that has not made a step yet too. If anything is wrong with the checkpoint, an error
    says so on all ranks and nothing has changed.

    Args:
        state: as given to `save`, with tensors laid out as they are wanted.
        path: the directory of the checkpoint.
        strict: entries that are missing, unexpected or of another shape or dtype are an error that lists them all.
            With False, what fits is loaded, and the result has the lists.
        staged: keep all that is read in host memory until everything is verified. With False it goes to the tensors
            at once, which takes no memory and less time; a damaged checkpoint is still an error then, but the tensors
            are partly overwritten. For programs that end on such an error anyway.
        process_group: the processes that take part, if not all.

    Example:
        >>> import shardwise as sw, tempfile
        >>> path = tempfile.mkdtemp() + "/first"
        >>> sw.checkpoint.save({"w": torch.ones(2, 2), "names": ("a", "b")}, path)
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> w = sw.zeros(2, 2, device_mesh=mesh, placements=[sw.Shard(1)])
        >>> sw.checkpoint.load({"w": w, "extra": 0}, path, strict=False)[1:4]
        (('extra',), ('names',), {})
    """
    finish_pending()
    turn = Turn()
    directory = Path(path)
    index = turn.attempt(lambda: open_index(directory), Index({}, {}, {}))
    tree = turn.attempt(lambda: expand(state, lambda owner, at: optimizer_state(owner, at, index)), None)
    root, expanded = ({}, ()) if tree is None else tree
    tensors = [value for _, value in entries(root) if isinstance(value, torch.Tensor)]
    processes = processes_of(tensors, process_group)
    fit = _agreed_fit(turn, processes, root, index, strict)
    turn.says = None
    waiting, read_bytes = _read_and_verify(turn, processes, directory, index, fit, staged)
    for local, values in waiting:
        _put(local, values)
    for tensor, _ in fit.tensors:
        torch.autograd.graph.increment_version(tensor)
    _give_back(state, expanded, fit.objects)
    return Loaded(state, fit.missing, fit.unexpected, fit.mismatched, read_bytes)


def read(path: str | Path) -> Any:
    """The whole state of a checkpoint as plain tensors and objects, in this process alone.

    Example:
        >>> import shardwise as sw, tempfile
        >>> path = tempfile.mkdtemp() + "/first"
        >>> sw.checkpoint.save({"w": torch.ones(2), "rates": [0.1, (0.2,)]}, path)
        >>> sw.checkpoint.read(path)
        {'w': tensor([1., 1.]), 'rates': [0.1, (0.2,)]}
    """
    finish_pending()
    directory = Path(path)
    index = open_index(directory)
    tensors: dict[str, torch.Tensor] = {}
    total = sum(tensor.nbytes for tensor in index.tensors.values())
    with Progress("loading", total, shown=True) as progress, FileReader(directory, index.files, progress.add) as files:
        for stored in index.tensors.values():
            box = whole(stored.shape)
            tensors[stored.name], found = read_box(files, stored, box)
            check_sums(index, [{(stored.name, box): found}])
    return rebuild(index.state, tensors)


# ---------------------------------------------------------------- what is there, and what is wanted


def open_index(directory: Path) -> Index:
    """The index of a checkpoint, checked; the tensors that its state names are exactly those it stores."""
    if not directory.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {directory}", hint="a checkpoint is a directory with an index.json"
        )
    index = parse_index(read_all(directory / INDEX, "the index"))
    named = {name for _, value in stored_entries(index.state).values() if (name := tensor_name(value)) is not None}
    if named != set(index.tensors):
        odd = sorted(named ^ set(index.tensors))
        raise CheckpointError(f"the state of the checkpoint and its tensors differ in {', '.join(odd[:8])}")
    return index


def _agreed_fit(turn: Turn, processes: Processes, root: Any, index: Index, strict: bool) -> Fit:
    """How the states of all processes fit the checkpoint; an error on all of them where one does not, if strict."""
    fit = turn.attempt(lambda: _fit(root, index), Fit([], {}, (), (), {}))
    wanted = {join(path) for path, _ in entries(root)}
    turn.says = (wanted, fit.missing, fit.mismatched)
    told = processes.tell_if_different(turn, (sorted(wanted), fit.missing, fit.mismatched))
    everybody = set().union(*(names for names, _, _ in told))
    fit = fit._replace(unexpected=tuple(name for name in fit.unexpected if name not in everybody))
    missing = sorted({name for _, names, _ in told for name in names})
    mismatched = {name: why for _, _, wrong in told for name, why in wrong.items()}
    if strict and (missing or fit.unexpected or mismatched):
        raise mismatch(tuple(missing), fit.unexpected, mismatched)
    return fit


def _fit(root: Any, index: Index) -> Fit:
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
    unexpected = tuple(name for name in stored if name not in seen)
    return Fit(tensors, objects, tuple(missing), unexpected, mismatched)


def _differs(tensor: torch.Tensor, stored: StoredTensor) -> str | None:
    have, want = TensorMeta(stored.shape, dtype=stored.dtype), TensorMeta(tensor.shape, dtype=tensor.dtype)
    if have is not want:
        return f"is {have} in the checkpoint, {want} in the state"
    if isinstance(tensor, DTensor) and tensor.spec.partial_axes:
        return f"is {tensor.spec} in the state, and a sum cannot be filled: use Replicate() or Shard()"
    return "has no memory in the state: it is on the meta device" if tensor.device.type == "meta" else None


def mismatch(missing: tuple[str, ...], unexpected: tuple[str, ...], mismatched: dict[str, str]) -> Exception:
    lines = ["the checkpoint does not fit the state:"]
    lines += [f"    missing from the checkpoint: {name}" for name in missing]
    lines += [f"    in the checkpoint, not in the state: {name}" for name in unexpected]
    lines += [f"    {name} {why}" for name, why in mismatched.items()]
    return CheckpointMismatchError(
        "\n".join(lines),
        hint="strict=False loads what fits",
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
    )


# ---------------------------------------------------------------- reading


def _read_and_verify(
    turn: Turn, processes: Processes, directory: Path, index: Index, fit: Fit, staged: bool
) -> tuple[list[Staged], int]:
    """All values that this process needs, verified together with the other processes; those that wait to be put."""
    waiting: list[Staged] = []
    sums: Sums = {}

    def read_mine() -> int:
        total = sum(local.nbytes for tensor, _ in fit.tensors for local, _ in _locals(tensor))
        memory = Memory(total) if staged else None
        progress = Progress("loading", total, shown=processes.is_first)
        with progress, FileReader(directory, index.files, progress.add) as files:
            for tensor, stored in fit.tensors:
                waiting.extend(_stage(files, tensor, stored, sums, memory))
        return files.bytes_read

    read_bytes = turn.attempt(read_mine, 0)
    turn.says = sums
    check_sums(index, processes.tell(turn))
    return waiting, read_bytes


def _stage(
    files: FileReader, tensor: torch.Tensor, stored: StoredTensor, sums: Sums, memory: Memory | None
) -> Iterator[Staged]:
    """Read what the locals of a tensor are to get, and add up the sums of it; without memory, put it there at once."""
    for local, boxes in _locals(tensor):
        place = Memory.of(local) if memory is None else memory
        if len(boxes) == 1:
            box = boxes[0][0]
            values, found = read_box(files, stored, box, place)
            note_sums(sums, stored, box, found)
        else:
            _, values = place.take(tuple(local.shape), local.dtype)
            for box, within in boxes:
                values[within], found = read_box(files, stored, box)
                note_sums(sums, stored, box, found)
        if memory is not None:
            yield Staged(local, values)
        elif values.data_ptr() != local.data_ptr():
            _put(local, values)


def _locals(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[tuple[Box, tuple[slice, ...]]]]]:
    """The locals of a tensor in this process that are not empty, and the boxes that each is made of."""
    if not isinstance(tensor, DTensor):
        box = whole(tensor.shape)
        if box.numel:
            yield tensor, [(box, box.inside(box))]
        return
    spec = tensor.spec
    for coordinate, local in fabric_of(spec.mesh).parts(spec.mesh, tensor._local_tensor):
        boxes = boxes_of(spec.block(coordinate))
        if boxes:
            yield local, boxes


# ---------------------------------------------------------------- changing the state


def _put(local: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        local.detach().copy_(values)


def _give_back(state: Any, expanded: Sequence[Expanded], objects: Mapping[Name, Any]) -> None:
    """Put the plain objects where they belong; those that stand for a state dict are given it."""
    if isinstance(state, dict):
        filled(state, objects)
    for path, owner, inside in expanded:
        own = {at[len(path) :]: value for at, value in objects.items() if at[: len(path)] == path}
        loaded = filled(inside, own)
        if isinstance(owner, torch.nn.Module):
            if own:  # extra state; tensors are filled already
                owner.load_state_dict(loaded, strict=False)
        else:
            owner.load_state_dict(loaded)
