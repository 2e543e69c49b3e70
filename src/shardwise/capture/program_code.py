"""Which code belongs to the program, and the names that it uses."""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch

__all__ = [
    "attributes_of",
    "code_inside",
    "imported_by",
    "is_own_code",
    "is_program_code",
    "is_standard",
    "names_of_code",
]


def _folders(*paths: str | Path) -> tuple[str, ...]:
    """Folders as code may name them: by the path that was imported from, and without links; with a separator."""
    return tuple({f"{form}{os.sep}": None for path in paths for form in (Path(path), Path(path).resolve())})


_LIBRARIES = _folders(Path(torch.__file__).parent, Path(__file__).parents[1])
_OWN = _folders(Path(__file__).parents[1])
_PARALLEL = _folders(Path(__file__).parents[1] / "parallel")
_DATA_PARALLEL = _folders(Path(__file__).parents[1] / "parallel" / "data_parallel")  # it says itself what is read
_STANDARD = _folders(sysconfig.get_paths()["stdlib"])
_INSTALLED = ("/site-packages/", "/dist-packages/")  # inside the standard library's folder, for all environments of it


@functools.cache
def _dependencies() -> tuple[str, ...]:
    """Folders of modules that torch, this library and type checks in tests use."""
    names = ("numpy", "sympy", "mpmath", "networkx", "rich", "beartype")
    specs = [importlib.util.find_spec(name) for name in names]
    return _folders(*(Path(spec.origin).parent for spec in specs if spec is not None and spec.origin is not None))


@functools.cache
def is_program_code(filename: str) -> bool:
    """Whether a file belongs to the program: not to torch, the standard library or this library (but for plans).

    Example:
        >>> is_program_code("train.py"), is_program_code(torch.__file__)
        (True, False)
    """
    if filename.startswith(("<frozen", "<@beartype")) or filename.endswith("/site-packages/typing_extensions.py"):
        return False
    if filename.startswith(_PARALLEL):
        return not filename.startswith(_DATA_PARALLEL)
    return not filename.startswith((*_LIBRARIES, *_dependencies())) and not is_standard(filename)


@functools.cache
def is_standard(filename: str) -> bool:
    """Whether a file belongs to the standard library."""
    return filename.startswith((*_STANDARD, "<frozen")) and not any(name in filename for name in _INSTALLED)


@functools.cache
def is_own_code(filename: str) -> bool:
    """Whether a file is one of this library, whose functions nobody gives other code."""
    return filename.startswith(_OWN)


def code_inside(codes: Iterable[types.CodeType]) -> set[types.CodeType]:
    """Code, with that of the functions and classes which it makes."""
    found: set[types.CodeType] = set()
    waiting = list(codes)
    while waiting:
        code = waiting.pop()
        if code not in found:
            found.add(code)
            waiting += [item for item in code.co_consts if isinstance(item, types.CodeType)]
    return found


@functools.cache
def names_of_code(code: types.CodeType) -> frozenset[str]:
    """The global names that code uses, with those of the functions inside it."""
    own = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _GLOBAL}
    return frozenset(chain(own, *(names_of_code(item) for item in code.co_consts if isinstance(item, types.CodeType))))


_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"})


@functools.cache
def attributes_of(code: types.CodeType) -> frozenset[str]:
    """The names that code uses in any way, also as strings, with those of the functions inside it."""
    texts = [item for item in code.co_consts if isinstance(item, str) and item.isidentifier()]
    inner = (attributes_of(item) for item in code.co_consts if isinstance(item, types.CodeType))
    return frozenset(chain(code.co_names, texts, *inner))


@functools.cache
def _imports_of(code: types.CodeType) -> frozenset[tuple[str, int]]:
    """The modules that code imports, each with the number of dots before its name."""
    instructions = list(dis.get_instructions(code))
    own = {
        (one.argval, instructions[at - 2].argval or 0)
        for at, one in enumerate(instructions)
        if one.opname == "IMPORT_NAME"
    }
    return frozenset(chain(own, *(_imports_of(item) for item in code.co_consts if isinstance(item, types.CodeType))))


def imported_by(code: types.CodeType, package: str | None) -> list[types.ModuleType]:
    found = []
    for name, dots in sorted(_imports_of(code)):
        absolute = importlib.util.resolve_name("." * dots + name, package) if dots and package else name
        parts = absolute.split(".")
        names = [".".join(parts[: at + 1]) for at in range(len(parts))]
        found += [sys.modules[each] for each in names if isinstance(sys.modules.get(each), types.ModuleType)]
    return found
