"""Splits a chain of modules into stages: where the user specifies, or so that the largest stage is minimal."""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.api import users_hooks
from shardwise.errors import LayoutError, UnsupportedError

__all__ = ["Tie", "split_model", "untie"]

Tie = list[tuple[int, str]]  # the stages that share a parameter, and its names there


def split_model(model: nn.Module | Sequence[nn.Module], split: Any, stages: int) -> list[nn.Module]:
    """The stages of a model: an `nn.Sequential`, which is cut, or a list of stages.

    Args:
        model: the model.
        split: the children (names or numbers) with which stages begin, or "auto".
        stages: the number of stages.
    """
    if not isinstance(model, nn.Sequential):
        if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
            raise LayoutError(
                f"a {type(model).__name__} cannot be cut: only an nn.Sequential defines the order of its modules",
                hint="give an nn.Sequential, or a list with one module for each stage",
            )
        given = list(model)
        if len(given) != stages:
            raise LayoutError(f"{len(given)} modules for {stages} stages", hint="one module for each stage")
        return given
    children = dict(zip(model._modules, model, strict=True))  # a module may occur several times
    names = list(children)
    if split == "auto":
        cuts = _balanced([_weight(child) for child in children.values()], stages)
    else:
        cuts = [0, *(_position(names, name) for name in split), len(names)]
    if len(cuts) != stages + 1 or any(a >= b for a, b in itertools.pairwise(cuts)):
        raise LayoutError(
            f"split={split!r} does not cut {len(names)} modules into {stages} stages",
            hint=f"name the {stages - 1} modules with which the second and later stages begin, in order",
        )
    made = []
    for first, last in itertools.pairwise(cuts):
        stage = nn.Sequential()
        for name in names[first:last]:
            stage.add_module(name, children[name])
        made.append(stage)
    return made


def _position(names: Sequence[str], name: str | int) -> int:
    if str(name) not in names:
        raise LayoutError(f"split: the model has no module {name!r}", hint=f"it has {', '.join(names)}")
    return names.index(str(name))


def _weight(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """The cuts that minimize the weight of the heaviest stage; no stage is empty.

    Example:
        >>> _balanced([4, 1, 1, 1, 3], 3)
        [0, 1, 3, 5]
    """
    count = len(weights)
    if count < stages:
        raise LayoutError(f"{count} modules cannot be cut into {stages} stages", hint="use fewer stages")
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: list[list[tuple[float, list[int]]]] = [[(float("inf"), [])] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, [0])
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            options = [
                (max(best[stage - 1][begin][0], float(sums[end] - sums[begin])), begin)
                for begin in range(stage - 1, end)
            ]
            worst, begin = min(options)
            best[stage][end] = (worst, [*best[stage - 1][begin][1], end])
    return best[stages][count][1]


def untie(stages: Sequence[nn.Module]) -> tuple[list[nn.Module], list[Tie]]:
    """Give each stage its own parameter in place of one that several stages share (tied embeddings).

    The first stage gets a new one, too, on the same memory: an optimizer that was made before would step it alone.
    Modules with parameters or buffers that several stages share are copied, too.

    Returns:
        The stages, and the ties.
    """
    places: dict[nn.Parameter, dict[int, list[str]]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places.setdefault(parameter, {}).setdefault(number, []).append(name)
    tied = {parameter: found for parameter, found in places.items() if len(found) > 1}
    counts = collections.Counter(module for stage in stages for module in stage.modules())
    shared = {module for module, count in counts.items() if count > 1 and _has_state(module)}
    for parameter, found in tied.items():
        _check_hooks(parameter, found)
    seen = set[nn.Module]()
    made = list[nn.Module]()
    for number, stage in enumerate(stages):
        shared_here = {parameter: found for parameter, found in tied.items() if number in found}
        own = {id(p): _own(p, copied=number != next(iter(found))) for p, found in shared_here.items()}
        mine = set(stage.modules())
        made.append(_with_own(stage, shared & seen, dict(own)))
        seen |= mine
        for parameter, found in shared_here.items():
            for name in found[number]:
                owner, _, last = name.rpartition(".")
                setattr(made[number].get_submodule(owner), last, own[id(parameter)])
    return made, [[(number, names[0]) for number, names in found.items()] for found in tied.values()]


def _own(parameter: nn.Parameter, *, copied: bool) -> nn.Parameter:
    data = parameter.detach()
    own = nn.Parameter(data.clone() if copied else data, parameter.requires_grad)
    for key, value in vars(parameter).items():  # what users and libraries know of it
        vars(own).setdefault(key, value)
    return own


def _check_hooks(parameter: nn.Parameter, places: Mapping[int, Sequence[str]]) -> None:
    """Refuse hooks of a shared parameter: each stage would call them with a part of the gradient, or not at all."""
    if users_hooks(parameter._backward_hooks) or users_hooks(parameter._post_accumulate_grad_hooks):
        where = ", ".join(f"{names[0]} of stage {number}" for number, names in places.items())
        raise UnsupportedError(
            f"the parameter {where} has hooks, and becomes a parameter on each of these stages",
            hint="register hooks on pipe.parameters(); they get the gradient of their stage for each microbatch",
        )


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))


def _with_own(stage: nn.Module, others: set[nn.Module], copies: dict[int, Any]) -> nn.Module:
    """A stage with copies of the modules that other stages have as well.

    Args:
        stage: the stage, which is changed.
        others: the modules to copy.
        copies: of tensors and modules, by the id of the original.
    """

    def own(module: nn.Module) -> nn.Module:
        try:
            return copy.deepcopy(module, copies)
        except Exception as error:
            raise UnsupportedError(
                f"a {type(module).__name__} belongs to several stages, and cannot be copied: "
                f"{type(error).__name__}: {error}",
                hint="create a module for each stage; those modules may share their parameters",
            ) from error

    if stage in others:
        return own(stage)
    for module in list(stage.modules()):
        for name, child in module._modules.items() if module not in others else ():
            if child in others:
                module._modules[name] = own(child)
    return stage
