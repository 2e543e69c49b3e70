"""Imports that wait: what runs when a module is first imported, and functions whose module is imported by a call."""

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


def when_imported(name: str, run: Callable[[ModuleType], None]) -> None:
    """Call `run(module)` now if the module is loaded, and otherwise right after it is.

    Args:
        name: the full name of the module.
        run: the function, called with the module.

    Example:
        >>> when_imported("json", lambda module: print(module.__name__))
        json
    """
    module = sys.modules.get(name)
    if module is not None:
        run(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, run))


class _Waiting(MetaPathFinder):
    """Finds one module as Python would, and leaves `sys.meta_path` then."""

    def __init__(self, name: str, run: Callable[[ModuleType], None]) -> None:
        self.name, self.run = name, run

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        spec.loader = _Then(spec.loader, self.run)
        return spec


class _Then(Loader):
    """A loader that runs something after the module."""

    def __init__(self, loader: Any, run: Callable[[ModuleType], None]) -> None:
        self.loader, self.run = loader, run

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.run(module)

    def __getattr__(self, name: str) -> Any:  # other attributes of a loader: its source, its path
        return getattr(self.loader, name)
