"""`load_captured`: a saved program on the tensors of this process, checked on each call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.capture.captured_function import is_watched, left_behind
from shardwise.capture.captured_report import CapturedReport
from shardwise.capture.local_optimizer import LocalStep
from shardwise.capture.program_file import SavedProgram, decoded
from shardwise.capture.program_folder import file_of
from shardwise.capture.reachable import MAKING_STATES, storage_key
from shardwise.capture.roots import check_root, matched, named_tensors
from shardwise.capture.tape import Unit
from shardwise.core.mesh import DeviceMesh
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.fabric.base import on_new_world
from shardwise.fabric.world import as_mesh
from shardwise.tensor import DTensor

__all__ = ["LoadedProgram", "load_captured"]

_worlds = [0]
on_new_world.append(lambda: _worlds.append(_worlds.pop() + 1))


class LoadedProgram:
    """A program that was loaded; made by `load_captured`. Called with the arguments that it was recorded with."""

    def __init__(self, saved: SavedProgram, objects: Mapping[str, Any]) -> None:
        self._saved = saved
        self._objects = dict(objects)
        self._world = _worlds[0]
        calls = saved.program.calls
        self._steps = [call.run for _, call in calls if isinstance(call, Unit) and isinstance(call.run, LocalStep)]
        sites = saved.program.facts.sites
        self._has_backward = any(at in sites and sites[at].phase in _BACKWARD for at, _ in calls)
        self._bound({})  # raises if the arguments do not fit

    def source(self) -> str:
        """The program as Python text."""
        return self._saved.program.text

    def explain(self) -> CapturedReport:
        """Collectives, bytes, modelled seconds and memory, by line and module."""
        return CapturedReport.of(self._saved.program)

    def _bound(self, given: dict[int, torch.Tensor]) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """The tensors by position, and their locals by number; raises where any is not as it was."""
        saved = self._saved
        named = dict(named_tensors(self._objects))
        roots, inputs = dict(given), {}
        memories = _Memories(saved.program.facts.memory_of)
        for step in self._steps:
            _check_step(step, named)
        for at, fact in saved.roots.items():
            name = saved.names.get(at)
            if name is not None:
                roots[at] = _found(name, named)
                for other in saved.aliases.get(at, ()):
                    if named.get(other, roots[at]) is not roots[at]:
                        raise LayoutError(
                            f"{other} is another tensor than {name}, and was the same one",
                            hint="tie them as they were, or capture the function again",
                        )
            if at in roots:
                shown = name or f"argument tensor {at}"
                parts = check_root(fact, roots[at], shown)
                memories.check(fact.numbers, parts, shown)
                if self._has_backward and roots[at].grad is not None and not fact.has_grad:
                    raise LayoutError(
                        f"{shown} has a gradient, and had none: the program would not add to it",
                        hint="set it to None before, as optimizer.zero_grad() does",
                    )
                inputs.update(zip(fact.numbers, parts, strict=True))
        return roots, inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_watched():
            raise UnsupportedError(
                "a loaded program has no function that could be traced, explained or transformed",
                hint="call it outside of explain, torch.compile, torch.func and other modes",
            )
        saved = self._saved
        if self._world != _worlds[0]:
            raise UnsupportedError("the process groups of this program are gone", hint="load it again")
        given: dict[int, torch.Tensor] = {}
        matched(saved.arguments, (args, kwargs), "arguments", given)
        roots, inputs = self._bound(given)
        try:
            with torch.no_grad():
                values = saved.program.run(inputs)
        except RuntimeError as error:
            saved.program.raise_named(error)
            raise
        return left_behind(saved, values, roots, ())


class _Memories:
    """Which tensors share memory, as in the recorded step.

    Args:
        numbers: the memory of each local of the program, as a number.
    """

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self._numbers = numbers
        self._known: dict[tuple[str, int], tuple[int, str]] = {}

    def check(self, numbers: Sequence[int], parts: Sequence[torch.Tensor], name: str) -> None:
        """Compare the memory of a tensor with that of those before."""
        for number, part in zip(numbers, parts, strict=True):
            memory, here = self._numbers.get(number), storage_key(part)
            if memory is None:
                continue
            for key, value in ((("here", here), memory), (("recorded", memory), here)):
                found, other = self._known.setdefault(key, (value, name))
                if found != value:
                    how = "shares memory with" if key[0] == "here" else "does not share memory with"
                    raise LayoutError(
                        f"{name} {how} {other}, other than in the recorded step",
                        hint="a program holds for the tensors that share memory as they did; capture it again",
                    )


def _check_step(step: LocalStep, named: Mapping[str, torch.Tensor]) -> None:
    parameters = step.parameters()
    if len(parameters) != len(step.names):
        raise LayoutError(
            f"{type(step.optimizer).__name__} has {len(parameters)} parameters, and had {len(step.names)}",
            hint="capture the function again",
        )
    for parameter, name in zip(parameters, step.names, strict=True):
        if name is not None and named.get(name, parameter) is not parameter:
            raise LayoutError(
                f"{name} is no parameter of the {type(step.optimizer).__name__} that is given, or another one of it",
                hint="give the optimizer of these parameters, in their order",
            )
    if step.makes_now() != step.making:
        raise LayoutError(
            f"{' or '.join(MAKING_STATES)} of {type(step.optimizer).__name__} was turned on or off since the program "
            "was recorded: it would have other states",
            hint="capture the function again",
        )


_BACKWARD = ("backward", "gradients")


def _found(name: str, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if name not in named and name.endswith(".grad"):
        grad = _found(name.removesuffix(".grad"), named).grad
        if grad is None:
            raise LayoutError(
                f"{name} is None, and was a tensor", hint="a program holds for one of both; run a step before"
            )
        return grad
    found = named.get(name)
    if found is None:
        raise LayoutError(
            f"load_captured: nothing that was given has a tensor {name}", hint="load_captured(path, model=model, ...)"
        )
    return found


def load_captured(path: str | os.PathLike[str], *, mesh: Any = None, **objects: Any) -> LoadedProgram:
    """Load a program that `step.save(path, ...)` has written, for the tensors of these objects.

    Nothing of the file is run as code: operators are looked up among torch's own by name. Still, a file decides which
    of them run on your tensors: load files of people you trust. Layouts, shapes, strides and dtypes of all tensors must
    be those of the recorded step, and so must plain arguments; else `LayoutError` is raised and nothing has run. Other
    Python values that the function had read (closures, flags, `model.training`) are what they were at that time.

    Args:
        path: the folder; each rank reads its own file.
        mesh: the mesh, where no object is on it.
        objects: modules, tensors and optimizers by the names that they were saved under.

    Example:
        >>> import shardwise as sw, tempfile
        >>> mesh = sw.init_device_mesh("cpu", (2,))
        >>> weight = sw.ones(4, 4, device_mesh=mesh, placements=[sw.Shard(0)])
        >>> step = sw.captured(lambda x: (x @ weight.t()).sum().full_tensor())
        >>> x = sw.ones(2, 4, device_mesh=mesh)
        >>> _ = [step(x) for _ in range(3)]
        >>> folder = tempfile.mkdtemp()
        >>> step.save(folder, weight=weight)
        >>> loaded = sw.load_captured(folder, weight=weight * 2)
        >>> loaded(x).item()
        64.0
    """
    file = file_of(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UnsupportedError(
            f"load_captured: {file} cannot be read: {error}", hint="step.save(path) writes it"
        ) from error
    meshes: dict[DeviceMesh, None] = {} if mesh is None else {as_mesh(mesh): None}
    for _, tensor in named_tensors(objects):
        if isinstance(tensor, DTensor):
            meshes[tensor._spec.mesh] = None
    optimizers = {name: value for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
    return LoadedProgram(decoded(text, list(meshes), optimizers), objects)
