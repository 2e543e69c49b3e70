"""Deferred imports: functions that run when a module is first imported, or that import their module when called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["when_called", "when_imported"]


def when_called(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a module that is imported at the first call.

    Example:
        >>> when_called("json", "dumps")([1])
        '[1]'
    """
    return lambda *args: getattr(importlib.import_module(module), name)(*args)


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call `function(module)` now if the module is loaded, else right after it is loaded.

    Args:
        name: the full name of the module.
        function: called with the module.

    Example:
        >>> when_imported("json", lambda module: print(module.__name__))
        json
    """
    module = sys.modules.get(name)
    if module is not None:
        function(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, function))


class _Waiting(MetaPathFinder):
    """Finds one module as Python would, then removes itself from `sys.meta_path`."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        spec.loader = _Then(spec.loader, self.function)
        return spec


class _Then(Loader):
    """A loader that calls a function after the module."""

    def __init__(self, loader: Any, function: Callable[[ModuleType], None]) -> None:
        self.loader, self.function = loader, function

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.function(module)

    def __getattr__(self, name: str) -> Any:  # other attributes of a loader: its source, its path
        return getattr(self.loader, name)
