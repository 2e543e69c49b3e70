"""Plain gradients where compiled code expects a tensor subclass, such as the zeros of an unused output.

The compiler calls a method of the gradient to convert it, which plain tensors lack. This module adds the method. It
converts to registered classes, and returns None for any other, as if the method did not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["accept_plain_tangents", "made_from_plain"]

_made: dict[type, Callable[[torch.Tensor, Any], torch.Tensor]] = {}


def made_from_plain(expected: type, make: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Register how a plain gradient becomes one of a class, given the context of that class's `__tensor_flatten__`."""
    _made[expected] = make


def accept_plain_tangents() -> None:
    """Let compiled code accept plain gradients in place of those of registered classes."""
    if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
        torch.Tensor.__coerce_same_metadata_as_tangent__ = plain_tangent  # pyright: ignore[reportAttributeAccessIssue]


def plain_tangent(tangent: torch.Tensor, expected: Any, expected_type: type | None = None) -> torch.Tensor | None:
    """A plain gradient, equal on every rank, in the class that compiled code expects."""
    make = None if expected_type is None else _made.get(expected_type)
    return None if make is None or tangent.__class__ is not torch.Tensor else make(tangent, expected)
