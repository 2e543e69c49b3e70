"""Which versions of transformers are supported, and the import of it."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

__all__ = ["NEWEST", "OLDEST", "check_loaded", "load_transformers"]

# The versions that the models are tested with, by their first two numbers. Newer ones are expected to work.
OLDEST, NEWEST = (5, 17), (5, 23)


def load_transformers() -> Any:
    """The package transformers. The ImportError has the command that installs it."""
    try:
        module = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "shardwise.hf loads models of transformers, which is not installed; "
            f"pip install 'transformers>={_text(OLDEST)}'"
        ) from None
    check_version(module)
    return module


def check_loaded() -> None:
    """Check the version of transformers if it is loaded: only then can there be a model of it."""
    module = sys.modules.get("transformers")
    if module is not None:
        check_version(module)


def check_version(module: ModuleType) -> None:
    """Raise for a version that is older than the supported ones; warn once of a newer one."""
    text = str(getattr(module, "__version__", ""))
    found = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if len(found) < 2 or found < OLDEST:
        raise ImportError(
            f"transformers {text or 'of unknown version'} is not supported by shardwise.hf, which was tested with "
            f"{_text(OLDEST)} to {_text(NEWEST)}; pip install 'transformers>={_text(OLDEST)}'"
        )
    if found > NEWEST and not _warned:
        _warned.append(text)
        warnings.warn(
            f"transformers {text} is newer than {_text(NEWEST)}, the newest version that shardwise.hf was tested with",
            stacklevel=3,
        )


_warned: list[str] = []


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
