"""load: each rank reads the bytes of its own blocks, everything is verified, and only then does the state change.

What is read goes to host memory first, which costs one more copy of this process's part of the state. Checksums are
sums: each rank adds up what it read, and the sums of all ranks are compared with the index, so that nothing is read for
the sake of verifying. A load performs four exchanges: how state and checkpoint fit; the sums of what was read; that
every rank is ready to be changed; that every rank has changed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.background import finish_pending
from shardwise.checkpoint.blocks import Memory, Sums, check_sums, note_sums, read_box
from shardwise.checkpoint.boxes import Box, boxes_of, whole
from shardwise.checkpoint.index import INDEX, Index, StoredTensor, parse_index
from shardwise.checkpoint.optimizers import optimizer_state
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.ranges import FileReader, OpenDirectory, Replaced, retry_replaced
from shardwise.checkpoint.together import Processes, Turn, processes_of
from shardwise.checkpoint.tree import (
    Expanded,
    entries,
    expand,
    filled,
    rebuild,
    stored_entries,
    tensor_name,
    tensors_in,
)
from shardwise.checkpoint.values import Name, decode, join
from shardwise.core.spec import TensorMeta
from shardwise.dispatch.views import materialize
from shardwise.errors import CheckpointError, CheckpointMismatchError
from shardwise.fabric.base import fabric_of
from shardwise.tensor import DTensor

__all__ = [
    "Changes",
    "Fit",
    "Loaded",
    "Staged",
    "change_all",
    "load",
    "mismatch",
    "open_checkpoint",
    "open_index",
    "read",
    "read_index",
    "unfillable",
]


NAMED = 20  # names in an error about a state that is partly loaded


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
    """A local tensor, the values it is to get, in host memory, and the name of its tensor."""

    local: torch.Tensor
    values: torch.Tensor
    name: str


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
    return retry_replaced(lambda: _load(state, path, strict, staged, process_group))


def _load(state: Any, path: str | Path, strict: bool, staged: bool, group: Any) -> Loaded:
    """One attempt to load; all processes start over together if the checkpoint is replaced meanwhile."""
    turn = Turn()
    turn.attempt(finish_pending, None)
    with contextlib.ExitStack() as opened:
        source = turn.attempt(lambda: opened.enter_context(open_checkpoint(Path(path))), None)
        index = turn.attempt(lambda: read_index(_given(source)), Index({}, {}, {}))
        tree = turn.attempt(
            lambda: expand(state, lambda owner, at: optimizer_state(owner, at, index), exact=False), None
        )
        root, expanded = ({}, ()) if tree is None else tree
        processes = processes_of(turn, tensors_in(state if tree is None else root), group)
        fit = _agreed_fit(turn, processes, path, root, expanded, index, strict)
        waiting, read_bytes = _read_and_verify(turn, processes, source, index, fit, staged)
        tensors = [tensor for tensor, _ in fit.tensors]
        change_all(turn, processes, lambda: Changes(processes.rank, tensors, waiting, state, expanded, fit.objects))
    return Loaded(state, fit.missing, fit.unexpected, fit.mismatched, read_bytes)


def _given(source: OpenDirectory | None) -> OpenDirectory:
    assert source is not None, "an attempt after a failed one does nothing"
    return source


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
    return retry_replaced(lambda: _read(Path(path)))


def _read(path: Path) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    with open_checkpoint(path) as source:
        index = read_index(source)
        total = sum(tensor.nbytes for tensor in index.tensors.values())
        with Progress("loading", total, shown=True) as progress, FileReader(source, index.files, progress.add) as files:
            for stored in index.tensors.values():
                box = whole(stored.shape)
                tensors[stored.name], found = read_box(files, stored, box)
                check_sums(index, [{(stored.name, box): found}])
    return rebuild(index.state, tensors)


# ---------------------------------------------------------------- what is there, and what is wanted


def open_checkpoint(path: Path) -> OpenDirectory:
    """The directory of a checkpoint, held open."""
    return OpenDirectory(path, "there is no checkpoint")


def read_index(source: OpenDirectory) -> Index:
    """The index of a checkpoint, checked; the tensors that its state names are exactly those it stores."""
    index = parse_index(source.read(INDEX, "the index"))
    named = {name for _, value in stored_entries(index.state).values() if (name := tensor_name(value)) is not None}
    if named != set(index.tensors):
        odd = sorted(named ^ set(index.tensors))
        raise CheckpointError(f"the state of the checkpoint and its tensors differ in {', '.join(odd[:8])}")
    return index


def open_index(path: Path) -> Index:
    """The index of the checkpoint at a path."""

    def read_once() -> Index:
        with open_checkpoint(path) as source:
            return read_index(source)

    return retry_replaced(read_once)


def _agreed_fit(
    turn: Turn,
    processes: Processes,
    path: str | Path,
    root: Any,
    expanded: Sequence[Expanded],
    index: Index,
    strict: bool,
) -> Fit:
    """How the states of all processes fit the checkpoint; an error on all of them where one does not, if strict."""
    fit = turn.attempt(lambda: _fit(root, expanded, index), Fit([], {}, (), (), {}))
    wanted = turn.attempt(lambda: {join(at) for at, _ in entries(root)}, set[str]())
    turn.says = (wanted, fit.missing, fit.mismatched)
    fact = lambda: (sorted(wanted), fit.missing, fit.mismatched)  # noqa: E731
    told, digests = processes.tell_if_different(turn, fact, index.digest)
    if len(set(digests)) > 1:
        raise Replaced(
            f"the ranks do not find the same checkpoint at {path}",
            hint="give a path that all processes see, to a checkpoint that nobody replaces",
        )

    def compare() -> Fit:
        everybody = set().union(*(names for names, _, _ in told))
        agreed = fit._replace(unexpected=tuple(name for name in fit.unexpected if name not in everybody))
        missing = sorted({name for _, names, _ in told for name in names})
        mismatched = {name: why for _, _, wrong in told for name, why in wrong.items()}
        if strict and (missing or agreed.unexpected or mismatched):
            raise mismatch(tuple(missing), agreed.unexpected, mismatched)
        return agreed

    return turn.attempt(compare, fit)


def _fit(root: Any, expanded: Sequence[Expanded], index: Index) -> Fit:
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
    unexpected = tuple(name for name in stored if name not in seen)
    return Fit(tensors, objects, tuple(missing), unexpected, mismatched)


def _differs(tensor: torch.Tensor, stored: StoredTensor) -> str | None:
    have, want = TensorMeta(stored.shape, dtype=stored.dtype), TensorMeta(tensor.shape, dtype=tensor.dtype)
    if have is not want:
        return f"is {have} in the checkpoint, {want} in the state"
    return unfillable(tensor)


def unfillable(tensor: torch.Tensor) -> str | None:
    """Why a tensor of the state cannot be filled, None if it can: what would fail later, when others have changed."""
    if isinstance(tensor, DTensor):
        if tensor.spec.partial_axes:
            return f"is {tensor.spec} in the state, and a sum cannot be filled: use Replicate() or Shard()"
    elif hasattr(tensor, "__tensor_flatten__"):
        return f"is of type {type(tensor).__module__}.{type(tensor).__qualname__} in the state, which cannot be filled"
    if tensor.device.type == "meta":
        return "has no memory in the state: it is on the meta device"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {tensor.layout} tensor of {tensor.dtype} in the state, which cannot be filled"
    for local, _ in _locals(tensor):
        if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
            return "is expanded in the state: its elements share memory, and cannot be filled one by one"
        if local.untyped_storage().nbytes() < local.dtype.itemsize * (local.storage_offset() + local.numel()):
            return "has no memory in the state: its storage was freed"
    return None


def _group_mismatch(expanded: Expanded, objects: Mapping[Name, Any]) -> dict[str, str]:
    """Groups of an optimizer that its load_state_dict would refuse."""
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
    turn: Turn, processes: Processes, source: OpenDirectory | None, index: Index, fit: Fit, staged: bool
) -> tuple[list[Staged], int]:
    """All values that this process needs, verified together with the other processes; those that wait to be put."""
    waiting: list[Staged] = []
    sums: Sums = {}

    def read_mine() -> int:
        total = sum(local.nbytes for tensor, _ in fit.tensors for local, _ in _locals(tensor))
        memory = Memory(total) if staged else None
        progress = Progress("loading", total, shown=processes.is_first)
        with progress, FileReader(_given(source), index.files, progress.add) as files:
            for tensor, stored in fit.tensors:
                waiting.extend(_stage(files, tensor, stored, sums, memory))
        return files.bytes_read

    read_bytes = turn.attempt(read_mine, 0)
    turn.says = sums
    told = processes.tell(turn)
    turn.attempt(lambda: check_sums(index, told), None)
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
            yield Staged(local, values, stored.name)
        elif values.data_ptr() != local.data_ptr():
            _put(local, values)


def _locals(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[tuple[Box, tuple[slice, ...]]]]]:
    """The locals of a tensor in this process that are not empty, and the boxes that each is made of."""
    if not isinstance(tensor, DTensor):
        box = whole(tensor.shape)
        if box.numel:
            yield tensor, [(box, box.inside(box))]
        return
    if tensor.spec.is_lazy:  # it is about to be written to
        materialize(tensor)
    spec = tensor.spec
    for coordinate, local in fabric_of(spec.mesh).parts(spec.mesh, tensor._local_tensor):
        boxes = boxes_of(spec.block(coordinate))
        if boxes:
            yield local, boxes


# ---------------------------------------------------------------- changing the state


class Changes:
    """All changes of a load, once everything is read and verified: objects first that can refuse theirs, then tensors.

    Objects with a state dict of their own run code that is not ours. Those without tensors (schedulers, samplers) are
    loaded first, and get their former state back if one of them, on any rank, raises. Then tensors are copied, which
    cannot fail on shapes, dtypes and memory that were checked. Last come optimizers and other objects with tensors. If
    something fails nevertheless, the error says what was changed.
    """

    def __init__(
        self,
        rank: int,
        tensors: Sequence[torch.Tensor],
        waiting: Sequence[Staged],
        state: Any = None,
        expanded: Sequence[Expanded] = (),
        objects: Mapping[Name, Any] | None = None,
    ) -> None:
        self._rank = rank
        self._tensors = tensors
        self._waiting = waiting
        self._state = state
        self._expanded = expanded
        self._objects = objects or {}
        self._former: list[tuple[Expanded, Any]] = []
        self._others: list[tuple[Expanded, dict[Name, Any]]] = []
        self._done: list[str] = []

    def load_plain(self) -> None:
        """Load the objects without tensors."""
        for owner in self._expanded:
            size = len(owner.path)
            own = {at[size:]: value for at, value in self._objects.items() if at[:size] == owner.path}
            if any(isinstance(value, torch.Tensor) for _, value in entries(owner.state)):
                self._others.append((owner, own))
            else:
                self._former.append((owner, copy.deepcopy(owner.state)))
                _give(owner, filled(owner.state, own))
                self._done.append(_place(owner.path))

    def restore_plain(self) -> None:
        """Give them back what they had."""
        for owner, former in reversed(self._former):
            try:
                _give(owner, former)
            except Exception as error:
                raise CheckpointError(
                    f"{_place(owner.path)} could not be given back the state it had: {error}",
                    hint="its state is undefined; nothing else was changed",
                ) from error

    def load_rest(self) -> None:
        """Copy the tensors, replace plain objects, and load the objects with tensors."""
        doing = "versions of tensors"
        try:
            for tensor in self._tensors:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
            for local, values, doing in self._waiting:
                _put(local, values)
                if doing not in self._done[-1:]:
                    self._done.append(doing)
            if isinstance(self._state, dict) and self._objects:
                doing = "plain objects"
                filled(self._state, self._objects)
                self._done.append(doing)
            for owner, objects in self._others:
                doing = _place(owner.path)
                if objects or not isinstance(owner.owner, torch.nn.Module):  # tensors of a module are filled already
                    _give(owner, filled(owner.state, objects))
                    self._done.append(f"load_state_dict of {doing}")
        except BaseException as error:
            more = f" and {len(self._done) - NAMED} more" if len(self._done) > NAMED else ""
            half = CheckpointError(
                f"the state is partly loaded: {type(error).__name__} at {doing}: {error}\n    changed on rank "
                f"{self._rank} before, in this order: {', '.join(self._done[:NAMED]) or 'nothing'}{more}\n"
                "    on ranks without an error of their own: everything",
                hint="load again, or start over",
            )
            if isinstance(error, Exception):
                raise half from error
            error.add_note(str(half))
            raise


def _place(path: Name) -> str:
    return join(path) or "the state"


def change_all(turn: Turn, processes: Processes, make: Callable[[], Changes]) -> None:
    """Change the states of all processes, or, as long as that is possible, of none."""
    turn.says = None
    changes = turn.attempt(make, None)
    turn.attempt(lambda: changes.load_plain() if changes else None, None)
    try:
        processes.tell(turn)
    except BaseException:
        if changes is not None:
            changes.restore_plain()
        raise
    turn.attempt(lambda: changes.load_rest() if changes else None, None)
    processes.tell(turn)


def _put(local: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to where they belong; tensors made in inference mode are changed in it."""
    with torch.inference_mode() if local.is_inference() else torch.no_grad():
        local.detach().copy_(values)


def _give(expanded: Expanded, state: Any) -> None:
    """Give a module, an optimizer, ... its state dict."""
    if isinstance(expanded.owner, torch.nn.Module):
        expanded.owner.load_state_dict(state, strict=False)
    else:
        expanded.owner.load_state_dict(state)
