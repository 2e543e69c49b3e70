"""Traversal of modules and their arguments: states, parameters with their owners, tensors in arguments and results.

Of states, only the attribute of the module is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.torch_private import tree_leaves

__all__ = ["STATE", "owned_parameters", "states_under", "subclass_with", "tensors_in"]

STATE = "_shardwise_data_parallel"


def tensors_in(tree: Any) -> tuple[list[torch.Tensor], bool]:
    """The tensors in containers and dataclasses, and whether there is an object that may hide some."""
    if isinstance(tree, torch.Tensor):
        return [tree], False
    tensors: list[torch.Tensor] = []
    opaque = False
    leaves = tree_leaves(tree)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            leaves.extend(tree_leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)]))
        elif leaf is not None and not isinstance(leaf, bool | int | float | complex | str | bytes):
            opaque = True
    return tensors, opaque


def states_under(*modules: nn.Module, recurse: bool = True) -> Iterator[Any]:
    """The states of these modules and of all below them, each once."""
    seen: dict[int, Any] = {}
    for root in modules:
        for module in root.modules() if recurse else (root,):
            state = getattr(module, STATE, None)
            if state is not None and id(state) not in seen:
                seen[id(state)] = state
                yield state


def _managed_modules(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules whose parameters belong to these roots: all below them except those with their own state."""
    found: dict[nn.Module, str] = {}
    waiting = [(root, "") for root in reversed(roots)]
    while waiting:
        module, name = waiting.pop()
        if module in found or (hasattr(module, STATE) and module not in roots):
            continue
        found[module] = name
        children = [(child, f"{name}.{below}" if name else below) for below, child in module.named_children()]
        waiting += reversed(children)
    return [(name, module) for module, name in found.items()]


def owned_parameters(
    roots: Sequence[nn.Module], ignored: Iterable[nn.Parameter]
) -> list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]:
    """The parameters of these modules with a name and all their owners, each once."""
    skipped = {id(parameter) for parameter in ignored}
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in _managed_modules(roots):
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in skipped:
                continue
            full = f"{prefix}.{name}" if prefix else name
            found.setdefault(id(parameter), (full, parameter, []))[2].append((module, name))
    return list(found.values())


def subclass_with(module: nn.Module, mixin: type) -> None:
    """Give a module the methods of `mixin`, by a class made for it, which keeps the name of the module's own class.

    Libraries use that name: the Trainer of transformers shifts the labels of causal language models, which it
    recognizes by class name.
    """
    module.__class__ = _subclass(module.__class__, mixin)


@functools.lru_cache(maxsize=1024)
def _subclass(kind: type, mixin: type) -> type:
    kept = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (mixin, kind), kept)
