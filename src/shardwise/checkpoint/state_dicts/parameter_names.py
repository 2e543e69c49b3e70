"""Names of parameters and state dict entries without wrappers (DDP, `torch.compile`, activation checkpointing)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.errors import UnsupportedError

__all__ = ["by_names", "canonical_name", "named_tensors"]

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # inner modules of torch.compile and activation checkpointing


def canonical_name(model: nn.Module, path: str, modifiers: str = "_fqn_modifiers") -> str:
    """The name of a parameter or state dict entry without wrappers.

    Example:
        >>> canonical_name(nn.ModuleDict({"_orig_mod": nn.Linear(2, 2)}), "_orig_mod.weight")  # as torch.compile does
        'weight'
    """
    kept: list[str] = []
    module: nn.Module | None = model
    for part in path.split("."):
        child = None
        if module is not None:
            if part in ("_fsdp_wrapped_module", "_flat_param"):
                raise UnsupportedError(
                    "the model is wrapped in torch's FullyShardedDataParallel", hint="use shardwise.fully_shard"
                )
            hidden = _hidden_children(module, modifiers)
            inner = [module, *(module._modules[name] for name in hidden)]  # state dicts may omit the hidden names
            child = next((c._modules[part] for c in inner if c is not None and part in c._modules), None)
            if part in hidden:
                module = child
                continue
        kept.append(part)
        module = child
    return ".".join(kept)


def _hidden_children(module: nn.Module, modifiers: str) -> list[str]:
    """The children whose names are omitted."""
    if isinstance(module, DistributedDataParallel):
        return ["module"]
    hidden = [*WRAPPERS]
    if hasattr(module, modifiers):
        hidden += getattr(module, modifiers)().values()
    return [name for name in hidden if name in module._modules]


def named_tensors(model: nn.Module, options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers, under each of their names."""
    for of_kind in (model.named_parameters, model.named_buffers):
        for path, tensor in of_kind(remove_duplicate=False):
            yield canonical_name(model, path, options.dsd_fqn_modifiers), tensor


def by_names(model: nn.Module, given: Mapping[Any, Any], options: Any) -> Mapping[str, Any]:
    """A state dict by names; a dict from submodules to their state dicts is converted."""
    if not any(isinstance(key, nn.Module) for key in given):
        return given
    paths = {module: path for path, module in model.named_modules()}
    return {
        canonical_name(model, ".".join(filter(None, (paths[module], key))), options.dsd_fqn_modifiers): value
        for module, state in given.items()
        for key, value in state.items()
    }
