"""Plain gradients where compiled code expects those of a tensor subclass, as the zeros of an output that is not used.

The compiler asks the gradient itself to become what it expects, and a plain tensor has no such method until it is given
one. It speaks for the registered classes alone: of anything else it says None, as if it were not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["accept_plain_tangents", "made_from_plain"]

_made: dict[type, Callable[[torch.Tensor, Any], torch.Tensor]] = {}


def made_from_plain(expected: type, make: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Register how a plain gradient becomes one of a class, given what that class's `__tensor_flatten__` says of it."""
    _made[expected] = make


def accept_plain_tangents() -> None:
    """Let compiled code accept plain gradients in place of those of registered classes."""
    if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
        torch.Tensor.__coerce_same_metadata_as_tangent__ = plain_tangent  # pyright: ignore[reportAttributeAccessIssue]


def plain_tangent(tangent: torch.Tensor, expected: Any, expected_type: type | None = None) -> torch.Tensor | None:
    """A plain gradient, alike on every rank, as compiled code expects it."""
    make = None if expected_type is None else _made.get(expected_type)
    return None if make is None or tangent.__class__ is not torch.Tensor else make(tangent, expected)
