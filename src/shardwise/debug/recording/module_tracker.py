"""Tracks the module whose forward is running, by torch's global hooks, and the module of each parameter.

The path of a module starts at the outermost module that was called: `Transformer.blocks.0.mlp`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["ModuleTracker"]


class ModuleTracker:
    """Between `start` and `stop`, tracks the module that runs on each thread."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._owners: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}
        self._running = threading.local()
        self._handles: list[Any] = []
        self._on_enter: Callable[[nn.Module, str], None] | None = None

    def start(self, on_enter: Callable[[nn.Module, str], None]) -> None:
        """Register the hooks. `on_enter` is called with each module whose forward begins, and its path."""
        self._on_enter = on_enter
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Remove the hooks and clear all paths."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._running = threading.local()
        self._paths.clear()
        self._owners.clear()

    @property
    def current(self) -> str:
        """The path of the innermost module that runs on this thread; "" outside all modules."""
        running = getattr(self._running, "paths", None)
        return running[-1] if running else ""

    def path_of(self, module: nn.Module) -> str:
        """The path of a module. A module that is not a known submodule is a root, named by its class."""
        path = self._paths.get(module)
        if path is None:
            path = type(module).__name__
            for name, part in module.named_modules():
                self._paths.setdefault(part, f"{path}.{name}" if name else path)
        return path

    def owner_of(self, tensor: torch.Tensor) -> tuple[str, str]:
        """The module path and the name of a parameter or of a view's base; ("", "") for other tensors."""
        for one in (tensor, tensor._base):
            found = None if one is None else self._owners.get(id(one))
            if found is not None and found[0]() is one:
                return found[1], found[2]
        return "", ""

    def _enter(self, module: nn.Module, args: Any) -> None:
        path = self.path_of(module)
        for name, parameter in module.named_parameters(recurse=False):
            self._owners[id(parameter)] = (weakref.ref(parameter), path, name)
        if not hasattr(self._running, "paths"):
            self._running.paths = []
        self._running.paths.append(path)
        if self._on_enter is not None:
            self._on_enter(module, path)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        running = getattr(self._running, "paths", None)
        if running:  # the hooks may have been registered while the module was running
            running.pop()
