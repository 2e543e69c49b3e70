"""Dispatch keys that torch hides for a while: operators that see them, and numbers read from tensors meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shardwise.torch_private import DispatchKey, is_key_excluded, set_key_excluded

__all__ = ["NumberConversions", "seeing"]


@contextlib.contextmanager
def seeing(*keys: Any) -> Iterator[None]:
    """Operators called inside `__torch_dispatch__` see what these keys stand for; torch hides it there."""
    hidden = [is_key_excluded(key) for key in keys]
    for key in keys:
        set_key_excluded(key, False)
    try:
        yield
    finally:
        for key, was in zip(keys, hidden, strict=True):
            set_key_excluded(key, was)


class NumberConversions(torch.Tensor):
    """A wrapper whose numbers can be read by `torch.tensor([loss, 1.0])` and other factories that take numbers.

    They hide classes and modes of Python from the operators that they call, and those would read the memory of the
    wrapper, which it lacks.
    """

    __slots__ = ()

    def __float__(self) -> float:
        return _converted(self, "__float__")

    def __index__(self) -> int:
        return _converted(self, "__index__")

    def __complex__(self) -> complex:
        return _converted(self, "__complex__")


def _converted(tensor: torch.Tensor, name: str) -> Any:
    convert = getattr(torch.Tensor, name)  # which `sw.captured` replaces meanwhile
    if not is_key_excluded(DispatchKey.Python):
        return convert(tensor)
    with seeing(DispatchKey.Python, DispatchKey.PythonTLSSnapshot), torch.no_grad():
        return convert(tensor)
